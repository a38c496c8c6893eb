import pytest

from echelon.collectives.plans.algorithms import build
from echelon.collectives.plans.plan import Copy, Plan, Recv, Reduce, Send, runs
from echelon.errors import PlanError
from tests.helpers.collective_plans import ALL, plans, roots

RING = """\
ring all-reduce: 3 ranks, 3 chunks
rank 0: 2>1 +1<2 | 1>1 +0<2 | 0>1 2<2 | 2>1 1<2
rank 1: 0>2 +2<0 | 2>2 +1<0 | 1>2 0<0 | 0>2 2<0
rank 2: 1>0 +0<1 | 0>0 +2<1 | 2>0 1<1 | 1>0 0<1"""


def test_a_plan_is_a_line_per_rank():
    assert str(build("all_reduce", "ring", 3)) == RING


@pytest.mark.parametrize(("operation", "name"), ALL)
def test_the_text_of_a_plan_parses_back(operation, name):
    for num_ranks in (1, 2, 3, 5, 8, 12):
        for plan in plans(operation, name, num_ranks, max(roots(operation, num_ranks))):
            assert Plan.from_text(str(plan)) == plan


def test_plans_differ_if_one_sends_what_the_other_receives():
    sends, receives = (Plan("any", 1, (((step,),),)) for step in (Send(1, (0,)), Recv(1, (0,))))
    assert sends != receives
    assert not sends == receives  # noqa: SIM201 # the two operators are two functions
    assert sends == Plan.from_text(str(sends))
    assert len({sends, receives, Plan.from_text(str(sends))}) == 2


def test_one_of_a_thing_is_said_so():
    assert str(build("all_reduce", "recursive_doubling", 1)).startswith(
        "recursive doubling all-reduce: 1 rank, 1 chunk\n"
    )


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Send(1, (0,)), "0>1"),
        (Send(1, (0, 1, 2, 3, 6)), "0-3,6>1"),
        (Send(1, (6, 0, 1)), "6,0-1>1"),
        (Send(12, ()), ">12"),
        (Recv(1, (0,)), "0<1"),
        (Reduce(1, (0,)), "+0<1"),
        (Reduce(1, (0, 1), received_first=True), "0-1<1+"),
        (Copy(0, 4), "4=0"),
    ],
)
def test_the_text_of_a_step(step, text):
    assert str(step) == text
    plan = Plan("one", 8, (((step,),),))
    assert Plan.from_text(str(plan)) == plan


def test_rounds_without_messages_do_not_count():
    assert build("all_to_all", "pairwise", 4).num_rounds == 3
    assert build("broadcast", "binomial", 5).num_rounds == 3
    assert build("barrier", "dissemination", 1).num_rounds == 0


def test_runs():
    assert runs((3, 4, 5, 0, 1, 7)) == [range(3, 6), range(2), range(7, 8)]
    assert runs(()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 is '': give a name and sizes"),
        ("ring: 2 ranks, 1 chunks\nrank 0: 0>1", "line 1 is 'ring: 2 ranks, 1 chunks'"),
        ("a: 1 ranks, 1 chunks\nrank 1: 0>1", "line 2 begins with 'rank 1': give the rounds of rank 0"),
        ("a: 1 ranks, 1 chunks\nrank 0: 0?1", "'0\\?1' is no step: write 0>1"),
        ("a: 1 ranks, 1 chunks\nrank 0: +0>1", r"'\+0>1' is no step"),
        ("a: 1 ranks, 1 chunks\nrank 0: +0<1+", r"'\+0<1\+' is no step"),
    ],
)
def test_what_is_no_plan_is_an_error(text, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_text(text)
