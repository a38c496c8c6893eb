"""Which rank holds which stage."""

from __future__ import annotations


def loop(num_ranks: int, num_chunks: int = 1) -> tuple[int, ...]:
    """Goes round the ranks: stage s is on rank s mod num_ranks. 3 ranks x 2 chunks: 0 1 2 0 1 2."""
    return tuple(range(num_ranks)) * num_chunks


def vee(num_ranks: int) -> tuple[int, ...]:
    """Goes down the ranks and back up, 2 stages on each: 0 1 2 2 1 0. The first and the last stage share rank 0."""
    down = tuple(range(num_ranks))
    return down + down[::-1]
