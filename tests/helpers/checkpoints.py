"""Small states to be saved, and the comparison of loaded ones."""

import torch

from echelon.checkpoint.ranks.loading import open_checkpoint
from echelon.checkpoint.state import Piece, Spec, State, Wanted

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2fnuz),
    *(torch.int8, torch.int64, torch.uint8, torch.uint16, torch.bool, torch.complex64, torch.complex128),
]


def tensors_of(version, rows=40):
    """Returns tensors of every kind, filled by a number."""
    generator = torch.Generator().manual_seed(version)
    tensors = {
        f"layer.{str(dtype)[6:]}": (torch.rand(5, 3, generator=generator) * 3 - 1).to(dtype)
        for dtype in DTYPES
        if dtype != torch.uint16
    }
    tensors["layer.uint16"] = torch.arange(version, version + 15).to(torch.uint16).reshape(5, 3)
    tensors["weight"] = torch.rand(rows, 11, generator=generator)
    tensors["scalar"] = torch.tensor(float(version))
    tensors["empty"] = torch.zeros(0, 7)
    tensors['odd "name"\n/../ä\u2028'] = torch.rand(3, generator=generator)
    tensors["__metadata__"] = torch.rand(2, generator=generator)
    return tensors


def state_of(tensors, data=None, own=None, keep=lambda _, numel: [(0, numel)]):
    """Returns the state of a rank that holds the ranges of each tensor that `keep` gives."""
    pieces = [
        Piece(name, start, value.reshape(-1)[start:stop])
        for name, value in tensors.items()
        for start, stop in keep(name, value.numel())
    ]
    specs = {name: Spec(tuple(value.shape), value.dtype) for name, value in tensors.items()}
    return State(specs, pieces, data or {}, own or {})


def loaded(checkpoint):
    """Returns all tensors of a checkpoint."""
    out = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in checkpoint.specs.items()}
    checkpoint.read([Wanted(name, 0, value.view(-1)) for name, value in out.items()])
    return out


def load(path, step=None, fs=None):
    """Returns the step and all tensors of a checkpoint; None if there is none."""
    checkpoint = open_checkpoint(path, step=step, fs=fs)
    return None if checkpoint is None else (checkpoint.step, loaded(checkpoint))


def same(one, other):
    """Whether two dicts of tensors are equal, bit for bit."""
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape
        and one[name].dtype == other[name].dtype
        and torch.equal(one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name in one
    )
