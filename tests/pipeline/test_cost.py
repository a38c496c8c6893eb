"""Costs: numbers or one per stage, and what they become for a placement."""

from fractions import Fraction

import numpy
import pytest

from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import loop, vee
from echelon.pipeline.plan.cost import Costs, transfer_time


def test_a_number_counts_for_every_stage():
    costs = Costs(forward=1, backward_input=2, backward_weight=3, transfer=4).per_stage(loop(3))
    assert costs.forward == (1, 1, 1)
    assert costs.backward == (5, 5, 5)
    assert costs.transfer == (4, 4)
    assert costs.weight_activation == costs.activation


def test_one_per_stage():
    costs = Costs(forward=[1, 2, 3], transfer=[5, 6], weight_activation=[1, 0, 1]).per_stage(loop(3))
    assert (costs.forward, costs.transfer, costs.weight_activation) == ((1, 2, 3), (5, 6), (1, 0, 1))


def test_a_transfer_is_free_on_one_rank():
    assert Costs(transfer=3).per_stage(vee(2)).transfer == (3, 0, 3)
    assert Costs(transfer=3).per_stage(loop(1, 3)).transfer == (0, 0)


def test_no_transfer_leaves_exact_times_exact():
    times = Costs(Fraction(1, 3), 1, 1).per_stage(loop(2)).transfer
    assert times == (0,)
    assert type(times[0]) is int


def test_recomputation_lengthens_the_backward_for_the_input():
    costs = Costs(1, 2, 3, activation=1, recompute=1, recomputed_activation=5).per_stage((0,))
    assert (costs.backward_input, costs.backward_weight, costs.backward) == ((3,), (3,), (6,))
    assert costs.weight_activation == (6,), "all of it stays until W"


def test_time_of_a_transfer():
    assert transfer_time(num_bytes=10**6, latency=Fraction(1, 100_000), bandwidth=10**9) == Fraction(101, 100_000)
    assert transfer_time(1e6, 0.5, 2e6) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": -1}, "forward=-1 cannot be a cost: give a number from 0 to 1e100"),
        ({"forward": 10**400}, r"forward=10+\.\.\. cannot be a cost"),
        ({"transfer": 1e308}, r"transfer=1e\+308 cannot be a cost"),
        ({"transfer": float("nan")}, "transfer=nan cannot be a cost"),
        ({"activation": [1, float("inf")]}, "activation=inf cannot be a cost"),
        ({"forward": "fast"}, "forward='fast' is not a number"),
        ({"forward": True}, "forward=True is not a number"),
        ({"backward_weight": None}, "backward_weight=None is not a number"),
    ],
)
def test_costs_that_cannot_be(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        Costs(**arguments)


def test_costs_for_another_number_of_stages():
    with pytest.raises(ScheduleError, match="forward has 3 values for 4 stages: give one number, or 4 of them"):
        Costs(forward=[1, 2, 3]).per_stage(loop(4))
    with pytest.raises(ScheduleError, match="transfer has 4 values for 3 boundaries between stages"):
        Costs(transfer=[1, 1, 1, 1]).per_stage(loop(4))


def test_a_transfer_without_bandwidth():
    with pytest.raises(ScheduleError, match="bandwidth is 0"):
        transfer_time(1, 1, 0)


def test_numbers_of_numpy_are_costs_without_a_warning():
    assert Costs(forward=numpy.float32(1.5)).forward == 1.5
    with pytest.raises(ScheduleError, match="forward=inf cannot be a cost"):
        Costs(forward=numpy.float32("inf"))
