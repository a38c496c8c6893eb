"""V-Half and V-Min: V-shaped schedules from the times of one microbatch, repeated at equal intervals.

Each stage needs three units of time per microbatch (F, I, W) and each rank holds two stages, so a new microbatch starts
every six units. A microbatch goes down the ranks and back up, and its gradients return on the same two ways. The units
per hop on these four ways decide how long activations are held, and so the memory (Pipeline Parallelism with
Controllable Memory; Qi et al., 2024).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from echelon.pipeline.plan.action import Action, Kind, vee
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.search.list_scheduler import pull_forward
from echelon.pipeline.search.problem import problem
from echelon.pipeline.search.weight_placement import fill, skeleton_of, to_actions

_INTERVAL = 6  # 2 stages per rank x 3 actions of one unit each
_WINDOW = 4


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the V-Half schedule: half of 1F1B's memory, both chunks of (num_ranks + 2) // 2 microbatches.

    It is the building block with warm-up and drain pulled together as far as the memory allows, for F, I and W of equal
    time. The bubble is then about 3 num_ranks of these times. 2 ranks, 4 microbatches:

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 0F3 3W1 3F2 0I1 3I2 0W1 3W2 3F3 3I3 0I2 3W3 0I3 0W2 0W3
        rank 1      1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3
    """
    # The rests keep the actions of different microbatches apart on every rank; an odd number of ranks needs fewer.
    block = Block(1, 2, 1, 2, rests=(0, 0, 1) if num_ranks % 2 else (0, 3, 1))
    placement = vee(num_ranks)
    # In chunks, of which a rank has two per microbatch.
    limits = [2 * ((num_ranks + 2) // 2)] * num_ranks
    equal = problem(Costs(1, 1, 1), placement, num_microbatches, limits)
    pulled = pull_forward(equal, skeleton_of(block.orders(num_ranks, num_microbatches)), _WINDOW)
    assert pulled is not None
    filled = fill(equal, pulled)
    assert filled is not None
    return Schedule("v-half", num_microbatches, placement, to_actions(filled.orders))


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the V-Min schedule: a third of 1F1B's memory, both chunks of (num_ranks + 4) // 3 microbatches.

    If F, I and W take equally long, the bubble is 4 num_ranks - 5 of these times (one more if 3 divides num_ranks).
    2 ranks, 4 microbatches:

    rank 0  0F0         3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2 0F3 0I2 0W2 3F3 3I3 3W3     0I3 0W3
    rank 1      1F0 2F0         2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 1F3 2F3 2W2 1W2 2I3 1I3 2W3 1W3
    """
    # Each hop takes one unit, the least possible. If 3 divides num_ranks, two actions would then fall on the same unit
    # of a rank, and rests of 2 units keep them apart.
    rest = 0 if num_ranks % 3 else 2
    return Schedule(
        name="v-min",
        num_microbatches=num_microbatches,
        placement=vee(num_ranks),
        orders=Block(1, 1, 1, 1, rests=(rest, 0, rest)).orders(num_ranks, num_microbatches),
    )


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
