"""Every collective gives what torch.distributed with Gloo gives for the same inputs, and what one process does."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import echelon
from tests.helpers.collective_cases import GLOO_DTYPES, call, cases, check, expected, input_of, splits_of

OPS = {"sum": "SUM", "mean": "SUM", "product": "PRODUCT", "min": "MIN", "max": "MAX"}
OPS |= {"band": "BAND", "bor": "BOR", "bxor": "BXOR"}
QUICK = settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
# Without shrinking: hypothesis takes a timeout for a failure, and would look for a smaller one for ever.
LONG = settings(QUICK, max_examples=100, phases=(Phase.explicit, Phase.generate))
BATCHES = st.lists(cases(GLOO_DTYPES), min_size=1, max_size=12)


def with_gloo(case, rank, size):
    """Returns what Gloo gives; means, and rows that differ in number, are made of what it has."""
    root, tensor = case.root % size, input_of(case, rank)
    if case.name in ("all_reduce", "reduce", "reduce_scatter"):
        op = getattr(dist.ReduceOp, OPS[case.op])
        if case.name == "reduce":
            dist.reduce(total := tensor.clone(), root, op)
        else:
            dist.all_reduce(total := tensor, op)
        if case.name == "reduce" and rank != root:
            return tensor
        total = (total.double() / size).to(total.dtype) if case.op == "mean" else total
        return total.tensor_split(size)[rank] if case.name == "reduce_scatter" else total
    if case.name == "broadcast":
        dist.broadcast(tensor, root)
        return tensor
    rows = [len(input_of(case, src)) for src in range(size)]
    if case.name in ("all_gather", "gather"):
        sends, gets = [rows[rank]] * size, rows
        tensor = torch.cat([tensor] * size)
    elif case.name == "scatter":
        parts = [len(part) for part in input_of(case, root).tensor_split(size)]
        sends = parts if rank == root else [0] * size
        gets = [parts[rank] if src == root else 0 for src in range(size)]
        tensor = tensor if rank == root else tensor[:0]
    elif case.uneven:
        sends, gets = splits_of(case, rank, size), [splits_of(case, src, size)[rank] for src in range(size)]
    else:
        sends = [len(part) for part in tensor.tensor_split(size)]
        gets = [len(input_of(case, src).tensor_split(size)[rank]) for src in range(size)]
    out = torch.empty(sum(gets), *tensor.shape[1:], dtype=tensor.dtype)
    dist.all_to_all_single(out, tensor, gets, sends)
    return None if case.name == "gather" and rank != root else out


def compare(group, batch, path):
    """Makes the calls of a batch, ours and with Gloo."""
    dist.init_process_group("gloo", store=dist.FileStore(path, group.world_size), **world_of(group))
    try:
        for case in batch:
            got, theirs = call(case, group), with_gloo(case, group.rank, group.world_size)
            check(case, got, theirs)
            check(case, got, expected(case, group.world_size)[group.rank])
    finally:
        dist.destroy_process_group()


def world_of(group):
    return {"rank": group.rank, "world_size": group.world_size}


def compare_on(pool, world_size, batch):
    for backend in ("shm", "tcp"):
        with tempfile.TemporaryDirectory() as folder:
            pool.run(compare, world_size, batch, f"{folder}/store", backend=backend)


@pytest.mark.parametrize("world_size", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))])
def test_processes_give_what_gloo_gives(pool, world_size):
    QUICK(given(BATCHES)(lambda batch: compare_on(pool, world_size, batch)))()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_processes_give_what_gloo_gives_at_length(pool, world_size):
    LONG(given(BATCHES)(lambda batch: compare_on(pool, world_size, batch)))()


def make_calls(group, batch):
    return [call(case, group) for case in batch]


def check_simulated(world_size, batch, seed):
    results = echelon.simulate(make_calls, world_size, (batch,), seed=seed, late_sends=True, order="tcp").results
    for number, case in enumerate(batch):
        for rank, wanted in enumerate(expected(case, world_size)):
            check(case, results[rank][number], wanted)


@pytest.mark.parametrize("world_size", [*range(1, 18), 64])
def test_simulated_ranks_give_what_one_process_does(world_size):
    batches = st.lists(cases(), min_size=1, max_size=8)
    settings(QUICK, max_examples=2 if world_size > 17 else 5)(
        given(batches, st.integers(0, 9))(lambda batch, seed: check_simulated(world_size, batch, seed))
    )()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [*range(1, 18), 64])
def test_simulated_ranks_give_what_one_process_does_at_length(world_size):
    batches = st.lists(cases(), min_size=1, max_size=8)
    settings(LONG, max_examples=20 if world_size > 17 else 100)(
        given(batches, st.integers(0, 9))(lambda batch, seed: check_simulated(world_size, batch, seed))
    )()
