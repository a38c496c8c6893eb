"""Betters a shape by changing a few neighbouring ranks at a time, as long as that helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from echelon.pipeline.search.warm_ups import Shape


def climb(shape: Shape, score: Callable[[Shape], tuple[int, int] | None]) -> None:
    """Walks from a shape to better ones: all ranks, then halves of them, down to single ranks, one more or one less.

    Args:
        shape: Where to start.
        score: Says how good a shape is, lower is better; None says stop.
    """
    best = score(shape)
    improved = True
    while improved and best is not None:
        improved = False
        for window in _windows(len(shape[0])):
            for row in range(len(shape)):
                for change in (1, -1):
                    changed = _changed(shape, row, window, change)
                    new = score(changed)
                    if new is None:
                        return
                    if new < best:
                        shape, best, improved = changed, new, True


def _windows(num_ranks: int) -> Iterator[range]:
    size = num_ranks
    while size:
        for first in range(0, num_ranks, size):
            yield range(first, min(first + size, num_ranks))
        size //= 2


def _changed(shape: Shape, row: int, window: range, change: int) -> Shape:
    rows = list(shape)
    rows[row] = tuple(value + change if rank in window else value for rank, value in enumerate(rows[row]))
    return tuple(rows)
