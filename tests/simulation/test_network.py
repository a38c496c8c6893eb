"""Messages cost latency + bytes / bandwidth; collectives take exactly the time of their formulas."""

import math
import random
import time

import pytest
import torch

import echelon
from echelon.collectives.plans.algorithms.registry import OPERATIONS, algorithms_of
from echelon.simulation import PRESETS
from echelon.simulation.faults import FaultPlan
from echelon.simulation.network import Traffic
from echelon.simulation.scheduler import Scheduler

ALPHA, BETA = 2.0**-10, 2.0**-20
"""Powers of two, so that no sum is rounded."""
NETWORK = echelon.Network(latency=ALPHA, bandwidth=1 / BETA)


def ceil_lg(p):
    return (p - 1).bit_length()


FORMULAS = {
    ("all_reduce", "ring"): lambda p, n: 2 * (p - 1) * ALPHA + 2 * n * (p - 1) / p * BETA,
    ("all_reduce", "rabenseifner"): lambda p, n: 2 * ceil_lg(p) * ALPHA + 2 * n * (p - 1) / p * BETA,
    ("all_reduce", "recursive_doubling"): lambda p, n: ceil_lg(p) * (ALPHA + n * BETA),
    ("broadcast", "binomial"): lambda p, n: ceil_lg(p) * (ALPHA + n * BETA),
    ("broadcast", "scatter_all_gather"): lambda p, n: (ceil_lg(p) + p - 1) * ALPHA + 2 * n * (p - 1) / p * BETA,
    ("reduce_scatter", "recursive_halving"): lambda p, n: ceil_lg(p) * ALPHA + n * (p - 1) / p * BETA,
    ("reduce_scatter", "ring"): lambda p, n: (p - 1) * ALPHA + n * (p - 1) / p * BETA,
    ("all_gather", "ring"): lambda p, n: (p - 1) * ALPHA + n * (p - 1) / p * BETA,
    ("all_to_all", "pairwise"): lambda p, n: (p - 1) * ALPHA + n * (p - 1) / p * BETA,
    ("barrier", "dissemination"): lambda p, n: ceil_lg(p) * ALPHA,  # noqa: ARG005
}
"""alpha: latency; beta: seconds per byte; n: bytes of the whole tensor; combining is computing, and costs nothing."""
POWERS_ONLY = {"rabenseifner", "recursive_doubling", "recursive_halving", "scatter_all_gather"}
CASES = [
    (operation, algorithm, world_size)
    for operation, algorithm in FORMULAS
    for world_size in (2, 3, 4, 6, 8)
    if algorithm not in POWERS_ONLY or world_size in (2, 4, 8)
]


ROOT = {"reduce": (0,), "gather": (0,), "scatter": (0,)}


def call(group, operation, num_bytes):
    if operation == "barrier":
        group.barrier()
    elif operation in ("all_gather", "gather"):
        getattr(group, operation)(torch.ones(num_bytes // 4 // group.world_size), *ROOT.get(operation, ()))
    else:
        getattr(group, operation)(torch.ones(num_bytes // 4), *ROOT.get(operation, ()))
    return group.backend.now()


@pytest.mark.parametrize("way", ["whole", "messages"])
@pytest.mark.parametrize("rows", [1, pytest.param(32, marks=pytest.mark.slow), 1024])
@pytest.mark.parametrize(("operation", "algorithm", "world_size"), CASES)
def test_collectives_take_the_time_of_their_formulas(monkeypatch, operation, algorithm, world_size, rows, way):
    monkeypatch.setenv(f"ECHELON_{operation.upper()}", algorithm)
    num_bytes = 4 * world_size * rows
    run = echelon.simulate(call, world_size, (operation, num_bytes), network=NETWORK, collectives=way)
    assert run.elapsed == max(run.results) == FORMULAS[operation, algorithm](world_size, num_bytes)


NOT_EXACT = {
    ("gather", "direct"): "here the latencies of messages to one rank overlap, and receiving takes nothing away",
    ("gather", "binomial"): "the same, and messages of several tensors come with their number of rows",
    ("scatter", "direct"): "here the latencies of messages from one rank overlap",
    ("scatter", "binomial"): "messages of several tensors come with their number of rows",
    ("reduce", "binomial"): "as gather direct, where the ranks are not a power of two",
    ("reduce", "hierarchical"): "the same, inside a host",
    ("all_gather", "recursive_doubling"): "messages of several tensors come with their number of rows",
    ("all_gather", "hierarchical"): "the same",
    ("all_to_all", "bruck"): "the same",
}
"""Where a simulation and the formula that docs/collectives.md has differ, and why."""


@pytest.mark.parametrize(
    ("algorithm", "world_size"),
    [
        pytest.param(
            algorithm,
            world_size,
            id=f"{operation}-{algorithm.name}-{world_size}",
            marks=pytest.mark.slow if world_size in (5, 12) else (),  # 3 and 7 are odd, and 4 and 8 are even
        )
        for operation in OPERATIONS
        for algorithm in algorithms_of(operation)
        for world_size in (2, 3, 4, 5, 7, 8, 12)
        if world_size % 2 == 0 or not algorithm.goes_by_hosts  # their formulas are for hosts of equal size
    ],
)
def test_every_algorithm_takes_the_time_of_its_formula(monkeypatch, algorithm, world_size):
    operation, num_hosts = algorithm.operation, world_size
    hosts = None
    if algorithm.goes_by_hosts:
        hosts, num_hosts = [world_size // 2] * 2, 2
    monkeypatch.setenv(f"ECHELON_{operation.upper()}", algorithm.name)
    num_bytes = 4 * world_size * 120
    network = echelon.Network(ALPHA, 1 / BETA, hosts, local_latency=ALPHA / 4, local_bandwidth=4 / BETA)
    names = {
        "p": world_size,
        "k": world_size // num_hosts,
        "h": num_hosts,
        "n": num_bytes,
        "alpha": ALPHA,
        "beta": BETA,
        "gamma": 0,
        "local_alpha": ALPHA / 4,
        "local_beta": BETA / 4,
        "lg": ceil_lg,
        "floor_lg": lambda p: p.bit_length() - 1,
        "odd": lambda p: int(p.bit_count() > 1),
        "bits": lambda p: sum(number.bit_count() for number in range(p)),
    }
    expected = eval(algorithm.cost, {}, names)
    elapsed = echelon.simulate(
        call, world_size, (operation, num_bytes), network=network, collectives="messages"
    ).elapsed
    assert elapsed == echelon.simulate(call, world_size, (operation, num_bytes), network=network).elapsed
    if (operation, algorithm.name) not in NOT_EXACT:
        assert elapsed == pytest.approx(expected, rel=1e-14)
    else:  # eight bytes a tensor more at most
        assert elapsed <= expected + ceil_lg(world_size) * 8 * world_size * BETA


def send_one(group, num_bytes):
    if group.rank == 0:
        group.send(torch.zeros(num_bytes, dtype=torch.uint8), 1)
    elif group.rank == 1:
        group.recv(0)
    return group.backend.now()


@pytest.mark.parametrize("num_bytes", [0, 1, 1 << 20])
def test_a_message_costs_latency_and_bytes(num_bytes):
    run = echelon.simulate(send_one, 2, (num_bytes,), network=NETWORK)
    assert run.results == [ALPHA + num_bytes * BETA] * 2
    assert run.bytes_sent == {(0, 1): num_bytes}


def send_to_all(group, num_bytes):
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    works = [group.isend(tensor, dst) for dst in range(group.world_size) if dst != group.rank]
    for src in range(group.world_size):
        if src != group.rank:
            group.recv(src)
    for work in works:
        work.wait()
    return group.backend.now()


def test_a_ranks_sends_share_its_bandwidth_and_links_are_full_duplex():
    run = echelon.simulate(send_to_all, 4, (1 << 20,), network=NETWORK)
    assert run.results == [ALPHA + 3 * (1 << 20) * BETA] * 4


@pytest.mark.parametrize("hosts", [[2, 2], [1, 3]])
def test_ranks_on_one_host_are_near(hosts):
    network = echelon.Network(1.0, math.inf, hosts, local_latency=0.25, local_bandwidth=math.inf)
    run = echelon.simulate(send_one, 4, (8,), network=network)
    assert run.results[1] == (0.25 if hosts == [2, 2] else 1.0)


def test_a_function_may_say_what_is_between_two_ranks():
    run = echelon.simulate(send_one, 2, (8,), network=lambda src, dst: echelon.Network(src + 2 * dst, math.inf))
    assert run.results[1] == 2.0


def test_presets_have_names_in_any_case():
    assert echelon.Network.named("10gbe") is PRESETS["10GbE"]


def test_presets_have_names():
    run = echelon.simulate(send_one, 2, (117_000,), network="1GbE")
    assert run.results[1] == pytest.approx(PRESETS["1GbE"].latency + 0.001)
    with pytest.raises(echelon.LaunchError, match="use one of 1GbE, 10GbE"):
        echelon.simulate(send_one, 2, (1,), network="token ring")


@pytest.mark.parametrize(
    "bad", [{"latency": -1}, {"overhead": -1}, {"bandwidth": 0}, {"hosts": [2, 0]}, {"latency": math.inf}]
)
def test_networks_that_cannot_be_are_refused(bad):
    with pytest.raises(echelon.LaunchError, match="give"):
        echelon.Network(**bad)


def test_hosts_must_have_as_many_ranks_as_the_simulation():
    with pytest.raises(echelon.LaunchError, match="have 4 ranks, the simulation has 3"):
        echelon.simulate(send_one, 3, (1,), network=echelon.Network(hosts=[2, 2]))


def wait_in_vain(group, seconds):
    if group.rank == 0:
        with pytest.raises(echelon.Timeout, match=r"waited .* s for rank 1, which is in receive from rank 0"):
            group.recv(1, timeout=seconds)
        group.send(torch.ones(1), 1)
    else:
        group.recv(0)
    return group.backend.now()


def test_timeouts_run_on_virtual_time():
    began = time.monotonic()
    assert echelon.simulate(wait_in_vain, 2, (60.0,)).results == [60.0, 60.0]
    assert time.monotonic() - began < 30


def hurry(group):
    """Waits for no time at all, after some has passed."""
    group.barrier()
    before = group.backend.now()
    if group.rank == 0:
        with pytest.raises(echelon.Timeout):
            group.recv(1, timeout=0.0)
    return group.backend.now() - before


def test_the_clock_never_goes_back():
    assert echelon.simulate(hurry, 2, network=NETWORK).results == [0.0, 0.0]


def answer_late(group):
    if group.rank == 0:
        return group.recv(1, timeout=2.0).item()
    with group.backend.compute("thinking"):
        pass
    group.send(torch.ones(1), 0)
    return None


def test_what_comes_at_the_last_moment_is_in_time():
    assert echelon.simulate(answer_late, 2, costs={"thinking": 2.0}).results[0] == 1.0
    with pytest.raises(echelon.Timeout):
        echelon.simulate(answer_late, 2, costs={"thinking": 2.0000001})


def last_of_many(group):
    if group.rank == 0:
        for number in range(50):
            group.isend(torch.full((50 - number,), number), 1)
        return None
    return [group.recv(0)[0].item() for _ in range(50)]


@pytest.mark.parametrize("network", [None, NETWORK])
@pytest.mark.parametrize("seed", range(5))
def test_messages_of_one_rank_never_overtake_each_other(network, seed):
    assert echelon.simulate(last_of_many, 2, seed=seed, network=network).results[1] == list(range(50))


def two_groups_beside(group):
    halves = [group.all_reduce(torch.ones(1 << 18), async_op=True) for _ in range(2)]
    with group.backend.compute("model"):
        pass
    for work in halves:
        work.wait()
    return group.backend.now()


def test_what_runs_beside_overlaps_with_computing():
    alone = echelon.simulate(two_groups_beside, 2, network=NETWORK).elapsed
    for seconds in (alone / 2, alone, 2 * alone):
        run = echelon.simulate(two_groups_beside, 2, network=NETWORK, costs={"model": seconds})
        assert run.elapsed == max(alone, seconds)


def use_the_backend_itself(group):
    group.backend.messages.barrier()
    return group.backend.now()


def test_the_backends_own_barrier_costs_its_rounds():
    assert echelon.simulate(use_the_backend_itself, 5, network=NETWORK).elapsed == 3 * ALPHA


def compute_while_they_talk(group, num_bytes):
    """Rank 0 sends beside its computing, rank 1 only receives, rank 2 only computes."""
    if group.rank == 0:
        work = group.isend(torch.zeros(num_bytes, dtype=torch.uint8), 1)
    with group.backend.compute("model" if group.rank != 1 else "nothing"):
        pass
    if group.rank == 0:
        work.wait()
    if group.rank == 1:
        group.recv(0)
    return group.backend.now()


def test_moving_bytes_takes_time_from_computing_and_from_nothing_else():
    network = echelon.Network(latency=ALPHA, bandwidth=1 / BETA, overhead=BETA / 4)
    run = echelon.simulate(compute_while_they_talk, 3, (1 << 20,), network=network, costs={"model": 4.0})
    assert run.results == [4.25, 1 + ALPHA, 4.0]


def test_what_holds_computing_up_may_be_held_up_itself():
    network = echelon.Network(latency=0.0, bandwidth=math.inf, overhead=1.0)

    def act(group):
        if group.rank == 0:
            for seconds in (0.5, 1.0, 9.0):
                with group.backend.compute(seconds):
                    pass
                group.send(torch.zeros(1, dtype=torch.uint8), 1)
            return None
        with group.backend.compute(1.0):
            pass
        ended = group.backend.now()
        for _ in range(3):
            group.recv(0)
        return ended

    # It would compute until 1; a byte that comes at 0.5 makes that 2, another at 1.5 makes it 3.
    run = echelon.simulate(act, 2, network=network, costs=lambda _, step: step)
    assert run.results[1] == 3.0


def test_a_collective_alone_takes_no_longer_for_its_overhead():
    slow = echelon.Network(latency=ALPHA, bandwidth=1 / BETA, overhead=1.0)
    for operation in ("all_reduce", "barrier"):
        runs = [echelon.simulate(call, 4, (operation, 4096), network=network) for network in (NETWORK, slow)]
        assert runs[0].elapsed == runs[1].elapsed


@pytest.mark.parametrize(
    ("on_one_core", "first", "second", "ends"),
    [
        (False, 4.0, 2.0, [4.0, 3.0]),
        (True, 4.0, 2.0, [6.0, 3.0]),  # the shorter one goes first
        (True, 2.0, 4.0, [2.0, 6.0]),  # and the longer one after it
    ],
)
def test_threads_of_a_rank_share_its_core(on_one_core, first, second, ends):
    scheduler = Scheduler(random.Random(0).random)
    traffic = Traffic(scheduler, 1, lambda *_: NETWORK, FaultPlan((), 1, has_costs=True))
    ended = [0.0, 0.0]

    def thread(number, begin, seconds):
        scheduler.sleep(begin)
        traffic.compute(0, seconds, on_one_core)
        ended[number] = scheduler.clock.now

    scheduler.add(0, lambda: thread(0, 0.0, first))
    scheduler.add(0, lambda: thread(1, 1.0, second), 1)
    scheduler.run()
    assert ended == ends
