"""A schedule spelt out as what each rank does: computing, and all that it needs around it.

    1POST_F0    a receive is posted: the input of stage 1 for microbatch 0 may arrive from now on
    1RECV_F0    it has arrived
    1F0         a step of the schedule
    0RECOMPUTE0 the forward is run again for the backward that follows
    1SEND_B0    what the step made, a gradient for stage 0, starts to leave; nobody waits for it
    1REDUCE     stage 1 has all gradients of its weights: from now on they are averaged over its replicas
    FLUSH       all that was sent has left

What a stage hands to another one of the same rank is no instruction: it is there when it is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from echelon.pipeline.action import Step, actions_of
from echelon.pipeline.schedule import Schedule

LOOKAHEAD = 3
"""How many steps before it is needed a receive is posted."""


class Transfer(NamedTuple):
    """What one stage makes for the next one (forward) or the one before (backward), for one microbatch."""

    stage: int
    """The stage that it is for."""
    microbatch: int
    backward: bool

    @property
    def source(self) -> int:
        """The stage that makes it."""
        return self.stage + 1 if self.backward else self.stage - 1

    @property
    def letter(self) -> str:
        """F or B."""
        return "B" if self.backward else "F"


@dataclass(frozen=True, slots=True)
class _Move:
    """A part of moving a transfer from or to rank `peer`."""

    transfer: Transfer
    peer: int

    def _text(self, stage: int, word: str) -> str:
        return f"{stage}{word}_{self.transfer.letter}{self.transfer.microbatch}"


class Post(_Move):
    """From here on the transfer may arrive from rank `peer`."""

    __slots__ = ()

    def __str__(self) -> str:
        return self._text(self.transfer.stage, "POST")


class Receive(_Move):
    """Waits until the transfer has arrived from rank `peer`."""

    __slots__ = ()

    def __str__(self) -> str:
        return self._text(self.transfer.stage, "RECV")


class Send(_Move):
    """Starts to send the transfer to rank `peer`."""

    __slots__ = ()

    def __str__(self) -> str:
        return self._text(self.transfer.source, "SEND")


@dataclass(frozen=True, slots=True)
class Recompute:
    """Runs the forward of a stage again."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}RECOMPUTE{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Runs a step of the schedule."""

    step: Step

    def __str__(self) -> str:
        return str(self.step)


@dataclass(frozen=True, slots=True)
class Reduce:
    """Starts to average the gradients of a stage over its replicas."""

    stage: int

    def __str__(self) -> str:
        return f"{self.stage}REDUCE"


@dataclass(frozen=True, slots=True)
class Flush:
    """Waits until all that was sent has left."""

    def __str__(self) -> str:
        return "FLUSH"


Instruction: TypeAlias = Post | Receive | Send | Recompute | Compute | Reduce | Flush


@dataclass(frozen=True, repr=False)
class Program:
    """What all ranks do, in which order. `str` is a line per rank."""

    schedule: Schedule
    orders: tuple[tuple[Instruction, ...], ...]
    recomputed: frozenset[int] = frozenset()
    """The stages whose forward is run again before their backward."""

    def __repr__(self) -> str:
        return f"<Program of {self.schedule!r}: {sum(map(len, self.orders))} instructions>"

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, order)) for order in self.orders)


def lower(schedule: Schedule, recomputed: Collection[int] = (), lookahead: int = LOOKAHEAD) -> Program:
    """Spells a schedule out.

    Args:
        schedule: one without problems.
        recomputed: the stages that keep their input alone from forward to backward.
        lookahead: how many steps before the one that needs it a receive is posted.
    """
    again = frozenset(recomputed)
    orders = (tuple(_order(schedule, rank, again, lookahead)) for rank in range(schedule.num_ranks))
    return Program(schedule, tuple(orders), again)


def needed(step: Step, num_stages: int) -> Iterator[Transfer]:
    """Yields what a step needs of other stages."""
    for stage, kind, microbatch in actions_of(step):
        transfer = Transfer(stage, microbatch, kind != "F")
        if kind != "W" and 0 <= transfer.source < num_stages:
            yield transfer


def made(step: Step, num_stages: int) -> Iterator[Transfer]:
    """Yields what a step makes for other stages."""
    for stage, kind, microbatch in actions_of(step):
        target = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= target < num_stages:
            yield Transfer(target, microbatch, kind != "F")


def _order(schedule: Schedule, rank: int, recomputed: Collection[int], lookahead: int) -> Iterator[Instruction]:
    placement, steps, count = schedule.placement, schedule.orders[rank], schedule.num_stages
    incoming = [
        [(item, placement[item.source]) for item in needed(step, count) if placement[item.source] != rank]
        for step in steps
    ]
    last = _last_backwards(steps)
    posted = 0
    for index, step in enumerate(steps):
        for there in range(posted, min(len(steps), index + lookahead)):
            yield from (Post(*pair) for pair in incoming[there])
        posted = max(posted, min(len(steps), index + lookahead))
        yield from (Receive(*pair) for pair in incoming[index])
        for stage, kind, microbatch in actions_of(step):
            if kind in ("B", "I") and stage in recomputed:
                yield Recompute(stage, microbatch)
        yield Compute(step)
        for transfer in made(step, count):
            if placement[transfer.stage] != rank:
                yield Send(transfer, placement[transfer.stage])
        yield from (Reduce(stage) for stage in last.get(index, ()))
    yield Flush()


def _last_backwards(steps: Sequence[Step]) -> dict[int, list[int]]:
    """Returns after which steps which stages have all gradients of their weights."""
    index_of = {
        stage: index for index, step in enumerate(steps) for stage, kind, _ in actions_of(step) if kind in ("B", "W")
    }
    stages: dict[int, list[int]] = {}
    for stage, index in index_of.items():
        stages.setdefault(index, []).append(stage)
    return stages
