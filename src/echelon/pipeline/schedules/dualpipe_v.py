"""DualPipeV: forwards and backwards of two chunks overlap, each hiding the other's transfers (DeepSeek, 2025).

The V-shaped half of DualPipe (DeepSeek-V3 technical report, section 3.2.1). 2 ranks, 4 microbatches:

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3;3B1----     3F2;0B0---- 3B2----     3F3;0B1---- 3B3---- 0I2 0W2 0I3 0W3
    rank 1      1F0 2F0 1F1 2F1 1F2 2B0---- 2F2;1B0---- 1F3;2B1---- 2F3;1B1---- 2B2---- 1B2----     2I3 1I3 2W3 1W3
"""

from __future__ import annotations

from collections import deque

from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import Action, Kind, Overlapped, Step, vee
from echelon.pipeline.plan.schedule import Schedule


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the DualPipeV schedule. A rank holds the activations of at most 2 num_ranks + 1 chunks.

    Raises:
        ScheduleError: fewer than 2 microbatches per rank.
    """
    if num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"num_microbatches={num_microbatches}: dualpipe-v needs at least 2 per rank; "
            f"give {2 * num_ranks} or more for {num_ranks} ranks"
        )
    return Schedule(
        name="dualpipe-v",
        num_microbatches=num_microbatches,
        placement=vee(num_ranks),
        orders=tuple(_OrderBuilder(rank, num_ranks).order(num_microbatches) for rank in range(num_ranks)),
    )


class _OrderBuilder:
    """Builder of one rank's order. One of its two stages is on the way down, the other on the way up."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.later = num_ranks - 1 - rank
        self.down, self.up = rank, 2 * num_ranks - 1 - rank
        self.steps: list[Step] = []
        self.counts = dict.fromkeys([(stage, kind) for stage in (self.down, self.up) for kind in "FB"], 0)
        self.weights: deque[Action] = deque()

    def order(self, num_microbatches: int) -> tuple[Step, ...]:
        """Returns the order: warm-up, overlapped pairs, drain."""
        for _ in range(2 * self.later):
            self.run(self.down, "F")
        for _ in range(self.rank + 1):
            self.run(self.down, "F")
            self.run(self.up, "F")
        for _ in range(self.later):
            # The I alone lets the previous stage go on early; its W fills the time until the next F has its input.
            self.run(self.up, "I")
            self.run_weight()
            self.run(self.up, "F")
        for turn in range(num_microbatches - 2 * self.later - self.rank - 1):
            # Not the first pair on the last rank: its backward would wait for the pair's own forward to arrive at
            # another rank.
            self.pair(self.down, self.up, overlap=turn > 0 or self.later > 0)
            self.pair(self.up, self.down)
        for _ in range(self.later):
            self.run(self.up, "B")
            self.pair(self.up, self.down)
        drain = [stage for _ in range(self.rank + 1) for stage in (self.up, self.down)]
        # The second half of the drain has gaps. From its middle on the backward is split, and W's fill these gaps.
        for turn, stage in enumerate(drain):
            self.run(stage, "B" if turn <= self.rank else "I")
        for _ in range(self.later):
            self.run_weight()
            self.run(self.down, "I")
        while self.weights:
            self.run_weight()
        return tuple(self.steps)

    def next(self, stage: int, kind: Kind) -> Action:
        """Returns an action for the next microbatch of a stage, counted separately for forward and backward."""
        direction = "F" if kind == "F" else "B"
        microbatch = self.counts[stage, direction]
        self.counts[stage, direction] += 1
        return Action(stage, kind, microbatch)

    def run(self, stage: int, kind: Kind) -> None:
        """Adds an action. The W of an I goes to the queue `weights`."""
        action = self.next(stage, kind)
        self.steps.append(action)
        if kind == "I":
            self.weights.append(action._replace(kind="W"))

    def run_weight(self) -> None:
        """Adds the oldest W of the queue, if there is one."""
        if self.weights:
            self.steps.append(self.weights.popleft())

    def pair(self, forward: int, backward: int, overlap: bool = True) -> None:
        """Adds a forward and a backward, overlapped or one after the other."""
        both = self.next(forward, "F"), self.next(backward, "B")
        self.steps.extend([Overlapped(*both)] if overlap else both)
