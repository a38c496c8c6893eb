"""Random calls of collectives, what a group makes of them, and what one process that has all inputs does."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st

FLOATS = ("float32", "float64", "float16")
GLOO_DTYPES = (*FLOATS, "int8", "uint8", "int32", "int64")
ALL_DTYPES = (*GLOO_DTYPES, "bfloat16", "int16", "uint16", "uint32", "uint64", "complex64", "complex128", "bool")
MOVED = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
REDUCED = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
NUMBERS = ("sum", "product", "min", "max")


class Case(NamedTuple):
    """One call. `root` is taken modulo the number of ranks; rows are those of rank 0, others may have more."""

    name: str
    dtype: str
    rows: int
    row: tuple[int, ...]
    op: str
    layout: str
    uneven: bool
    with_out: bool
    root: int
    seed: int


def ops_of(dtype):
    if dtype == "bool":
        return ("min", "max", "band", "bor", "bxor")
    if "complex" in dtype:
        return ("sum", "mean", "product")
    return (*NUMBERS, "mean") if "float" in dtype else (*NUMBERS, "band", "bor", "bxor")


@st.composite
def cases(draw, dtypes=ALL_DTYPES):
    dtype = draw(st.sampled_from(dtypes))
    return Case(
        draw(st.sampled_from(REDUCED + MOVED)),
        dtype,
        draw(st.integers(0, 9)),
        draw(st.sampled_from([(), (1,), (3,), (2, 5), (0,), (700,)])),
        draw(st.sampled_from(ops_of(dtype))),
        draw(st.sampled_from(["plain", "transposed", "strided", "leaf"])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 100)),
        draw(st.integers(0, 1000)),
    )


def input_of(case, rank):
    """Returns the values of one rank: whole numbers so small that nothing is rounded, in whatever order it is added."""
    generator = torch.Generator().manual_seed(case.seed * 1000 + rank)
    rows = case.rows
    if case.uneven and case.name in ("all_gather", "gather", "all_to_all"):
        rows = (rows + 3 * rank) % 7
    low, high = (0, 4) if "u" in case.dtype or case.dtype == "bool" else (-3, 4)
    if case.op == "product" and case.name in REDUCED:
        low, high = 1, 3 if rank < 4 else 2
    values = torch.randint(low, high, (rows, *case.row), generator=generator)
    return values.bool() if case.dtype == "bool" else values.to(getattr(torch, case.dtype))


def laid_out(values, layout):
    """Returns the same values in memory of another layout."""
    if layout == "transposed":
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        room = torch.zeros(*values.shape, 2, dtype=values.dtype)
        room[..., 1] = values
        return room[..., 1]
    if layout == "leaf" and (values.dtype.is_floating_point or values.dtype.is_complex):
        return values.clone().requires_grad_()
    return values.clone()


def splits_of(case, src, size):
    """Returns how many rows a rank sends to each in all_to_all."""
    rows, splits = len(input_of(case, src)), []
    for dst in range(size):
        left = rows - sum(splits)
        splits.append(left if dst == size - 1 else min(left, (src + dst + case.seed) % 3))
    return splits


def call(case, group, put=lambda values: values):
    """Makes the call in a group, with tensors that `put` has brought to some device."""
    root, tensor = case.root % group.world_size, put(laid_out(input_of(case, group.rank), case.layout))
    before = tensor.detach().clone()
    if case.name in ("all_reduce", "reduce"):
        got = group.all_reduce(tensor, case.op) if case.name == "all_reduce" else group.reduce(tensor, root, case.op)
        assert got is tensor
        return got.detach()
    if case.name == "broadcast":
        return group.broadcast(tensor, root).detach()
    wanted = expected(case, group.world_size)[group.rank] if case.with_out else None
    out = None if wanted is None else put(laid_out(torch.zeros_like(wanted), case.layout))
    if case.name == "reduce_scatter":
        got = group.reduce_scatter(tensor, case.op, out=out)
    elif case.name == "all_gather":
        got = group.all_gather(tensor, out=out)
    elif case.name == "all_to_all":
        mine = splits_of(case, group.rank, group.world_size) if case.uneven else None
        everyone = [splits_of(case, src, group.world_size)[group.rank] for src in range(group.world_size)]
        got = group.all_to_all(tensor, out=out, in_splits=mine, out_splits=everyone if mine and case.seed % 2 else None)
    else:
        out = None
        got = group.gather(tensor, root) if case.name == "gather" else group.scatter(tensor, root)
    assert out is None or got is out
    assert torch.equal(tensor.detach(), before), "the input has changed"
    return got if got is None else got.detach()


def reduced(case, size):
    stack = torch.stack([input_of(case, rank) for rank in range(size)])
    if case.op in ("sum", "mean", "product"):
        wide = torch.complex128 if stack.is_complex() else torch.float64
        stack = stack.to(wide) if "int" not in case.dtype else stack.to(torch.int64)
        total = stack.prod(0) if case.op == "product" else stack.sum(0)
        return (total / size if case.op == "mean" else total).to(getattr(torch, case.dtype))
    total = stack[0].to(torch.int64) if "int" in case.dtype or case.dtype == "bool" else stack[0]
    for other in stack[1:]:
        other = other.to(total.dtype)
        total = {
            "min": torch.minimum,
            "max": torch.maximum,
            "band": torch.bitwise_and,
            "bor": torch.bitwise_or,
            "bxor": torch.bitwise_xor,
        }[case.op](total, other)
    return total.to(getattr(torch, case.dtype))


def expected(case, size):
    """Returns the result of every rank, None where there is none."""
    root, ranks = case.root % size, range(size)
    inputs = [input_of(case, rank) for rank in ranks]
    if case.name in REDUCED:
        total = reduced(case, size)
        if case.name == "reduce":
            return [total if rank == root else inputs[rank] for rank in ranks]
        return [total] * size if case.name == "all_reduce" else list(total.tensor_split(size))
    if case.name == "broadcast":
        return [inputs[root]] * size
    if case.name == "scatter":
        return list(inputs[root].tensor_split(size))
    if case.name == "all_to_all":
        parts = [
            inputs[src].split(splits_of(case, src, size)) if case.uneven else inputs[src].tensor_split(size)
            for src in ranks
        ]
        return [torch.cat([parts[src][rank] for src in ranks]) for rank in ranks]
    whole = torch.cat(inputs)
    return [whole if case.name == "all_gather" or rank == root else None for rank in ranks]


def check(case, got, wanted):
    """Compares a result bit for bit; means up to rounding."""
    assert (got is None) == (wanted is None), case
    if got is not None:
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), f"{case}: {got.dtype} {got.shape}"
        same = torch.equal(bytes_of(got), bytes_of(wanted))
        if case.op == "mean" and case.name in REDUCED:  # division rounds
            same = torch.allclose(got, wanted)
        assert same or torch.equal(got, wanted), f"{case}: {got} instead of {wanted}"


def bytes_of(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
