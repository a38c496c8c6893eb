"""Schedules that run all forwards before the first backward: GPipe, and over chunks looped BFS."""

from __future__ import annotations

from dataclasses import replace

from echelon.pipeline.plan.action import Action, loop
from echelon.pipeline.plan.schedule import Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the GPipe schedule (Huang et al., 2019, section 2.3). Every rank holds all microbatches at once.

    3 ranks, 4 microbatches:

        rank 0  0F0 0F1 0F2 0F3                         0B0---- 0B1---- 0B2---- 0B3----
        rank 1      1F0 1F1 1F2 1F3             1B0---- 1B1---- 1B2---- 1B3----
        rank 2          2F0 2F1 2F2 2F3 2B0---- 2B1---- 2B2---- 2B3----
    """
    return replace(looped_bfs(num_ranks, num_microbatches, 1), name="gpipe")


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Returns the breadth-first schedule: all microbatches through one chunk, then through the next.

    Every rank holds all microbatches of all chunks (Lamy-Poirier, 2022, section 4). 2 ranks, 2 chunks, 3 microbatches:

        rank 0  0F0 0F1 0F2 2F0 2F1 2F2             2B0---- 2B1---- 2B2---- 0B0---- 0B1---- 0B2----
        rank 1      1F0 1F1 1F2 3F0 3F1 3F2 3B0---- 3B1---- 3B2---- 1B0---- 1B1---- 1B2----
    """
    microbatches, chunks = range(num_microbatches), range(num_chunks)
    return Schedule(
        name="looped-bfs",
        num_microbatches=num_microbatches,
        placement=loop(num_ranks, num_chunks),
        orders=tuple(
            (
                *(Action(chunk * num_ranks + rank, "F", i) for chunk in chunks for i in microbatches),
                *(Action(chunk * num_ranks + rank, "B", i) for chunk in reversed(chunks) for i in microbatches),
            )
            for rank in range(num_ranks)
        ),
    )
