"""A program whose results depend on who is quicker is found, whatever it returns."""

import pytest
import torch

import echelon
from echelon.testing import RaceError, check_same_results


def first_come(group, wrap):
    if group.rank:
        group.send(torch.tensor([group.rank]), 0)
        return None
    works = [group.irecv(src) for src in range(1, group.world_size)]
    while not any(work.is_completed() for work in works):
        pass
    return wrap(next(work for work in works if work.is_completed()).wait())


@pytest.mark.parametrize(
    "wrap", [lambda tensor: tensor, lambda tensor: {"first": [tensor]}, lambda tensor: (1, tensor.item())]
)
def test_a_race_is_found_and_says_how_to_replay_it(wrap):
    with pytest.raises(RaceError, match=r"rank 0 returned .* with seed 0, but .* with seed \d+") as caught:
        check_same_results(first_come, 3, args=(wrap,))
    assert "to replay it: echelon.simulate(first_come, 3, args=..., seed=" in caught.value.__notes__[-1]


def sums(group):
    return {"sum": group.all_reduce(torch.ones(3) / (group.rank + 3)), "rank": [group.rank, None]}


def test_a_program_without_a_race_passes():
    assert check_same_results(sums, 4, seeds=range(20)) == 20


def draws(group):
    group.barrier()
    return torch.rand(1)


def test_random_numbers_differ_from_seed_to_seed():
    with pytest.raises(RaceError):
        check_same_results(draws, 2)


def fails(group):
    raise KeyError("no such layer")


def test_a_failure_is_raised_as_it_is():
    with pytest.raises(KeyError, match="no such layer"):
        check_same_results(fails, 2)


def test_it_is_a_tool_of_the_library():
    assert echelon.testing.check_same_results is check_same_results
