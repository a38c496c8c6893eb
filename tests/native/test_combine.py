"""Reductions of the native library beside torch's: the same bits."""

import itertools
import math

import pytest
import torch

from echelon._native import OPS, combine
from echelon.backends.operators import operator

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)
LENGTHS = (0, 1, 7, 8, 1023, 1024, 2500)


def special(dtype):
    """Returns values that go wrong most easily, among ordinary ones."""
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return [0, 1, -1, 7, info.max, info.min, info.max - 1]
    info = torch.finfo(dtype)
    some = [0.0, 1.0, 1.5, info.max, info.tiny, info.smallest_normal / 4, info.eps, 1 + info.eps, math.inf, 3.0, 1e-3]
    return [*some, *(-value for value in some), math.nan]


def by_torch(op, parts):
    """Reduces in the dtype that values are combined in, and rounds once."""
    wide = torch.float32 if parts[0].is_floating_point() and parts[0].itemsize < 4 else parts[0].dtype
    found = operator(op, parts[0].dtype)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        found.combine(total, part.to(wide))
    return found.finish(total, len(parts)).to(parts[0].dtype)


def same(got, want, op):
    """Compares bits. Of NaNs, and of zeros that are compared, torch takes one by the position of an element."""
    if not got.is_floating_point():
        return torch.equal(got, want)
    numbers = torch.int16 if got.itemsize == 2 else torch.int32 if got.itemsize == 4 else torch.int64
    equal = got.view(numbers) == want.view(numbers)
    equal |= got.isnan() & want.isnan()
    if op in ("max", "min"):
        equal |= (got == 0) & (want == 0)
    return bool(equal.all())


def accepts(op, dtype):
    return op != "mean" or dtype.is_floating_point


CASES = [(op, dtype) for op in OPS for dtype in (*FLOATS, *INTEGERS) if accepts(op, dtype)]


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=str)
def test_special_values(op, dtype):
    for count in (2, 3):
        columns = zip(*itertools.product(special(dtype), repeat=count), strict=True)
        parts = [torch.tensor(column, dtype=dtype) for column in columns]
        target = torch.empty_like(parts[0])
        assert combine(OPS.index(op), target, *parts)
        assert same(target, by_torch(op, parts), op)


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=str)
def test_any_number_of_parts_and_elements(op, dtype):
    for count, length in itertools.product((2, 3, 4, 5), LENGTHS):
        generator = torch.Generator().manual_seed(length)
        parts = [(torch.randn(length, generator=generator) * 1000).to(dtype) for _ in range(count)]
        want = by_torch(op, parts) if length else parts[0].clone()
        for target in (torch.empty_like(parts[0]), *parts):
            values = [part.clone() if part is not target else part for part in parts]
            before = target.clone()
            assert combine(OPS.index(op), target, *values)
            assert same(target, want, op), (count, length)
            target.copy_(before)


def test_other_tensors_are_left_alone():
    ones = torch.ones(4)
    for target, *parts in (
        (torch.ones(4, dtype=torch.int8), torch.ones(4, dtype=torch.int8), torch.ones(4, dtype=torch.int8)),
        (torch.ones(8)[::2], ones, ones),
        (torch.ones(4), ones, torch.ones(8)[::2]),
        (torch.ones(4), ones, torch.ones(4, dtype=torch.float64)),
        (torch.ones(4), ones, torch.ones(5)),
        (torch.ones(4, device="meta"), ones, ones),
        (torch.ones(4, dtype=torch.complex64), torch.ones(4, dtype=torch.complex64), ones),
        (ones.as_subclass(Strange), ones, ones),
    ):
        assert not combine(OPS.index("sum"), target, *parts)
    assert not combine(OPS.index("mean"), *(torch.ones(2, dtype=torch.int32) for _ in range(3)))
    assert not combine(len(OPS), ones, ones, ones)
    assert torch.equal(ones, torch.ones(4))


class Strange(torch.Tensor):
    """A tensor whose own code answers questions about it."""


def test_dimensions_of_one_element_have_any_stride():
    parts = [torch.ones(1, 4).as_strided((1, 4), (77, 1)) for _ in range(2)]
    target = torch.zeros(1, 4)
    assert combine(OPS.index("sum"), target, *parts)
    assert torch.equal(target, torch.full((1, 4), 2.0))
