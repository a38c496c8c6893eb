"""Exploring finds the seed that breaks a program, and says how to replay it."""

import re

import pytest
import torch

import echelon


def first_come(group):
    """A planted race: rank 0 keeps what comes first."""
    if group.rank:
        group.send(torch.tensor([group.rank]), 0)
        return None
    works = {src: group.irecv(src) for src in range(1, group.world_size)}
    while not (done := [src for src, work in works.items() if work.is_completed()]):
        pass
    for work in works.values():
        work.wait()
    return done[0]


def never_rank_three_first(group):
    first = first_come(group)
    if first == 3:
        raise RuntimeError("rank 3 came first")


def test_it_stops_at_the_first_failing_seed_and_says_how_to_replay_it(capsys):
    with pytest.raises(RuntimeError, match="rank 3 came first") as caught:
        echelon.explore(never_rank_three_first, 4, seeds=range(100))
    note = caught.value.__notes__[-1]
    seed = int(re.match(r"seed (\d+) fails, after \1 that passed", note)[1])
    assert f'echelon.simulate(never_rank_three_first, 4, seed={seed}, collectives="messages")' in note
    assert capsys.readouterr() == ("", ""), "a caught failure is not printed"
    with pytest.raises(RuntimeError, match="rank 3 came first"):
        echelon.simulate(never_rank_three_first, 4, seed=seed, collectives="messages")
    for earlier in range(seed):
        echelon.simulate(never_rank_three_first, 4, seed=earlier, collectives="messages")


def test_a_check_sees_what_no_rank_can_see():
    seen = []

    def same_as_before(run):
        seen.append(run.results[0])
        assert len(set(seen)) == 1, f"the results differ: {seen}"

    with pytest.raises(AssertionError, match="the results differ"):
        echelon.explore(first_come, 3, seeds=range(50), check=same_as_before)


def test_without_a_failure_it_says_how_many_seeds_it_tried(capsys):
    assert echelon.explore(first_come, 3, seeds=range(5, 25)) == 20
    assert capsys.readouterr().err == ""


def test_every_order_of_arrival_is_found():
    firsts = {echelon.simulate(first_come, 4, seed=seed).results[0] for seed in range(40)}
    assert firsts == {1, 2, 3}
