"""Arguments that make no sense are refused, each with what was given and what to give instead."""

import math
import re

import numpy as np
import pytest

import echelon
from echelon import Delay, Kill, Network, NetworkPartition, Pause, Slow
from echelon.arguments import is_amount, is_count, is_factor
from echelon.errors import InvalidRank, InvalidWorldSize, LaunchError
from echelon.simulation import Measured
from echelon.testing import check_same_results

NAN = math.nan


def program(group):
    with group.backend.compute("work"):
        pass
    group.barrier()


def refused(message):
    return pytest.raises(LaunchError, match=re.escape(message))


def test_what_counts_as_which_number():
    assert all(map(is_amount, (0, 0.0, 1.5, np.float32(2))))
    assert not any(map(is_amount, (-1, NAN, math.inf, "1", None, True)))
    assert is_factor(0.5)
    assert not is_factor(0)
    assert is_count(3, 3)
    assert not any(is_count(value, 1) for value in (0, 1.0, True, "1", None))


@pytest.mark.parametrize("world_size", [0, -1, 2.5, "2", None])
def test_world_sizes(world_size):
    with pytest.raises(InvalidWorldSize, match=re.escape(f"world_size={world_size!r}")):
        echelon.simulate(program, world_size)


@pytest.mark.parametrize(
    "given",
    [
        {"args": 5},
        {"args": "ab"},
        {"seed": None},
        {"seed": -1},
        {"seed": 1.5},
        {"timeout": 0},
        {"timeout": None},
        {"timeout": NAN},
        {"network": 5},
        {"network": "1gb"},
        {"network": Network(hosts=[1])},
        {"costs": "measure"},
        {"costs": [1]},
        {"costs": {"work": -1}},
        {"costs": {"work": "1"}},
        {"costs": {1: 2}},
        {"faults": 5},
        {"faults": Kill(0, at=1)},
        {"faults": ["kill"]},
        {"faults": [Slow(0, factor=2)]},
    ],
    ids=str,
)
def test_arguments_of_simulate(given):
    (name,) = given
    with pytest.raises(LaunchError) as caught:
        echelon.simulate(program, 2, **given)
    assert str(caught.value).startswith(("hosts=[1]", "slow:0x2 ", f"{name}="))


def test_no_function():
    with refused("fn=None: give the function"):
        echelon.simulate(None, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Network(latency="1"),
        lambda: Network(latency=NAN),
        lambda: Network(overhead=-1),
        lambda: Network(bandwidth=0),
        lambda: Network(bandwidth=NAN),
        lambda: Network(local_bandwidth=None),
        lambda: Network(hosts=2),
        lambda: Network(hosts=[]),
        lambda: Network(hosts=[1.5]),
        lambda: Measured("2"),
        lambda: Measured(0),
        lambda: Kill(0),
        lambda: Kill(0, at=1, at_op=1),
        lambda: Kill(0, at="1"),
        lambda: Kill(0, at_op=1.5),
        lambda: Slow(0, factor=0),
        lambda: NetworkPartition(0, 1),
        lambda: NetworkPartition({0}, 1),
        lambda: NetworkPartition({0}, set()),
        lambda: NetworkPartition({0}, {0, 1}),
        lambda: NetworkPartition({0}, {1}, 2, 1),
        lambda: Delay("1"),
        lambda: Delay(0),
        lambda: Pause(0, "a", "b"),
        lambda: Pause(0, 3, 2),
    ],
)
def test_values(make):
    with pytest.raises(LaunchError, match=r"give|needs|messages are counted|the end must come after"):
        make()


@pytest.mark.parametrize(
    "fault", [Kill(9, at=1), Kill("0", at=1), NetworkPartition({0}, {7}), Delay(1, src=9), Pause(True)]
)
def test_faults_of_ranks_that_there_are_not(fault):
    with pytest.raises(InvalidRank):
        echelon.simulate(program, 2, faults=[fault])


@pytest.mark.parametrize("found", [None, "1GbE"])
def test_a_function_that_gives_no_network_ends_the_simulation(found):
    with refused(f"is {found!r}: let the function return a Network"):
        echelon.simulate(program, 3, network=lambda src, _: Network() if src < 2 else found)


def test_what_the_function_of_the_network_raises_comes_out_as_it_is():
    with pytest.raises(ZeroDivisionError):
        echelon.simulate(program, 3, network=lambda *_: 1 / 0)


@pytest.mark.parametrize("seconds", [None, -1.0, NAN])
def test_a_function_that_gives_no_cost_fails_the_rank(seconds):
    with refused(f"costs= gave {seconds!r} for rank") as caught:
        echelon.simulate(program, 2, costs=lambda *_: seconds)
    assert "raised on rank" in caught.value.__notes__[0]


@pytest.mark.parametrize("seeds", [5, [], range(0)])
def test_nothing_to_explore(seeds):
    with refused(f"seeds={seeds!r}"):
        echelon.explore(program, 2, seeds=seeds)


def test_no_check():
    with refused("check=5"):
        echelon.explore(program, 2, seeds=range(1), check=5)


def test_one_seed_compares_nothing():
    with refused("seeds=[3] has one seed"):
        check_same_results(program, 2, seeds=[3])


async def waits():
    pass


def test_a_coroutine_that_nobody_has_run_is_refused():
    """Without it, all ranks seemed to have ended well."""
    told = r"fn returned the coroutine waits, .*asyncio.run\(waits"
    with pytest.raises(echelon.errors.LaunchError, match=told):
        echelon.simulate(lambda: waits(), 2)
