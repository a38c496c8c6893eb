"""Advice of a mismatch: the arguments that differ, or the rank that calls another operation than all others."""

import math

import pytest
import torch

import echelon
from echelon.backends.status import Question, Standing
from echelon.collectives.calls.hang_diagnosis import advice_on

PLACE = "#1 of group 'world' at train.py:1"
GENERAL = "every rank must call the same operations in the same order with the same arguments"


@pytest.mark.parametrize(
    ("mine", "theirs", "advice"),
    [
        ("all_reduce(sum) of float32[3]", "all_reduce(sum) of float32[4]", "give tensors of the same shape"),
        ("all_reduce(sum) of float32[3]", "all_reduce(sum) of int64[3]", "give tensors of the same dtype"),
        ("reduce(sum, dst=0) of int64[]", "reduce(max, dst=1) of int64[]", "give the same op and dst"),
        ("all_gather of rows of int64[12]", "all_gather of rows of int64[1, 2]", "give rows of the same shape"),
        ("scatter(src=0)", "scatter(src=1)", "give the same src"),
        (
            "broadcast(src=0) of int8[3]",
            "broadcast(src=1) of int8[4]",
            "give tensors of the same shape and the same src",
        ),
        ("barrier", "all_reduce(sum) of int64[3]", ""),
        ("barrier", "barrier", ""),
        ("Store.save (barrier", "barrier", ""),
    ],
)
def test_the_arguments_that_differ(mine, theirs, advice):
    expected = advice and f"{advice} on every rank"
    assert advice_on(f"{mine}, {PLACE}", f"{theirs}, {PLACE}") == expected
    assert advice_on(f"{mine}, {PLACE}", f"{theirs}, {PLACE}0") == "", "another line may be another call"


def mismatch(group, kind):
    if kind == "line" and group.rank == 1:
        return _caught(lambda: group.all_reduce(torch.ones(5)))
    return _caught(lambda: group.all_reduce(torch.ones(3 + (kind == "shape") * group.rank)))


def _caught(call):
    try:
        call()
    except echelon.CollectiveMismatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("shape", ": give tensors of the same shape on every rank"),
        ("line", f": {GENERAL}"),
    ],
)
def test_a_mismatch_has_it_on_all_ranks(run, kind, advice):
    for message in run(mismatch, 3, kind):
        assert message.endswith(advice)


def lone_mismatch(group):
    """Rank 1 calls when the others have called, in simulated time or as they answer."""
    if group.rank == 1:
        with group.backend.compute("late"):
            question = Question(group.context, 1, 0)
            while group.backend.query_peers_after < math.inf and any(
                each.standing != Standing.DIVERGED
                for each in group.backend.control.ask([0, 2], question, 10.0).values()
            ):
                pass
        return _caught(group.barrier)
    return _caught(lambda: group.all_reduce(torch.ones(3)))


def test_the_rank_that_alone_calls_another_operation(pool):
    expected = ": rank 1 alone calls barrier where all others call all_reduce: " + GENERAL.partition(" with")[0]
    for messages in (echelon.simulate(lone_mismatch, 3, costs={"late": 1.0}).results, pool.run(lone_mismatch, 3)):
        assert [message.endswith(expected) for message in messages] == [True] * 3
