"""The checker names what is wrong with a plan."""

import random
import re
from collections import defaultdict
from dataclasses import replace

import pytest

from echelon.collectives.plans.algorithms import build
from echelon.collectives.plans.check import check, find_problems, goal_of
from echelon.collectives.plans.plan import Copy, Plan, Recv, Reduce, Send
from echelon.errors import PlanError
from tests.helpers.collective_plans import ALL, plan_of

SIZES = (2, 3, 4, 5, 8)


def changed(plan, rank, program):
    """Replaces the rounds of one rank."""
    return replace(plan, rounds=(*plan.rounds[:rank], tuple(map(tuple, program)), *plan.rounds[rank + 1 :]))


def places(plan):
    """Where every step is: rank, round, index."""
    return [
        (rank, number, index)
        for rank, program in enumerate(plan.rounds)
        for number, steps in enumerate(program)
        for index in range(len(steps))
    ]


def problems_of(operation, plan):
    return "\n".join(find_problems(plan, goal_of(operation, plan)))


def names(problems, rank):
    """Whether a problem is about a rank, or about a message to it."""
    return bool(re.search(rf"\branks? (\d+, )*{rank}\b|>{rank}\b", problems))


@pytest.mark.parametrize(("operation", "name"), ALL)
def test_a_step_that_is_missing_or_doubled_is_named(operation, name):
    for num_ranks in SIZES:
        plan = plan_of(operation, name, num_ranks)
        for rank, number, index in random.Random(num_ranks).sample(places(plan), min(24, len(places(plan)))):
            steps = plan.rounds[rank][number]
            for other in (steps[:index] + steps[index + 1 :], (*steps, steps[index])):
                program = list(plan.rounds[rank])
                program[number] = other
                assert names(problems_of(operation, changed(plan, rank, program)), rank), (rank, number, other)


def numbers_come_out_right(plan, goal):
    """Runs a plan in the simplest way there is, on large random numbers."""
    chance = random.Random(0)
    pieces = {
        (rank, chunk): chance.getrandbits(64) for rank in range(plan.num_ranks) for chunk in range(plan.num_chunks)
    }
    held = [{chunk: pieces[rank, chunk] for chunk in chunks} for rank, chunks in enumerate(goal.start)]
    mail = defaultdict(list)
    position, entered = [0] * plan.num_ranks, [False] * plan.num_ranks
    for _ in range(sum(map(len, plan.rounds)) + 1):
        for rank, program in enumerate(plan.rounds):
            if position[rank] == len(program):
                continue
            steps = program[position[rank]]
            if not entered[rank]:
                entered[rank] = True
                for step in steps:
                    if isinstance(step, Send):
                        mail[rank, step.peer].append([held[rank].get(chunk) for chunk in step.chunks])
                held[rank].update({step.chunk: held[rank][step.source] for step in steps if isinstance(step, Copy)})
            wanted = [step for step in steps if isinstance(step, Recv | Reduce)]
            if any(len(mail[step.peer, rank]) < sum(step.peer == other.peer for other in wanted) for step in wanted):
                continue
            for step in wanted:
                came = mail[step.peer, rank].pop(0)
                if len(came) != len(step.chunks) or None in came:
                    return False
                own = [held[rank].get(chunk, 0) if isinstance(step, Reduce) else 0 for chunk in step.chunks]
                held[rank].update({chunk: a + b for chunk, a, b in zip(step.chunks, own, came, strict=True)})
            position[rank], entered[rank] = position[rank] + 1, False
    if position != list(map(len, plan.rounds)) or any(mail.values()):
        return False
    return all(
        held[rank].get(chunk) == sum(pieces[piece] for piece in wanted)
        for rank, end in enumerate(goal.end)
        for chunk, wanted in end.items()
    )


@pytest.mark.parametrize(("operation", "name"), [case for case in ALL if case[0] != "barrier"])
def test_steps_that_are_swapped_are_named_unless_it_does_no_harm(operation, name):
    for num_ranks in SIZES:
        plan = plan_of(operation, name, num_ranks)
        goal = goal_of(operation, plan)
        chance = random.Random(num_ranks)
        for _ in range(24):
            rank = chance.randrange(num_ranks)
            program = list(map(list, plan.rounds[rank]))
            steps = [(number, index) for number, steps in enumerate(program) for index in range(len(steps))]
            if len(steps) < 2:
                continue
            (one, i), (other, j) = chance.sample(steps, 2)
            program[one][i], program[other][j] = program[other][j], program[one][i]
            swapped = changed(plan, rank, program)
            problems = find_problems(swapped, goal)
            assert bool(problems) != numbers_come_out_right(swapped, goal), (str(swapped), problems)
            assert not problems or names("\n".join(problems), rank)


def test_a_chunk_that_is_not_there():
    plan = Plan.from_text("hot potato: 2 ranks, 2 chunks\nrank 0: 1>1\nrank 1: 1<0")
    assert problems_of("all_gather", plan).splitlines() == [
        "rank 0, round 0: 1>1 sends chunk 1, which the rank does not have",
        "rank 0 ends without chunk 1",
        "rank 1 ends without chunk 0",
    ]


def test_contributions_that_are_missing_double_or_foreign():
    plan = Plan.from_text("sums: 3 ranks, 1 chunks\nrank 0: +0<1 | +0<1\nrank 1: 0>0 | 0>0\nrank 2: .")
    assert problems_of("reduce", plan).splitlines() == [
        "rank 0 ends with a chunk 0 that lacks chunk 0 of rank 2 (seen on rank 2)",
        "rank 0 ends with a chunk 0 that counts twice chunk 0 of rank 1",
    ]
    plan = Plan.from_text("mixed: 2 ranks, 2 chunks\nrank 0: 0-1>1\nrank 1: 1,0<0")
    assert problems_of("broadcast", plan).splitlines() == [
        "rank 1, round 0: 1,0<0 meets 0-1>1 of rank 0, round 0",
        "rank 1 ends with a chunk 0 that lacks chunk 0 of rank 0 (seen on ranks 0, 1)",
        "rank 1 ends with a chunk 0 that wrongly holds chunk 1 of rank 0",
        "rank 1 ends with a chunk 1 that lacks chunk 1 of rank 0 (seen on ranks 0, 1)",
        "rank 1 ends with a chunk 1 that wrongly holds chunk 0 of rank 0",
    ]


def test_a_deadlock_is_shown_as_a_cycle():
    plan = Plan.from_text("polite: 3 ranks, 1 chunks\nrank 0: 0<2 | 0>1\nrank 1: 0<0 | 0>2\nrank 2: 0<1 | 0>0")
    assert problems_of("broadcast", plan) == (
        "ranks wait for each other (deadlock): rank 0, round 0 for rank 2; rank 2, round 0 for rank 1; "
        "rank 1, round 0 for rank 0"
    )


def test_messages_without_a_partner():
    plan = Plan.from_text("apart: 3 ranks, 1 chunks\nrank 0: 0>1 | 0>1\nrank 1: 0<2\nrank 2: .")
    assert problems_of("broadcast", plan).splitlines() == [
        "rank 1, round 0: waits for a message from rank 2, which sends no more"
    ]
    plan = Plan.from_text("apart: 2 ranks, 1 chunks\nrank 0: 0>1 | 0>1 | 0>1\nrank 1: 0<0")
    assert problems_of("broadcast", plan) == "rank 0, round 1: 0>1 is never received, nor are 1 more to rank 1"


def test_steps_that_cannot_be():
    plan = Plan.from_text("odd: 2 ranks, 1 chunks\nrank 0: 1>1 0>0 0>2 0,0>1\nrank 1: .")
    assert problems_of("barrier", plan).splitlines()[:4] == [
        "rank 0, round 0: 1>1 names a chunk that does not exist: there are 1",
        "rank 0, round 0: 0>0 is a message of the rank to itself",
        "rank 0, round 0: 0>2 names a rank that does not exist: there are 2",
        "rank 0, round 0: 0,0>1 names a chunk twice",
    ]


def test_a_barrier_that_lets_a_rank_go_on_too_early():
    plan = Plan.from_text("leaky: 3 ranks, 0 chunks\nrank 0: >1 <2\nrank 1: >2 <0\nrank 2: >0 <1")
    assert problems_of("barrier", plan).splitlines() == [
        "rank 0 goes on without knowing of rank 1",
        "rank 1 goes on without knowing of rank 2",
        "rank 2 goes on without knowing of rank 0",
    ]


def test_ranks_that_add_in_different_orders():
    """a + b == b + a for floats, but a NaN's bits, and (a + b) + c, depend on the order."""
    plan = Plan.from_text("both: 2 ranks, 1 chunks\nrank 0: 0>1 +0<1\nrank 1: 0>0 +0<0")
    assert problems_of("all_reduce", plan) == (
        "rank 1 combines chunk 0 in another order than rank 0: sums differ in rounding"
    )
    check(Plan.from_text(str(plan).replace("+0<0", "0<0+")), goal_of("all_reduce", plan))


def test_all_problems_are_in_one_error():
    plan = build("all_reduce", "ring", 33)
    broken = changed(plan, 4, [(), *plan.rounds[4][1:]])
    with pytest.raises(PlanError) as caught:
        check(broken, goal_of("all_reduce", broken))
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("plan 'ring all-reduce' has ")
    assert "rank 4" in lines[0]
    assert len(lines) <= 21


def test_a_goal_of_other_ranks():
    plan = build("all_reduce", "ring", 3)
    assert find_problems(plan, goal_of("all_reduce", build("all_reduce", "ring", 2))) == [
        "it is for 3 ranks, its goal for 2"
    ]
