"""The arithmetic of a plan gives the times of its messages, one by one."""

import math
import random

import pytest
import torch

import echelon
from echelon.collectives.plans.algorithms import OPERATIONS, algorithms_of
from echelon.collectives.plans.plan import Plan
from echelon.errors import PlanError
from echelon.simulation.playback import Framing, Link, Playback, Routes, waves_of

BYTES_PER_SECOND = 117e6
ROWS = 9


def call_one(group, call, rows, root):
    """Calls a collective with so many rows of three numbers on this rank."""
    x = values(group.rank, rows)
    match call:
        case "reduce" | "broadcast" | "gather":
            return getattr(group, call)(x, root)
        case "scatter":
            return group.scatter(x if group.rank == root else None, root)
        case "barrier":
            return group.barrier()
    return getattr(group, call)(x)


def values(rank, rows):
    return torch.arange(rows * 3.0).view(rows, 3).cos() + rank


def program(group, script):
    """Computes for some time, then calls a collective, again and again. Returns times and values."""
    found = []
    for call, rows, root, pauses in script:
        with group.backend.compute(pauses[group.rank]):
            pass
        result = call_one(group, call, rows[group.rank], root)
        found.append((group.backend.now(), None if result is None else result.tolist()))
    return found


def random_network(draw, world_size):
    sizes = []
    while sum(sizes) < world_size:
        sizes.append(draw.randint(1, world_size - sum(sizes)))
    return draw.choice(
        [
            None,
            echelon.Network(latency=1.7e-5, bandwidth=BYTES_PER_SECOND),
            echelon.Network(latency=0.0, bandwidth=1e6),
            echelon.Network(latency=1e-3, bandwidth=math.inf, hosts=sizes, local_latency=0.0),
            echelon.Network(hosts=sizes, bandwidth=BYTES_PER_SECOND, local_bandwidth=math.inf),
            lambda src, dst: echelon.Network(latency=1e-5 * (1 + src), bandwidth=1e6 * (1 + dst)),
        ]
    )


def random_script(draw, operation, world_size):
    script = []
    for _ in range(3):
        most = draw.choice([0, 1, ROWS, 40])
        if operation in ("all_reduce", "reduce", "broadcast", "reduce_scatter"):
            rows = [draw.randint(0, most)] * world_size
        else:
            rows = [draw.randint(0, most) for _ in range(world_size)]
        pauses = [draw.choice([0.0, 0.0, 1e-6, 3.3e-5, 1e-3]) for _ in range(world_size)]
        script.append((operation, rows, draw.randrange(world_size), pauses))
    return script


@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [(operation, algorithm.name) for operation in OPERATIONS for algorithm in algorithms_of(operation)],
)
@pytest.mark.parametrize("num_seeds", [6, pytest.param(12, marks=pytest.mark.slow)])
def test_whole_collectives_end_when_their_messages_would(monkeypatch, operation, algorithm, num_seeds):
    """Results, times of all ranks, spans and bytes: for random sizes, networks, hosts, roots and times of coming."""
    draw = random.Random(f"{operation} {algorithm}")
    monkeypatch.setenv(f"ECHELON_{operation.upper()}", algorithm)
    tried = 0
    for seed in range(num_seeds):
        world_size = draw.choice([1, 2, 3, 4, 5, 8])
        network = random_network(draw, world_size)
        script = random_script(draw, operation, world_size)
        order = draw.choice(["shm", "tcp"])
        try:
            whole, messages = (
                echelon.simulate(
                    program,
                    world_size,
                    (script,),
                    seed=seed,
                    network=network,
                    costs=lambda _, step: step,
                    collectives=way,
                    order=order,
                )
                for way in ("whole", "messages")
            )
        except PlanError:  # an algorithm that goes by hosts, on hosts that do not allow it
            continue
        tried += 1
        assert whole.results == messages.results
        assert whole.elapsed == messages.elapsed
        assert whole.timeline == messages.timeline
        assert whole.bytes_sent == messages.bytes_sent
    assert tried >= 2


def test_a_rank_that_has_not_come_holds_up_the_ranks_behind_it_alone():
    chain = Plan.from_text("chain: 4 ranks, 1 chunk\nrank 0: 0>1\nrank 1: 0<0 | 0>2\nrank 2: 0<1\nrank 3: .")
    waves = waves_of(chain, Framing.PARTS)
    assert waves.needs == (0b0001, 0b0011, 0b0111, 0b1000)
    assert waves.neighbours == (frozenset({1}), frozenset({0, 2}), frozenset({1}), frozenset())
    playback = Playback(Routes(waves, lambda *_: Link(1.0, 10.0)), waves.num_bytes([20]))
    assert playback.play([0.0, math.inf, 0.0, 5.0], [0.0] * 4).ends.tolist() == [3.0, math.inf, math.inf, 5.0]
    assert playback.play([0.0, 7.0, 0.0, 5.0], [0.0] * 4).ends.tolist() == [3.0, 10.0, 10.0, 5.0]
    # Earlier messages from rank 0 leave until 4.
    assert playback.play([0.0, 7.0, 0.0, 5.0], [4.0, 0, 0, 0]).ends.tolist() == [7.0, 10.0, 10.0, 5.0]


def test_plans_that_differ_in_direction_only_have_waves_of_their_own():
    """A Send equals a Recv with the same numbers, so these plans are equal. The cache once took one for the other."""
    there, back = (
        Plan.from_text(f"one: 2 ranks, 1 chunk\nrank 0: 0{first}1\nrank 1: 0{second}0")
        for first, second in ((">", "<"), ("<", ">"))
    )
    assert waves_of(there, Framing.PARTS).needs == (0b01, 0b11)
    assert waves_of(back, Framing.PARTS).needs == (0b11, 0b10)


def test_a_plan_that_waits_for_ever_is_refused():
    plan = Plan.from_text("stuck: 2 ranks, 1 chunk\nrank 0: 0<1\nrank 1: .")
    with pytest.raises(PlanError, match="rank 0 waits for ever"):
        waves_of(plan, Framing.ROWS)


def two_beside(group, count):
    groups = [group.subgroup(range(group.world_size)) for _ in range(2)]
    works = [one.all_reduce(torch.ones(count), async_op=True) for one in groups]
    for work in works:
        work.wait()
    return group.backend.now()


def test_collectives_beside_each_other_share_the_link_of_a_rank():
    network = echelon.Network(latency=1e-6, bandwidth=1e6)
    alone = echelon.simulate(one_alone, 4, (100_000,), network=network).elapsed
    for way in ("whole", "messages"):
        both = echelon.simulate(two_beside, 4, (100_000,), network=network, collectives=way).elapsed
        assert both == pytest.approx(2 * alone, rel=1e-3)


def one_alone(group, count):
    group.all_reduce(torch.ones(count))
