"""Proves that a program runs to its end, whatever the ranks' speeds.

A program stands still only where it waits: at a RECV for a message, at the FLUSH for what it sent. It is played with
the strictest network there can be, which takes a message only when its receive is posted. What a rank does never
depends on who is faster, so if one order of all instructions comes to the end, every other does, and on every network
that can hold more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from echelon.errors import ScheduleError
from echelon.pipeline.action import Action, actions_of
from echelon.pipeline.lowering import (
    Compute,
    Flush,
    Instruction,
    Post,
    Program,
    Receive,
    Recompute,
    Reduce,
    Send,
    Transfer,
    made,
    needed,
)

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
