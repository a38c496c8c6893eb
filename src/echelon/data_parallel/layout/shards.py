"""Layout of optimizer shards: a plan of which rank keeps which part of the parameters. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of one parameter, in memory order."""

    parameter: int
    """The parameter's number."""
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def shard_layout(sizes: Sequence[int], num_shards: int) -> tuple[tuple[Piece, ...], ...]:
    """Cuts a row of parameters into shards of equal size, give or take one element.

    The cuts fall anywhere, within parameters too, so no shard is larger because of one large parameter. Sizes 5 and 3
    in two shards:

        parameter   0 0 0 0 0 1 1 1
        shard       0 0 0 0 1 1 1 1

    Args:
        sizes: elements of each parameter.
        num_shards: number of shards, at least 1.

    Returns:
        The pieces of each shard, in order. A shard can be empty; no piece is.
    """
    total = sum(sizes)
    # Rounded per bound, not per shard, so that sizes differ by at most 1 and add up to the total.
    bounds = [total * shard // num_shards for shard in range(num_shards + 1)]
    return tuple(pieces_between(sizes, first, last) for first, last in pairwise(bounds))


def pieces_between(sizes: Sequence[int], first: int, last: int) -> tuple[Piece, ...]:
    """Returns the pieces that make up elements `first` to `last` of the row of parameters."""
    pieces = []
    begin = 0
    for parameter, size in enumerate(sizes):
        start, stop = max(first - begin, 0), min(last - begin, size)
        if start < stop:
            pieces.append(Piece(parameter, start, stop))
        begin += size
    return tuple(pieces)
