"""Every reduction with every dtype gives the right value, or says that it has none."""

import operator as python
from functools import reduce

import pytest
import torch
from torch.distributed import ReduceOp

import echelon
from echelon.backends.formats.wire import DTYPES
from echelon.backends.operators import accumulation_dtype, check_op, combine_in_order, operator
from echelon.errors import UnsupportedOp

DTYPE_NAMES = [name for name, _ in DTYPES]
OPS = ("sum", "mean", "product", "min", "max", "band", "bor", "bxor")
RAW = {name for name in DTYPE_NAMES if "bits" in name} | {"float4_e2m1fn_x2"}
"""What torch itself cannot compute with."""
FLOATS = {name for name in DTYPE_NAMES if "float" in name} - RAW
COMPLEX = {"complex32", "complex64", "complex128"}
VALUES = ([1, 2, 4, 1], [2, 1, 4, 8], [1, 4, 2, 1], [1, 1, 1, 2])
"""Exact in every dtype, sums and products too, except float8_e8m0fnu, which has powers of two only."""


def is_supported(op, name):
    if name in RAW:
        return False
    if op == "mean":
        return name in FLOATS | COMPLEX
    if op in ("band", "bor", "bxor"):
        return name not in FLOATS | COMPLEX
    if op in ("min", "max"):
        return name not in COMPLEX
    return name != "bool"


def expected(op, columns, dtype):
    """Returns what plain Python makes of the values, in `dtype`."""
    python_op = {
        "sum": python.add,
        "mean": python.add,
        "product": python.mul,
        "min": min,
        "max": max,
        "band": python.and_,
        "bor": python.or_,
        "bxor": python.xor,
    }[op]
    if dtype == torch.bool:
        columns = [[bool(value) for value in column] for column in columns]
    results = [reduce(python_op, column) for column in columns]
    if op == "mean":
        results = [result / 4 for result in results]
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    return torch.tensor(results, dtype=wide).to(dtype)


@pytest.mark.parametrize("name", DTYPE_NAMES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_and_op(op, name):
    dtype = getattr(torch, name)
    if not is_supported(op, name):
        with pytest.raises(UnsupportedOp, match=f"op='{op}' has no meaning for torch.{name}: convert"):
            operator(op, dtype)
        return
    accumulation = accumulation_dtype(dtype)
    tensors = [torch.tensor(values, dtype=torch.float64).to(dtype).to(accumulation) for values in VALUES]
    reduction = operator(op, dtype)
    total = tensors[0]
    for tensor in tensors[1:]:
        reduction.combine(total, tensor)
    got = reduction.finish(total, len(VALUES)).to(dtype)
    assert got.dtype == dtype
    wanted = expected(op, list(zip(*VALUES, strict=True)), dtype)
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), f"{got} instead of {wanted}"


@pytest.mark.parametrize("name", ["uint8", "uint16", "uint32", "uint64"])
def test_unsigned_integers_wrap_around_and_have_their_own_order(name):
    dtype = getattr(torch, name)
    wide = 256**dtype.itemsize
    left, right = wide - 1, wide // 2 - 3
    exact = {
        "sum": left + right,
        "product": left * right,
        "min": right,
        "max": left,
        "band": left & right,
        "bor": left | right,
        "bxor": left ^ right,
    }
    for op, value in exact.items():
        for own, other in ((left, right), (right, left)):
            total = torch.tensor([own], dtype=dtype)
            operator(op, dtype).combine(total, torch.tensor([other], dtype=dtype))
            assert total.item() == value % wide, op


def test_min_and_max_pass_a_nan_on():
    for op in ("min", "max"):
        for own, other in ((1.0, float("nan")), (float("nan"), 1.0)):
            total = torch.tensor([own])
            operator(op, torch.float32).combine(total, torch.tensor([other]))
            assert total.isnan().all()


def test_an_unknown_op_lists_the_known_ones():
    with pytest.raises(
        UnsupportedOp, match="op='xor': did you mean bxor\\? There are sum, mean, product, min, max, band, bor, bxor"
    ):
        operator("xor", torch.float32)
    with pytest.raises(UnsupportedOp, match=r"op=3: use one of sum, mean, "):
        check_op(3)


def test_names_of_torch_are_known():
    assert [check_op(op) for op in ("avg", ReduceOp.AVG, ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.BXOR, "MAX")] == [
        "mean",
        "mean",
        "sum",
        "product",
        "bxor",
        "max",
    ]
    with pytest.raises(UnsupportedOp, match=r"op=<RedOpType.PREMUL_SUM: 8>: use one of sum"):
        check_op(ReduceOp.PREMUL_SUM)


def reduce_all(group):
    got = {}
    for name in DTYPE_NAMES:
        dtype = getattr(torch, name)
        tensor = torch.tensor(VALUES[group.rank], dtype=torch.float64)
        tensor = tensor.view(torch.uint8).view(dtype) if name in RAW else tensor.to(dtype)
        try:
            got[name] = group.all_reduce(tensor, "max").view(torch.uint8)
        except UnsupportedOp:
            got[name] = None
    return got


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_group_reduces_every_dtype_or_says_so():
    for got in echelon.simulate(reduce_all, 4).results:
        for name in DTYPE_NAMES:
            assert (got[name] is None) == (not is_supported("max", name)), name
            if got[name] is not None:
                wanted = expected("max", list(zip(*VALUES, strict=True)), getattr(torch, name))
                assert torch.equal(got[name], wanted.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8, 64])
def test_a_mean_has_the_bits_of_a_division(num_ranks, dtype):
    facts = torch.finfo(dtype)
    edges = [0.0, -0.0, facts.max, facts.min, facts.tiny, 3 * facts.smallest_normal / 8, float("inf"), float("nan")]
    values = torch.randn(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    total = torch.cat([values, torch.tensor(edges, dtype=torch.float64)]).to(dtype)
    mean = operator("mean", dtype).finish(total.clone(), num_ranks)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(mean.view(bits), (total / num_ranks).view(bits))


@pytest.mark.parametrize("num_elements", [1, 1000, 100_000])
@pytest.mark.parametrize("op", ["sum", "mean", "product", "min", "max"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_combined_as_float32_and_rounded_once(dtype, num_ranks, op, num_elements):
    generator = torch.Generator().manual_seed(num_ranks)
    # Any bits: tiny, huge, infinite ones, and those that are no numbers.
    bits = torch.randint(-(2**15), 2**15, (num_ranks, num_elements), generator=generator, dtype=torch.int16)
    parts = list(bits.view(dtype))
    reducing = operator(op, dtype)
    exact = parts[0].float()
    for part in parts[1:]:
        reducing.combine(exact, part.float())
    wanted = reducing.finish(exact, num_ranks).to(dtype)
    combine_in_order(parts[-1], parts, reducing)  # into one of them
    assert torch.equal(parts[-1].nan_to_num(nan=7.0).view(torch.int16), wanted.nan_to_num(nan=7.0).view(torch.int16))
