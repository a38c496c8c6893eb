"""Building block of V-shaped schedules: the times of one microbatch, repeated at equal intervals.

Each stage needs three units of time per microbatch (F, I, W) and each rank holds two stages, so a new microbatch starts
every six units. A microbatch goes down the ranks and back up, and its gradients return on the same two ways. The units
per hop on these four ways decide how long activations are held, and so the memory (Pipeline Parallelism with
Controllable Memory; Qi et al., 2024).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from echelon.pipeline.plan.action import Action, Kind

_INTERVAL = 6  # 2 stages per rank x 3 actions of one unit each


class Block(NamedTuple):
    """Units of time per hop on the four ways, and units of rest at the three turns between them.

    No two actions of a rank may fall on the same unit of the interval.
    """

    forward_down: int
    forward_up: int
    backward_down: int
    backward_up: int
    rests: tuple[int, int, int]

    def orders(self, num_ranks: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
        """Returns the actions of each rank, in order."""
        return tuple(self._order(rank, num_ranks, num_microbatches) for rank in range(num_ranks))

    def _order(self, rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
        starts = self._starts(rank, num_ranks)
        timed = [
            (start + _INTERVAL * microbatch, Action(stage, kind, microbatch))
            for (stage, kind), start in starts.items()
            for microbatch in range(num_microbatches)
        ]
        return tuple(action for _, action in sorted(timed))

    def _starts(self, rank: int, num_ranks: int) -> dict[tuple[int, Kind], int]:
        """Returns the start of each action of microbatch 0 on a rank."""
        hops, later = num_ranks - 1, num_ranks - 1 - rank
        down, up = rank, 2 * num_ranks - 1 - rank
        turns = [0]
        for per_hop, rest in zip((self.forward_down, self.forward_up, self.backward_down), self.rests, strict=True):
            turns.append(turns[-1] + per_hop * hops + 1 + rest)
        starts: dict[tuple[int, Kind], int] = {
            (down, "F"): turns[0] + self.forward_down * rank,
            (up, "F"): turns[1] + self.forward_up * later,
            (up, "I"): turns[2] + self.backward_down * rank,
            (down, "I"): turns[3] + self.backward_up * later,
        }
        # The upper stage's I comes first, so its W chooses first as well.
        for stage in (up, down):
            starts[stage, "W"] = _next_free(starts[stage, "I"], starts.values())
        return starts


def _next_free(after: int, taken: Collection[int]) -> int:
    # Modulo the interval, since every other microbatch repeats the same units.
    units = {start % _INTERVAL for start in taken}
    return next(start for start in range(after + 1, after + _INTERVAL) if start % _INTERVAL not in units)
