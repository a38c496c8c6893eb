"""Plays every plan by counting, with an interpreter of its own: nothing of `check` and `run` is used here.

A chunk is a count of how often each rank's piece is in it. Rounds are played as the docstring of `plan` says: sends
take what was there at the start of the round, a rank goes on when its messages have come, and messages between two
ranks are received in the order they were sent.
"""

from collections import Counter, deque

import pytest

from echelon.collectives.plans.plan import Copy, Recv, Reduce, Send
from tests.helpers.collective_plans import ALL, plan_of, plans, roots

COUNTED = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
CASES = [case for case in ALL if case[0] in COUNTED]


def play(plan, chunks):
    """Changes `chunks`, a dict per rank, as the plan says; returns the number of messages each rank sent."""
    wires, position, sent = {}, [0] * plan.num_ranks, [0] * plan.num_ranks
    entered, moved = [-1] * plan.num_ranks, True
    while moved:
        moved = False
        for rank, program in enumerate(plan.rounds):
            while position[rank] < len(program):
                steps = program[position[rank]]
                if entered[rank] < position[rank]:
                    entered[rank], moved = position[rank], True
                    for step in steps:
                        if isinstance(step, Send):
                            message = [Counter(chunks[rank][chunk]) for chunk in step.chunks]
                            wires.setdefault((rank, step.peer), deque()).append(message)
                            sent[rank] += 1
                    for step in steps:
                        if isinstance(step, Copy):
                            chunks[rank][step.chunk] = Counter(chunks[rank][step.source])
                receipts = [step for step in steps if isinstance(step, Recv | Reduce)]
                needed = Counter(step.peer for step in receipts)
                if any(len(wires.get((peer, rank), ())) < count for peer, count in needed.items()):
                    break
                for step in receipts:
                    message = wires[step.peer, rank].popleft()
                    assert len(message) == len(step.chunks)
                    for chunk, value in zip(step.chunks, message, strict=True):
                        own = chunks[rank][chunk] if isinstance(step, Reduce) else Counter()
                        chunks[rank][chunk] = own + value
                position[rank] += 1
                moved = True
    assert [len(program) for program in plan.rounds] == position, "ranks wait for each other for ever"
    assert not any(wires.values()), "a message is never received"
    return sent


def everywhere(num_ranks, num_chunks):
    return [{chunk: Counter({rank: 1}) for chunk in range(num_chunks)} for rank in range(num_ranks)]


def nothing(num_ranks, num_chunks):
    return [{chunk: Counter() for chunk in range(num_chunks)} for _ in range(num_ranks)]


def check_counts(operation, plan, root):
    num_ranks, num_chunks = plan.num_ranks, plan.num_chunks
    total = Counter(dict.fromkeys(range(num_ranks), 1))
    if operation in ("all_reduce", "reduce", "reduce_scatter"):
        chunks = everywhere(num_ranks, num_chunks)
        play(plan, chunks)
        for rank in range(num_ranks):
            mine = {"all_reduce": range(num_chunks), "reduce_scatter": [rank]}.get(operation)
            if mine is None:
                mine = range(num_chunks) if rank == root else []
            assert all(chunks[rank][chunk] == total for chunk in mine), f"rank {rank}: {chunks[rank]}"
        return
    chunks = nothing(num_ranks, num_chunks)
    if operation == "broadcast":
        wanted = {chunk: Counter({chunk: 1}) for chunk in range(num_chunks)}
        chunks[root] = dict(wanted)
    else:
        assert num_chunks == num_ranks
        wanted = {chunk: Counter({chunk: 1}) for chunk in range(num_chunks)}
        for rank in range(num_ranks):
            chunks[rank][rank] = Counter({rank: 1})
    play(plan, chunks)
    for rank in range(num_ranks):
        assert {chunk: chunks[rank][chunk] for chunk in wanted} == wanted, f"rank {rank}"


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((*range(1, 10), 12, 16, 17), id="small"),
        pytest.param((10, 11, 13, 14, 15, 24, 31, 32, 33), marks=pytest.mark.slow, id="large"),
    ],
)
@pytest.mark.parametrize(("operation", "name"), CASES)
def test_every_rank_ends_with_every_contribution_once(operation, name, sizes):
    for num_ranks in sizes:
        for root in roots(operation, num_ranks):
            for plan in plans(operation, name, num_ranks, root):
                check_counts(operation, plan, root)


@pytest.mark.parametrize(("operation", "name"), CASES)
def test_a_plan_with_a_step_left_out_is_caught(operation, name):
    """This interpreter can fail: without any one of its receives, no plan passes."""
    plan = plan_of(operation, name, 5)
    for rank, program in enumerate(plan.rounds):
        for number, steps in enumerate(program):
            for step in steps:
                if isinstance(step, Recv | Reduce):
                    less = tuple(other for other in steps if other is not step)
                    rounds = list(plan.rounds)
                    rounds[rank] = (*program[:number], less, *program[number + 1 :])
                    broken = type(plan)(plan.name, plan.num_chunks, tuple(rounds))
                    with pytest.raises(AssertionError):
                        check_counts(operation, broken, 0)
