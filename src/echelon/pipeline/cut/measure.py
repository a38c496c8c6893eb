"""Measurement of the time that each part of a model takes for forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from echelon.errors import PartitionError
from echelon.pipeline.cut.traced_stage import TracedStage
from echelon.pipeline.stage.nested import Value, map_tensors, tensors_of
from echelon.pipeline.stage.replay import keyed
from echelon.pipeline.stage.stage import enter

_REPEATS = 3


class Example(NamedTuple):
    """Example inputs, such as a model will get."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]


class _Run(NamedTuple):
    seconds: float
    output: Value


def measure(pieces: Sequence[nn.Module], example: Example, *, spreads: bool) -> list[float]:
    """Returns the seconds of one forward and backward of each piece, the fastest of a few runs.

    Pieces with the same operations and shapes get the same time (their median), so that chance does not tell them
    apart. The model is unchanged: weights are copied, a piece at a time. Weights on the meta device are made up.

    Args:
        pieces: parts of the model, which run one after another.
        example: positional arguments of the first piece, and keyword arguments of all.
        spreads: whether a tuple that a piece returns becomes the positional arguments of the next one.

    Raises:
        PartitionError: a piece cannot be run with the example.
    """
    value: Value = map_tensors(_materialised, tuple(example.args))
    kwargs = {name: map_tensors(_materialised, item) for name, item in example.kwargs.items()}
    times: list[float] = []
    kinds: list[str] = []
    with keyed():  # the caller's random generators stay as they are
        for index, piece in enumerate(pieces):
            arguments = value if isinstance(value, tuple) and (spreads or index == 0) else (value,)
            try:
                run = _best(piece, arguments, kwargs)
            except Exception as error:  # a model may raise anything
                raise PartitionError(
                    f"part {index} of the model cannot be run with this example: {type(error).__name__}: {error}"
                ) from error
            times.append(run.seconds)
            kinds.append(_kind(piece, arguments))
            value = run.output
    return [
        statistics.median(time for time, other in zip(times, kinds, strict=True) if other == kind) for kind in kinds
    ]


def _best(piece: nn.Module, arguments: tuple[Value, ...], kwargs: Mapping[str, Value]) -> _Run:
    runs = [_timed(piece, arguments, kwargs) for _ in range(1 + _REPEATS)]  # the first run is slow, and does not count
    return _Run(min(run.seconds for run in runs[1:]), runs[0].output)


def _timed(piece: nn.Module, arguments: tuple[Value, ...], kwargs: Mapping[str, Value]) -> _Run:
    tensors = {**dict(piece.named_parameters()), **dict(piece.named_buffers())}
    copies = {name: _materialised(tensor) for name, tensor in tensors.items()}
    # Entered as in a stage, since a piece may write to its input in place.
    leaves = tuple(enter(map_tensors(_materialised, argument)) for argument in arguments)
    with torch.enable_grad():
        _synchronize(copies)
        begin = time.perf_counter()
        output = functional_call(piece, copies, leaves, dict(kwargs))
        roots = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        _synchronize(copies)
    return _Run(time.perf_counter() - begin, map_tensors(_materialised, output))


def _materialised(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy that is a leaf. A tensor on the meta device gets memory with small random numbers."""
    if not tensor.is_meta:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    values = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.is_floating_point():
        values.normal_(std=0.02)
    return values.requires_grad_(tensor.requires_grad)


def _kind(piece: nn.Module, arguments: tuple[Value, ...]) -> str:
    what = piece.operations if isinstance(piece, TracedStage) else repr(piece)
    shapes = [(tensor.shape, tensor.dtype) for tensor in (*piece.parameters(), *tensors_of(arguments))]
    return repr((what, shapes))


def _synchronize(tensors: Mapping[str, torch.Tensor]) -> None:
    # A device only queues the work: without this, the clock would measure the queueing.
    if any(tensor.device.type not in ("cpu", "meta") for tensor in tensors.values()):
        torch.accelerator.synchronize()
