"""The same seed gives the same run, byte for byte; another one another legal run."""

import json
import os
import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import echelon


def gossip(group):
    """Sends to all, takes what comes first, and mixes collectives in two groups with random numbers."""
    others = [rank for rank in range(group.world_size) if rank != group.rank]
    works = {src: group.irecv(src) for src in others}
    for dst in others:
        group.isend(torch.tensor([group.rank]), dst)
    order = []
    while works:
        for src, work in list(works.items()):
            if work.is_completed():
                order.append(works.pop(src).wait().item())
    pair = group.subgroup([0, group.world_size - 1])
    begun = group.all_reduce(torch.rand(5), async_op=True)
    if pair is not None:
        pair.broadcast(torch.rand(3))
    return order, begun.wait().tolist(), random.random(), np.random.rand()


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_same_seed_gives_the_same_trace_and_results(world_size):
    runs = [echelon.simulate(gossip, world_size, seed=7) for _ in range(3)]
    assert len({run.trace for run in runs}) == 1
    assert all(run.results == runs[0].results for run in runs)
    assert runs[0].trace.count("\n") > 2 * world_size


def test_other_seeds_give_other_orders():
    runs = [echelon.simulate(gossip, 4, seed=seed) for seed in range(8)]
    assert len({run.trace for run in runs}) == 8
    assert len({str([order for order, *_ in run.results]) for run in runs}) > 4


def draw_between_hand_overs(group):
    draws = []
    for _ in range(3):
        draws.append((torch.rand(1).item(), np.random.rand(), random.random()))
        group.barrier()
    mask = nn.functional.dropout(torch.ones(50), 0.5)
    return draws, mask


def test_every_rank_draws_numbers_of_its_own_which_do_not_depend_on_the_interleaving():
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.rand(0)
    states = {seed: echelon.simulate(draw_between_hand_overs, 3, seed=seed).results for seed in (0, 0, 1)}
    again = echelon.simulate(draw_between_hand_overs, 3, seed=0).results
    flat = [number for draws, _ in states[0] for row in draws for number in row]
    assert len(set(flat)) == 27
    assert [draws for draws, _ in again] == [draws for draws, _ in states[0]]
    assert all(torch.equal(mask, other) for (_, mask), (_, other) in zip(again, states[0], strict=True))
    assert not torch.equal(states[0][0][1], states[0][1][1])
    assert states[1][0][0] != states[0][0][0]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def seeded_draws(group, rounds):
    """Draws the same numbers whatever happens between."""
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    draws = []
    for _ in range(rounds):
        draws.append((torch.rand(1).item(), np.random.rand(), random.random()))
        group.barrier()
    return draws


def test_a_rank_that_seeds_has_what_it_would_have_alone():
    alone = echelon.simulate(seeded_draws, 1, (4,)).results[0]
    for draws in echelon.simulate(seeded_draws, 3, (4,)).results:
        assert draws == alone


def normals(group):
    np.random.seed(3)
    drawn = []
    for _ in range(5):
        drawn.append(np.random.randn())  # it draws two, and keeps the second for the next call
        if group.world_size > 1:
            group.barrier()
    return drawn


def test_a_normal_number_that_numpy_keeps_stays_with_its_rank():
    np.random.seed(4)
    first = np.random.randn()
    (alone,) = echelon.simulate(normals, 1).results
    assert echelon.simulate(normals, 3).results == [alone] * 3
    assert len(set(alone)) == 5
    second = np.random.randn()
    np.random.seed(4)
    assert [np.random.randn(), np.random.randn()] == [first, second], "the process had kept one, too"


def test_the_state_of_numpys_generator_can_be_saved():
    def program(group):
        saved = np.random.get_state(), pickle.dumps(np.random.get_bit_generator())
        drawn = np.random.rand()
        group.barrier()
        np.random.set_state(saved[0])
        return drawn == np.random.rand() == np.random.RandomState(pickle.loads(saved[1])).rand()

    assert echelon.simulate(program, 2).results == [True, True]


def only_one_runs(group, running):
    for _ in range(20):
        running.append(group.rank)
        assert len(running) == 1
        sys.setswitchinterval(1e-6)
        sum(range(200))
        running.pop()
        group.barrier()


def test_exactly_one_rank_runs_at_a_time():
    interval = sys.getswitchinterval()
    try:
        echelon.simulate(only_one_runs, 4, ([],))
    finally:
        sys.setswitchinterval(interval)


def without_gradients_on_one(group):
    if group.rank == 0:
        with torch.no_grad():
            group.barrier()
            group.barrier()
            return torch.is_grad_enabled()
    group.barrier()
    enabled = torch.is_grad_enabled()
    group.barrier()
    return enabled


def test_no_grad_is_each_ranks_own():
    assert echelon.simulate(without_gradients_on_one, 2).results == [False, True]


def train(group):
    torch.manual_seed(0)
    ddp = echelon.DDP(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1)), group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(group.rank)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.rand(5, 3)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in ddp.parameters()]


def test_training_does_not_depend_on_the_seed_of_the_simulation():
    first, *others = [echelon.simulate(train, 3, seed=seed).results for seed in (0, 1, 2)]
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))


def test_the_number_of_threads_and_the_other_threads_are_as_before():
    before = torch.get_num_threads(), threading.active_count()
    echelon.simulate(gossip, 3)
    assert (torch.get_num_threads(), threading.active_count()) == before


PRINTS_A_DIGEST = """
import hashlib, sys
import echelon
from tests.simulation.test_determinism import gossip, train
runs = [echelon.simulate(gossip, 4, seed=11, network="10GbE"), echelon.simulate(train, 3, seed=11)]
print(hashlib.sha256("".join(run.trace for run in runs).encode()).hexdigest())
"""


@pytest.mark.slow
def test_the_trace_is_the_same_in_every_process():
    digests = set()
    for seed_of_hashes in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PRINTS_A_DIGEST],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONHASHSEED": seed_of_hashes},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def computes_and_talks(group):
    with group.backend.compute("forward"):
        pass
    group.all_reduce(torch.ones(10))


def test_the_timeline_can_be_drawn(tmp_path):
    timeline = echelon.simulate(computes_and_talks, 3, network="1GbE", costs={"forward": 1e-3}).timeline
    assert [span.name.split("(")[0] for span in timeline.spans[2]] == ["forward", "all_reduce"]
    timeline.draw(tmp_path / "timeline.svg")
    timeline.to_chrome(tmp_path / "timeline.json")
    assert (tmp_path / "timeline.svg").stat().st_size > 1000
    assert "all_reduce" in (tmp_path / "timeline.json").read_text()


def reduces_beside(group):
    halves = [group.all_reduce(torch.ones(1 << 18), async_op=True) for _ in range(2)]
    pair = group.subgroup([0, 1])
    if pair is not None:
        halves.append(pair.all_reduce(torch.ones(1 << 18), async_op=True))
    with group.backend.compute("forward"):
        pass
    for work in halves:
        work.wait()
    group.barrier()


def test_what_runs_beside_has_rows_of_its_own(tmp_path):
    run = echelon.simulate(reduces_beside, 3, network="1GbE", costs={"forward": 1.0})
    timeline = run.timeline
    assert [len(lanes) for lanes in timeline.beside] == [2, 2, 1]
    assert [[span.name.split(",")[0] for span in lane] for lane in timeline.beside[0]] == [
        ["all_reduce(sum) of float32[262144]"] * 2,
        ["all_reduce(sum) of float32[262144]"],
    ]
    first, second = timeline.beside[0][0]
    assert 0 == first.start < first.end <= second.start < second.end < 1.0
    assert timeline.busy[2] < 1.01
    timeline.draw(tmp_path / "timeline.svg")
    assert (tmp_path / "timeline.svg").read_text().count(">communication<") == 5 + 1  # and the legend
    timeline.to_chrome(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert [threads[0, number] for number in range(3)] == ["steps", "beside", "beside"]
    beside = [event for event in events if event["ph"] == "X" and threads[event["pid"], event["tid"]] == "beside"]
    assert len(beside) == 8


def only_beside(group):
    group.all_reduce(torch.ones(1000), async_op=True).wait()


def test_what_runs_beside_alone_makes_the_makespan():
    run = echelon.simulate(only_beside, 2, network="1GbE")
    assert run.timeline.makespan == run.elapsed > 0
    assert run.timeline.busy == (0, 0)
