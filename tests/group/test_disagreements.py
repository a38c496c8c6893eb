"""Ranks that call different things: every rank gets CollectiveMismatch, at that operation or the next, with both sides.

Every pair of the calls below, made by one rank and by all others, on every backend.
"""

import itertools
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import echelon
from echelon.backends.simulated import SimulatedBackend
from echelon.group.group import ProcessGroup
from tests.helpers.worlds import gloo_world, tcp_world

SECONDS = 20.0

CALLS = {
    "sum": lambda group: group.all_reduce(torch.ones(4)),
    "max": lambda group: group.all_reduce(torch.ones(4), "max"),
    "shape": lambda group: group.all_reduce(torch.ones(2, 2)),
    "size": lambda group: group.all_reduce(torch.ones(5)),
    "dtype": lambda group: group.all_reduce(torch.ones(4, dtype=torch.float64)),
    "async": lambda group: group.all_reduce(torch.ones(3), async_op=True).wait(),
    "reduce to 0": lambda group: group.reduce(torch.ones(4), 0),
    "reduce to 1": lambda group: group.reduce(torch.ones(4), 1),
    "broadcast from 0": lambda group: group.broadcast(torch.ones(4), 0),
    "broadcast from 1": lambda group: group.broadcast(torch.ones(4), 1),
    "all_gather": lambda group: group.all_gather(torch.ones(4)),
    "gather to 0": lambda group: group.gather(torch.ones(4), 0),
    "gather to 1": lambda group: group.gather(torch.ones(4), 1),
    "scatter from 0": lambda group: group.scatter(torch.ones(4), 0),
    "scatter from 1": lambda group: group.scatter(torch.ones(4), 1),
    "reduce_scatter": lambda group: group.reduce_scatter(torch.ones(4)),
    "all_to_all": lambda group: group.all_to_all(torch.ones(4)),
    "barrier": lambda group: group.barrier(),
    "subgroup": lambda group: group.subgroup([0, 1]),
    "nothing": lambda _: None,
}
PAIRS = list(itertools.combinations(CALLS, 2))


def play(group, mine):
    """Makes a call, and one that is right on all ranks; returns the type and the text of the error."""
    try:
        group.barrier()
        CALLS[mine](group)
        group.all_reduce(torch.ones(1), "min")
        group.barrier()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def check(outcomes, pair, odd):
    here = f"rank {odd} of {len(outcomes)} calls {pair[0]!r}, the others {pair[1]!r}: {outcomes}"
    assert [kind for kind, _ in outcomes] == ["CollectiveMismatch"] * len(outcomes), here
    for _, text in outcomes:
        sides = re.findall(r"#\d+ of group '[\w/]+' at [^ ]*test_disagreements\.py:\d+", text)
        assert len(sides) == 2, here
        assert f"on rank {odd}" in text, here
        assert "\n" not in text, here


def cases(world_size):
    """Gives every pair both ways round, and each rank in turn the one that differs."""
    for number, (first, second) in enumerate(PAIRS):
        yield (first, second), number % world_size
        yield (second, first), (number + 1) % world_size


def half(world_size):
    """Gives every pair one way round: now the one, now the other."""
    both = list(cases(world_size))
    return [both[2 * number + number % 3 % 2] for number in range(len(PAIRS))]


def disagree(groups, pair, odd):
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(lambda group: play(group, pair[group.rank != odd]), groups))


def disagree_in_turns(world, chosen):
    """Plays cases, each in a group of its own, several beside each other."""
    worlds = [ProcessGroup(backend, timeout=SECONDS) for backend in world]
    with ThreadPoolExecutor(64) as threads:
        jobs = []
        for pair, odd in chosen(len(world)):
            groups = [group.subgroup(range(len(world))) for group in worlds]
            jobs.append((threads.submit(disagree, groups, pair, odd), pair, odd))
        for job, pair, odd in jobs:
            check(job.result(), pair, odd)


def sizes(quick):
    """Gives worlds with half of all cases in a quick test, and all worlds and cases in a slow one."""
    slow = [pytest.param(size, cases, marks=pytest.mark.slow) for size in (2, 3, 4)]
    return pytest.mark.parametrize(("world_size", "chosen"), [pytest.param(quick, half), *slow])


@pytest.mark.slow
@sizes(3)
def test_on_free_running_ranks(world_size, chosen):
    disagree_in_turns(SimulatedBackend.create_group(world_size), chosen)


@sizes(2)
def test_over_tcp(world_size, chosen):
    with tcp_world(world_size) as world:
        disagree_in_turns(world, chosen)


@pytest.mark.parametrize("shares", [True, False])
@sizes(2)
def test_over_gloo(world_size, chosen, shares):
    with gloo_world(world_size, shares=shares) as world:
        disagree_in_turns(world, chosen)


def play_one_case(group, pair, odd):
    return play(group, pair[group.rank != odd])


@sizes(3)
def test_on_deterministic_ranks(world_size, chosen):
    for pair, odd in chosen(world_size):
        check(echelon.simulate(play_one_case, world_size, (pair, odd), late_sends=True).results, pair, odd)


def play_every_case(group, every):
    return [play_one_case(group.subgroup(range(group.world_size)), pair, odd) for pair, odd in every]


@pytest.mark.slow
def test_over_shared_memory(pool):
    every = list(cases(3))[::9]
    by_rank = pool.run(play_every_case, 3, every, backend="shm")
    for outcomes, (pair, odd) in zip(zip(*by_rank, strict=True), every, strict=True):
        check(outcomes, pair, odd)


def call_once_too_often(group):
    tensor = torch.ones(4)
    try:
        for step in range(2):
            group.all_reduce(tensor)
            if group.rank == 1 and step == 0:
                group.all_reduce(tensor)
            group.all_reduce(tensor)
        group.broadcast(tensor, 0)
    except echelon.CollectiveMismatch as error:
        return str(error)
    return ""


def check_parting(texts):
    first = call_once_too_often.__code__.co_firstlineno
    here, there = (rf"\S*test_disagreements\.py:{first + number}" for number in (6, 7))
    assert any(
        re.search(rf"; their lines differ from #2 on, {one} on rank \d and {other} on rank \d:", text)
        for text in texts
        for one, other in ((here, there), (there, here))
    ), texts


def test_the_first_call_at_other_lines_is_named():
    with tcp_world(2) as world, ThreadPoolExecutor(2) as threads:
        check_parting(list(threads.map(call_once_too_often, [ProcessGroup(each, timeout=SECONDS) for each in world])))
    check_parting(echelon.simulate(call_once_too_often, 3).results)


def test_the_first_call_at_other_lines_is_named_over_shared_memory(pool):
    check_parting(pool.run(call_once_too_often, 2, backend="shm"))
