"""Reductions of every dtype, as digests of their bits."""

import hashlib
import math
import warnings

import torch

import echelon
from echelon.backends.memory import as_bytes
from echelon.backends.operators import operator

OPS = ("sum", "product", "mean", "min", "max", "band", "bor", "bxor")
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
SHAPES = ((), (1,), (13, 5), (257,))


def values(dtype, shape, seed):
    """Returns a tensor of finite numbers, or of random bits where those are integers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        numbers = torch.randn((*shape, 2), generator=generator, dtype=torch.float64) * 3
        return (torch.view_as_complex(numbers) if dtype.is_complex else numbers[..., 0].clone()).to(dtype)
    data = torch.randint(
        0, 2 if dtype == torch.bool else 256, (math.prod(shape) * dtype.itemsize,), generator=generator
    )
    return data.to(torch.uint8).view(dtype).view(shape)


def digest(tensor):
    """Returns a short text of a tensor's bits."""
    if tensor is None:
        return ""
    return hashlib.blake2b(as_bytes(tensor.contiguous()).numpy().tobytes(), digest_size=6).hexdigest()


def reduced_by(dtype):
    """Returns the ops that a dtype can be reduced with."""
    found = []
    for op in OPS:
        try:
            operator(op, dtype)
        except echelon.UnsupportedOp:
            continue
        found.append(op)
    return found


def digests(group):
    """Returns the bits of all reductions of all dtypes on this rank, by name."""
    found = {}
    last = group.world_size - 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of complex32, which torch calls experimental
        for number, dtype in enumerate(DTYPES):
            for op in reduced_by(dtype):
                for shape in SHAPES:
                    own = values(dtype, shape, number + 100 * group.rank)
                    name = f"{op} of {dtype} {list(shape)}"
                    found[name] = digest(group.all_reduce(own.clone(), op))
                    found[f"{name} to one"] = digest(group.reduce(own.clone(), last, op))
                    if shape:
                        found[f"{name} in parts"] = digest(group.reduce_scatter(own, op))
        for dtype in (torch.float32, torch.bfloat16):
            for count in (70_001, 150_001, 700_001):
                own = values(dtype, (count,), group.rank)
                found[f"{count} {dtype}"] = digest(group.all_reduce(own.clone(), "mean"))
                found[f"{count} {dtype} to one"] = digest(group.reduce(own.clone(), 0, "mean"))
                found[f"{count} {dtype} in parts"] = digest(group.reduce_scatter(own, "mean"))
    return found
