"""Algorithms as groups run them: equal to one another and to the sum, and bit-identical on all ranks."""

import os

import pytest
import torch

import echelon
from echelon.collectives.plans.algorithms import algorithms_of
from echelon.simulation import Network

SIZES = (1, 2, 3, 4, 5, 7, 8, 13)


def use(monkeypatch, operation, name):
    monkeypatch.setenv(f"ECHELON_{operation.upper()}", name)


def simulate(fn, world_size, *args):
    return echelon.simulate(fn, world_size, args, timeout=20.0, late_sends=True, order="tcp").results


def names(operation):
    return [algorithm.name for algorithm in algorithms_of(operation)]


def random_sum(group, op, dtype):
    generator = torch.Generator().manual_seed(group.rank)
    values = torch.randn(53, generator=generator) * 10.0 ** torch.randint(-3, 4, (53,), generator=generator)
    mine = values.to(dtype)
    return mine.clone(), group.all_reduce(mine, op)


@pytest.mark.parametrize("name", names("all_reduce"))
@pytest.mark.parametrize(
    ("op", "dtype"), [("sum", torch.float32), ("mean", torch.bfloat16), ("product", torch.complex64)]
)
def test_all_reduce_is_bit_identical_on_all_ranks(monkeypatch, name, op, dtype):
    use(monkeypatch, "all_reduce", name)
    for world_size in SIZES:
        ranks = simulate(random_sum, world_size, op, dtype)
        for _, got in ranks:
            assert torch.equal(got.view(torch.uint8), ranks[0][1].view(torch.uint8))
        inputs = torch.stack([mine for mine, _ in ranks]).to(torch.complex128 if dtype.is_complex else torch.float64)
        expected = inputs.prod(0) if op == "product" else inputs.sum(0) / (world_size if op == "mean" else 1)
        error = (ranks[0][1] - expected).abs() / inputs.abs().sum(0).clamp(min=1)
        assert op == "product" or error.max() < 2**-7


def sum_of_nans(group):
    bits = torch.tensor([0x7FC00001 + group.rank], dtype=torch.int32)
    return group.all_reduce(bits.view(torch.float32)).view(torch.int32).item()


@pytest.mark.parametrize("name", names("all_reduce"))
def test_even_a_nan_has_the_same_bits_everywhere(monkeypatch, name):
    """x + y keeps the bits of one of two NaNs, by their order."""
    use(monkeypatch, "all_reduce", name)
    for world_size in SIZES:
        assert len(set(simulate(sum_of_nans, world_size))) == 1


def everything(group):
    """One of each operation that has several algorithms, on tensors of few and of uneven rows."""
    size, rank = group.world_size, group.rank
    uneven = torch.full((rank % 3, 2), float(rank))
    last = size - 1
    whole = torch.arange(2.0 * size + 3).reshape(-1, 1) * (rank + 1)
    splits = [(rank + dst) % 3 for dst in range(size)]
    rows = torch.arange(sum(splits)) + 100 * rank
    return {
        "broadcast": group.broadcast(torch.arange(11) * (rank + 1), src=last).tolist(),
        "reduce": group.reduce(torch.arange(11) * (rank + 1), dst=last).tolist(),
        "all_gather": group.all_gather(uneven).tolist(),
        "gather": None if (got := group.gather(uneven, dst=last)) is None else got.tolist(),
        "scatter": group.scatter(whole if rank == last else None, src=last).tolist(),
        "reduce_scatter": group.reduce_scatter(whole).tolist(),
        "all_to_all": group.all_to_all(rows, in_splits=splits).tolist(),
    }


OTHERS = [
    (operation, name)
    for operation in ("broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
    for name in names(operation)
]


@pytest.fixture(scope="module")
def expected():
    """What the algorithms of the table give; tests of the group compare that with what it must be."""
    return {world_size: simulate(everything, world_size) for world_size in SIZES}


@pytest.mark.parametrize(("operation", "name"), OTHERS)
def test_all_algorithms_give_the_same(monkeypatch, expected, operation, name):
    use(monkeypatch, operation, name)
    for world_size in SIZES:
        assert simulate(everything, world_size) == expected[world_size]


def test_the_expected_is_right(expected):
    ranks = expected[4]
    assert [rank["scatter"] for rank in ranks] == [
        [[4.0 * i] for i in part] for part in ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10))
    ]
    assert ranks[0]["all_gather"] == [[1.0] * 2, [2.0] * 2, [2.0] * 2]
    assert ranks[3]["reduce"] == [10 * i for i in range(11)]
    assert ranks[1]["reduce_scatter"] == [[10.0 * i] for i in (3, 4, 5)]
    # rank 2 gets (src + 2) % 3 rows from each, after those for ranks 0 and 1
    assert ranks[2]["all_to_all"] == [1, 2, 202, 301, 302]


def disagree(group, names):
    os.environ["ECHELON_ALL_REDUCE"] = names[group.rank]
    try:
        group.all_reduce(torch.ones(4))
    except echelon.EchelonError as error:
        return type(error).__name__, str(error)
    finally:
        del os.environ["ECHELON_ALL_REDUCE"]
    return "nothing", ""


@pytest.mark.parametrize("others", ["recursive_doubling", "rabenseifner", "hierarchical"])
def test_ranks_that_were_told_different_algorithms_are_told(pool, others):
    outcomes = pool.run(disagree, 3, [others, others, "ring"], backend="tcp")
    assert {kind for kind, _ in outcomes} == {"CollectiveMismatch"}
    texts = " ".join(text for _, text in outcomes)
    assert "by ring" in texts
    assert f"by {others}" in texts


def by_every_algorithm(group, choices):
    """Runs one of each operation, once by every algorithm of one of them."""
    found = {}
    for operation, name in choices:
        os.environ[f"ECHELON_{operation.upper()}"] = name
        try:
            ones = group.all_reduce(torch.arange(40.0) + group.rank).tolist()
            found[operation, name] = {**everything(group), "all_reduce": ones}
        finally:
            del os.environ[f"ECHELON_{operation.upper()}"]
    return found


def test_all_algorithms_give_the_same_on_processes(pool, expected):
    choices = [*OTHERS, *(("all_reduce", name) for name in names("all_reduce"))]
    for rank, found in enumerate(pool.run(by_every_algorithm, 3, choices, backend="tcp")):
        assert list(found) == choices
        for results in found.values():
            assert results == {**expected[3][rank], "all_reduce": [3.0 * i + 3 for i in range(40)]}


def large(group, operation, num_elements):
    """Runs an operation on large tensors, then writes to them; returns the number of wrong elements."""
    size, rank, last = group.world_size, group.rank, group.world_size - 1
    base = torch.arange(num_elements, dtype=torch.int32) % 1009
    mine, total, parts = base * (rank + 1), base * sum(range(1, size + 1)), base.chunk(size)
    rows = torch.cat([parts[src] * (src + 1) for src in range(size)])
    if operation == "all_reduce":
        got, wanted = group.all_reduce(mine), total
    elif operation == "reduce":
        got, wanted = group.reduce(mine, dst=last), total if rank == last else base * (rank + 1)
    elif operation == "broadcast":
        got, wanted = group.broadcast(mine, src=last), base * size
    elif operation == "all_gather":
        got, wanted = group.all_gather(mine.chunk(size)[rank]), rows
    elif operation == "gather":
        got, wanted = group.gather(mine.chunk(size)[rank], dst=last), rows if rank == last else None
    elif operation == "scatter":
        got, wanted = group.scatter(mine if rank == last else None, src=last), parts[rank] * size
    elif operation == "reduce_scatter":
        got, wanted = group.reduce_scatter(mine), total.chunk(size)[rank]
    else:
        got, wanted = group.all_to_all(mine), torch.cat([parts[rank] * (src + 1) for src in range(size)])
    num_wrong = 0 if got is wanted else int((got != wanted).sum())
    mine.fill_(-1)  # which others must not see any more
    return num_wrong


def large_by_every_algorithm(group, choices, num_elements):
    wrong = {}
    for operation, name in choices:
        os.environ[f"ECHELON_{operation.upper()}"] = name
        try:
            wrong[operation, name] = large(group, operation, num_elements)
        finally:
            del os.environ[f"ECHELON_{operation.upper()}"]
    return {key: number for key, number in wrong.items() if number}


EVERY = [*OTHERS, *(("all_reduce", name) for name in names("all_reduce"))]
MEBIBYTE = 1 << 18
"""As many elements."""


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_chunk_that_is_being_sent_is_not_overwritten_on_processes(pool, world_size):
    """Of a large chunk the kernel takes a part at once; the rest is read when the peer has made room."""
    num_elements = 4 * MEBIBYTE // world_size * world_size
    assert pool.run(large_by_every_algorithm, world_size, EVERY, num_elements, backend="tcp") == [{}] * world_size


def slow_from(slow):
    """Returns a network where the sends of one rank take far longer than all others."""
    return lambda src, _: Network(latency=1.0 if src == slow else 1e-6)


@pytest.mark.parametrize(("operation", "name"), EVERY)
def test_a_chunk_that_is_being_sent_is_not_overwritten(monkeypatch, operation, name):
    """A rank whose sends are slow has received before they are done."""
    use(monkeypatch, operation, name)
    for world_size in (2, 3, 4):
        for slow in range(world_size):
            found = echelon.simulate(
                large,
                world_size,
                (operation, 24),
                network=slow_from(slow),
                timeout=1000.0,
                collectives="messages",
                order="tcp",
            )
            assert found.results == [0] * world_size
