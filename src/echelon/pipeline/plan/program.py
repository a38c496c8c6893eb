"""Program of a pipeline: a schedule with the communication, recomputation and reductions that its steps need.

    1POST_F0    post the receive of stage 1's input for microbatch 0; the message may arrive from now on
    1RECV_F0    wait for that message
    1F0         run a step of the schedule
    0RECOMPUTE0 run the forward of stage 0 again for the backward that follows
    1SEND_B0    start to send the input gradient of stage 1 to stage 0; returns at once
    1REDUCE     start to average the weight gradients of stage 1, now complete, over its replicas
    FLUSH       wait until all sends are done

Data between two stages of one rank needs no instruction: it is available as soon as it is computed.

Strategy of `check_program`. It proves that a program runs to its end for any speeds of the ranks. A program blocks only
at a RECV, for a message, and at the FLUSH, for its sends. It is played on the strictest network possible, which takes a
message only when its receive is posted. The order of a rank's instructions never depends on who is faster. So if one
interleaving of all instructions comes to the end, every other does, and on every network that can buffer more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import Action, Handover, Step, actions_of
from echelon.pipeline.plan.schedule import Schedule
from echelon.wording import itemized


class _Order(NamedTuple):
    """Rule that one instruction comes before another."""

    first: Instruction
    second: Instruction


def check_program(program: Program) -> None:
    """Checks a program against its schedule, and plays it.

    Raises:
        ScheduleError: it lists the problems: steps that differ from the schedule's, an instruction that is missing,
            doubled or in the wrong place, or ranks that wait for ever.
    """
    problems = [problem for rank in range(len(program.orders)) for problem in _of_rank(program, rank)]
    # Played only if each rank is right by itself: a missing SEND would show up again as a wait.
    problems = problems or list(_standing(program))
    if problems:
        title = f"the program of {program.schedule.name!r} cannot run:"
        raise ScheduleError("\n".join([title, *itemized(problems)]))


def _of_rank(program: Program, rank: int) -> Iterator[str]:
    """Yields the problems of one rank's order by itself."""
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
    # Places are compared only if each instruction exists exactly once.
    if expected == given:
        at = {instruction: index for index, instruction in enumerate(order)}
        for first, second in rules:
            if at[first] >= at[second]:
                yield f"rank {rank} has {first} after {second}"


def _rules(program: Program, rank: int) -> Iterator[_Order]:
    """Yields the rules of a rank's order. Together they name exactly the instructions that it must have."""
    schedule, placement = program.schedule, program.schedule.placement
    forwards: dict[tuple[int, int], Compute] = {}
    for step in schedule.orders[rank]:
        compute = Compute(step)
        yield _Order(compute, Flush())
        for handover in needed(step, schedule.num_stages):
            if (peer := placement[handover.source]) != rank:
                yield _Order(Post(handover, peer), Receive(handover, peer))
                yield _Order(Receive(handover, peer), compute)
        for handover in made(step, schedule.num_stages):
            if (peer := placement[handover.stage]) != rank:
                yield _Order(compute, Send(handover, peer))
                yield _Order(Send(handover, peer), Flush())
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
    """Plays the program and yields a problem for each rank that does not come to its end."""
    positions = [0] * len(program.orders)
    posted: set[Handover] = set()
    arrived: set[Handover] = set()
    sent: list[set[Handover]] = [set() for _ in program.orders]

    def goes_on(rank: int, instruction: Instruction) -> bool:
        match instruction:
            case Post(handover, _):
                posted.add(handover)
            case Send(handover, _):
                arrived.add(handover)
                sent[rank].add(handover)
            case Receive(handover, _):
                return handover in arrived
            case Flush():
                # A message leaves only when its receive is posted: the network buffers nothing.
                return sent[rank] <= posted
        return True

    # Any order of the ranks gives the same end, so each goes on as far as it can; see the module's Strategy.
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
"""Number of steps by which a receive is posted before the step that needs it."""


@dataclass(frozen=True, slots=True)
class _Move:
    """Instruction for a handover from or to rank `peer`."""

    handover: Handover
    peer: int

    def _text(self, stage: int, word: str) -> str:
        return f"{stage}{word}_{self.handover.letter}{self.handover.microbatch}"


class Post(_Move):
    """Posts the receive of a handover from rank `peer`, without waiting."""

    __slots__ = ()

    def __str__(self) -> str:
        return self._text(self.handover.stage, "POST")


class Receive(_Move):
    """Waits for a handover from rank `peer`."""

    __slots__ = ()

    def __str__(self) -> str:
        return self._text(self.handover.stage, "RECV")


class Send(_Move):
    """Starts to send a handover to rank `peer`, without waiting."""

    __slots__ = ()

    def __str__(self) -> str:
        return self._text(self.handover.source, "SEND")


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
    """Starts to average the weight gradients of a stage over its replicas."""

    stage: int

    def __str__(self) -> str:
        return f"{self.stage}REDUCE"


@dataclass(frozen=True, slots=True)
class Flush:
    """Waits until all sends of the rank are done."""

    def __str__(self) -> str:
        return "FLUSH"


Instruction: TypeAlias = Post | Receive | Send | Recompute | Compute | Reduce | Flush


@dataclass(frozen=True, repr=False)
class Program:
    """Instructions of all ranks, in order. `str` is a line per rank. Made by `lower`.

    Args:
        schedule: the schedule that the program runs.
        orders: the instructions of each rank.
        recomputed: stages that run their forward again before their backward.
    """

    schedule: Schedule
    orders: tuple[tuple[Instruction, ...], ...]
    recomputed: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        return f"<Program of {self.schedule!r}: {sum(map(len, self.orders))} instructions>"

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, order)) for order in self.orders)


def lower(schedule: Schedule, recomputed: Collection[int] = (), lookahead: int = LOOKAHEAD) -> Program:
    """Returns the program of a schedule.

    Args:
        schedule: A schedule without problems.
        recomputed: Stages that keep only their input between forward and backward.
        lookahead: Number of steps by which a receive is posted before the step that needs it.
    """
    again = frozenset(recomputed)
    orders = (tuple(_order(schedule, rank, again, lookahead)) for rank in range(schedule.num_ranks))
    return Program(schedule, tuple(orders), again)


def needed(step: Step, num_stages: int) -> Iterator[Handover]:
    """Yields the handovers that a step receives from other stages, on its own rank too."""
    for stage, kind, microbatch in actions_of(step):
        handover = Handover(stage, microbatch, kind != "F")
        if kind != "W" and 0 <= handover.source < num_stages:
            yield handover


def made(step: Step, num_stages: int) -> Iterator[Handover]:
    """Yields the handovers that a step sends to other stages, on its own rank too."""
    for stage, kind, microbatch in actions_of(step):
        target = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= target < num_stages:
            yield Handover(target, microbatch, kind != "F")


def _order(schedule: Schedule, rank: int, recomputed: Collection[int], lookahead: int) -> Iterator[Instruction]:
    placement, steps, count = schedule.placement, schedule.orders[rank], schedule.num_stages
    incoming = [
        [(item, placement[item.source]) for item in needed(step, count) if placement[item.source] != rank]
        for step in steps
    ]
    last = _last_backwards(steps)
    posted = 0
    for index, step in enumerate(steps):
        # Posted ahead of time, so that a message that comes early has a buffer to go to.
        for there in range(posted, min(len(steps), index + lookahead)):
            yield from (Post(*pair) for pair in incoming[there])
        posted = max(posted, min(len(steps), index + lookahead))
        yield from (Receive(*pair) for pair in incoming[index])
        for stage, kind, microbatch in actions_of(step):
            if kind in ("B", "I") and stage in recomputed:
                yield Recompute(stage, microbatch)
        yield Compute(step)
        for handover in made(step, count):
            if placement[handover.stage] != rank:
                yield Send(handover, placement[handover.stage])
        # Right after a stage's last weight gradient, so the reduction overlaps with the remaining steps.
        yield from (Reduce(stage) for stage in last.get(index, ()))
    yield Flush()


def _last_backwards(steps: Sequence[Step]) -> dict[int, list[int]]:
    """Returns, by the index of a step, the stages whose weight gradients are complete after it."""
    # Later steps overwrite earlier ones, so the last B or W of each stage stays.
    index_of = {
        stage: index for index, step in enumerate(steps) for stage, kind, _ in actions_of(step) if kind in ("B", "W")
    }
    stages: dict[int, list[int]] = {}
    for stage, index in index_of.items():
        stages.setdefault(index, []).append(stage)
    return stages
