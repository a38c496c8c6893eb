"""Nested values of tensors, taken apart into the tensors and a structure in plain text, or into microbatches.

A value is a tensor, None, a bool, int, float or str, or a tuple, list or dict of values. Inputs, targets and outputs of
the model may also hold named tuples, dataclasses and containers that are registered with torch. Values that travel
between stages may not: their structure is JSON, so a peer cannot have this rank make an object of any other class.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import NamedTuple, TypeAlias

import torch

from echelon._torch_private.tensors import tree_flatten, tree_unflatten
from echelon.backends.admission import check_values
from echelon.errors import ProtocolError, SizeMismatch, UnsupportedOp

Value: TypeAlias = object
"""A nested value."""

BARE = {"[true]": True, "[false]": False}
"""Structures of a single tensor, and whether it requires a gradient. Most handovers are one, and skip JSON."""

_PLAIN = (type(None), bool, int, float, str)


def tensors_of(value: Value) -> list[torch.Tensor]:
    """Returns the tensors in a value, from left to right."""
    if isinstance(value, torch.Tensor):  # fast path: most values are one tensor
        return [value]
    return list(_tensors(value))


def check_tensors(value: Value, what: str) -> None:
    """Raises UnsupportedOp unless all tensors in a value have memory of their own."""
    for tensor in tensors_of(value):
        check_values(tensor, what)


def map_tensors(function: Callable[[torch.Tensor], Value], value: Value) -> Value:
    """Returns the value with every tensor replaced by `function(tensor)`, called from left to right.

    Raises:
        UnsupportedOp: the value holds something that is not a nested value.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(function, item) for item in value)  # type: ignore[attr-defined, call-arg]
    if type(value) is dict:
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, _PLAIN):
        return value
    apart = _apart(value)
    return apart.together([map_tensors(function, item) for item in apart.items])


class _Apart(NamedTuple):
    """Container of an uncommon type: its items, and a function that puts new items together."""

    items: Sequence[Value]
    together: Callable[[Sequence[Value]], Value]


def _apart(value: Value) -> _Apart:
    leaves, spec = tree_flatten(value)  # an unknown type comes back as its own single leaf
    if not (len(leaves) == 1 and leaves[0] is value):
        return _Apart(leaves, lambda items: tree_unflatten(items, spec))
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return _Apart(
            [getattr(value, name) for name in names],
            lambda items: replace(value, **dict(zip(names, items, strict=True))),
        )
    raise UnsupportedOp(
        f"a value of type {type(value).__name__} cannot be an input or output of a stage: "
        "use tensors, None, numbers and text in tuples, lists and dicts"
    )


def structure_of(value: Value) -> str:
    """Returns the structure of a value as text, with whether each tensor requires a gradient. `value_of` reads it."""
    if isinstance(value, torch.Tensor):
        return "[true]" if value.requires_grad else "[false]"
    return json.dumps(_describe(value), separators=(",", ":"))


def value_of(structure: str, next_tensor: Callable[[bool], torch.Tensor]) -> Value:
    """Returns the value of a structure. `next_tensor(requires_grad)` returns its tensors from left to right.

    Raises:
        ProtocolError: the text is not a structure.
    """
    if structure in BARE:
        return next_tensor(BARE[structure])
    try:
        return _build(json.loads(structure), next_tensor)
    # The text comes from a peer and is not trusted: it may be nested so deep that parsing it overflows the stack.
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"{structure[:40]!r} does not describe a value: use one version everywhere") from error


def num_tensors(structure: str) -> int:
    """Returns the number of tensors in a value of this structure.

    Raises:
        ProtocolError: the text is not a structure.
    """
    if structure in BARE:
        return 1
    found: list[bool] = []

    def one(requires_grad: bool) -> torch.Tensor:
        found.append(requires_grad)
        return torch.empty(0, device="cpu")

    value_of(structure, one)
    return len(found)


def _tensors(value: Value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif not isinstance(value, _PLAIN):
        for item in _items(value):
            yield from _tensors(item)


def _items(value: Value) -> Iterable[Value]:
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return value
    return value.values() if type(value) is dict else _apart(value).items


def _describe(value: Value) -> object:
    """Returns a structure for JSON: a tensor as a list of one bool, other values as an object of one key."""
    if isinstance(value, torch.Tensor):
        return [value.requires_grad]
    # Exact types: a named tuple would arrive as a plain one.
    if type(value) is tuple:
        return {"tuple": [_describe(item) for item in value]}
    if type(value) is list:
        return {"list": [_describe(item) for item in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _describe(item) for key, item in value.items()}}
    if type(value) is dict and all(isinstance(key, _PLAIN) for key in value):
        # JSON makes strings of all keys of an object, so other keys travel as pairs.
        return {"pairs": [[key, _describe(item)] for key, item in value.items()]}
    if isinstance(value, _PLAIN):
        return {"plain": value}
    raise UnsupportedOp(
        f"a value of type {type(value).__name__} cannot pass between stages: "
        "use tensors, None, numbers and text in tuples, lists and dicts"
    )


def _build(spec: object, next_tensor: Callable[[bool], torch.Tensor]) -> Value:
    if isinstance(spec, list):
        (requires_grad,) = spec
        return next_tensor(bool(requires_grad))
    if not isinstance(spec, dict):
        raise ValueError("neither a tensor nor a container")
    ((kind, inside),) = spec.items()
    if kind == "plain":
        return inside
    if kind == "dict":
        return {key: _build(item, next_tensor) for key, item in inside.items()}
    if kind == "pairs":
        return {key: _build(item, next_tensor) for key, item in inside}
    items = [_build(item, next_tensor) for item in inside]
    return tuple(items) if kind == "tuple" else items


# Batches: values whose tensors have one row per sample


def batch_size(value: Value, what: str) -> int | None:
    """Returns the length of dim 0 of the tensors in `value`; None if it has no tensor with a dim.

    Raises:
        SizeMismatch: the tensors differ in this length.
    """
    if isinstance(value, torch.Tensor):  # fast path: most targets are one tensor
        return len(value) if value.dim() else None
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
        return list(_divided(value, num_microbatches))
    rows = [_divided(tensor, num_microbatches) for tensor in tensors_of(value)]
    return [_rebuilt(value, iter([row[index] for row in rows])) for index in range(num_microbatches)]


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


def _divided(tensor: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    if not tensor.dim():
        return [tensor] * count
    rows = tensor.tensor_split(count)
    # With .data, autograd takes the rows for tensors of their own. As views they would share one version counter, and
    # a stage that writes to one microbatch in place would have changed the saved tensors of the others.
    return rows if tensor.requires_grad else [piece.data for piece in rows]


def _rebuilt(value: Value, tensors: Iterator[torch.Tensor]) -> Value:
    """Returns the value with its tensors replaced, from left to right."""
    return map_tensors(lambda _: next(tensors), value)
