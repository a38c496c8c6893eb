"""Cutting a batch into microbatches, and merging their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from echelon.errors import SizeMismatch
from echelon.pipeline.stage.nested import Value, map_tensors, tensors_of


def batch_size(value: Value, what: str) -> int | None:
    """Returns the length of dim 0 of the tensors in `value`; None if it has no tensor with a dim.

    Raises:
        SizeMismatch: the tensors differ in this length.
    """
    sizes = {len(tensor) for tensor in tensors_of(value) if tensor.dim()}
    if len(sizes) > 1:
        raise SizeMismatch(
            "tensors with as many samples each", f"{sorted(sizes)} samples", f"{what}, dim 0", "cut all to one length"
        )
    return sizes.pop() if sizes else None


def split(value: Value, num_microbatches: int) -> list[Value]:
    """Cuts every tensor along dim 0. If the samples do not divide evenly, the first microbatches get one more.

    Tensors without a dim, and values that are no tensors, are not cut: every microbatch has them whole.
    """
    if isinstance(value, torch.Tensor):  # fast path: most batches are one tensor
        return list(_pieces(value, num_microbatches))
    pieces = [_pieces(tensor, num_microbatches) for tensor in tensors_of(value)]
    return [_rebuilt(value, iter([row[index] for row in pieces])) for index in range(num_microbatches)]


def split_arguments(inputs: tuple[Value, ...], num_microbatches: int) -> list[tuple[Value, ...]]:
    """Cuts positional arguments, as `split` does."""
    if len(inputs) == 1:
        return [(part,) for part in split(inputs[0], num_microbatches)]
    return [part for part in split(inputs, num_microbatches) if isinstance(part, tuple)]


def split_keywords(kwargs: Mapping[str, Value], num_microbatches: int) -> list[dict[str, Value]]:
    """Cuts keyword arguments, as `split` does."""
    if not kwargs:
        return [{}] * num_microbatches
    return [part for part in split(dict(kwargs), num_microbatches) if isinstance(part, dict)]


def merge(values: Sequence[Value]) -> Value:
    """Concatenates the tensors of several values of one structure along dim 0; the inverse of `split`.

    Tensors without a dim, such as one loss per microbatch, are stacked.
    """
    columns = list(zip(*(tensors_of(value) for value in values), strict=True))
    whole = [torch.stack(column) if column[0].dim() == 0 else torch.cat(column) for column in columns]
    return _rebuilt(values[0], iter(whole))


def _pieces(tensor: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    if not tensor.dim():
        return [tensor] * count
    pieces = tensor.tensor_split(count)
    # With .data, autograd takes the pieces for tensors of their own. As views they would share one version counter, and
    # a stage that writes to one microbatch in place would have changed the saved tensors of the others.
    return pieces if tensor.requires_grad else [piece.data for piece in pieces]


def _rebuilt(value: Value, tensors: Iterator[torch.Tensor]) -> Value:
    """Returns the value with its tensors replaced, from left to right."""
    return map_tensors(lambda _: next(tensors), value)
