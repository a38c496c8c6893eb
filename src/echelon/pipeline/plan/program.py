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

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import Action, Step, actions_of
from echelon.pipeline.plan.schedule import Schedule

# Proves that a program runs to its end, whatever the ranks' speeds.
#
# A program stands still only where it waits: at a RECV for a message, at the FLUSH for what it sent. It is played with
# the strictest network there can be, which takes a message only when its receive is posted. What a rank does never
# depends on who is faster, so if one order of all instructions comes to the end, every other does, and on every
# network that can hold more.

_MOST_PRINTED = 20


class _Order(NamedTuple):
    """One instruction must come before another."""

    first: Instruction
    second: Instruction


def check_program(program: Program) -> None:
    """Checks a program against its schedule, and plays it.

    Raises:
        ScheduleError: it lists every problem: steps that are not the schedule's, an instruction around them that is
            missing, doubled, or not before or after what it must be, or ranks that wait for ever.
    """
    problems = [problem for rank in range(len(program.orders)) for problem in _of_rank(program, rank)]
    problems = problems or list(_standing(program))
    if problems:
        more = [f"and {len(problems) - _MOST_PRINTED} more"] if len(problems) > _MOST_PRINTED else []
        lines = [f"  - {problem}" for problem in [*problems[:_MOST_PRINTED], *more]]
        raise ScheduleError("\n".join([f"the program of {program.schedule.name!r} cannot run:", *lines]))


def _of_rank(program: Program, rank: int) -> Iterator[str]:
    """Yields what is wrong with one rank's order, taken alone."""
    order = program.orders[rank]
    steps = tuple(instruction.step for instruction in order if isinstance(instruction, Compute))
    if steps != program.schedule.orders[rank]:
        yield f"rank {rank} does not run the steps of the schedule in its order"
        return
    rules = list(_rules(program, rank))
    expected = Counter({instruction: 1 for rule in rules for instruction in rule})
    given = Counter(order)
    yield from (f"rank {rank} lacks {instruction}" for instruction in expected - given)
    yield from (f"rank {rank} has {instruction} without need" for instruction in given - expected)
    if expected == given:
        at = {instruction: index for index, instruction in enumerate(order)}
        for first, second in rules:
            if at[first] >= at[second]:
                yield f"rank {rank} has {first} after {second}"


def _rules(program: Program, rank: int) -> Iterator[_Order]:
    """Yields what must come before what. Every instruction of a rank is in at least one rule, and no other."""
    schedule, placement = program.schedule, program.schedule.placement
    forwards: dict[tuple[int, int], Compute] = {}
    for step in schedule.orders[rank]:
        compute = Compute(step)
        yield _Order(compute, Flush())
        for transfer in needed(step, schedule.num_stages):
            if (peer := placement[transfer.source]) != rank:
                yield _Order(Post(transfer, peer), Receive(transfer, peer))
                yield _Order(Receive(transfer, peer), compute)
        for transfer in made(step, schedule.num_stages):
            if (peer := placement[transfer.stage]) != rank:
                yield _Order(compute, Send(transfer, peer))
                yield _Order(Send(transfer, peer), Flush())
        for action in actions_of(step):
            yield from _rules_of_action(program, action, compute, forwards)


def _rules_of_action(
    program: Program, action: Action, compute: Compute, forwards: dict[tuple[int, int], Compute]
) -> Iterator[_Order]:
    stage, kind, microbatch = action
    if kind == "F":
        forwards[stage, microbatch] = compute
    elif kind != "W" and stage in program.recomputed:
        again = Recompute(stage, microbatch)
        yield _Order(again, compute)
        yield _Order(forwards[stage, microbatch], again)
    if kind in ("B", "W"):
        yield _Order(compute, Reduce(stage))
        yield _Order(Reduce(stage), Flush())


def _standing(program: Program) -> Iterator[str]:
    """Plays the program and yields where each rank stands that does not come to its end."""
    positions = [0] * len(program.orders)
    posted: set[Transfer] = set()
    arrived: set[Transfer] = set()
    sent: list[set[Transfer]] = [set() for _ in program.orders]

    def goes_on(rank: int, instruction: Instruction) -> bool:
        match instruction:
            case Post(transfer, _):
                posted.add(transfer)
            case Send(transfer, _):
                arrived.add(transfer)
                sent[rank].add(transfer)
            case Receive(transfer, _):
                return transfer in arrived
            case Flush():
                return sent[rank] <= posted
        return True

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(program.orders):
            while positions[rank] < len(order) and goes_on(rank, order[positions[rank]]):
                positions[rank] += 1
                moved = True
    for rank, order in enumerate(program.orders):
        if positions[rank] < len(order):
            yield f"rank {rank} waits for ever at {order[positions[rank]]}, its instruction {positions[rank]}"


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
