"""Nested values of tensors, taken apart into the tensors and a structure in plain text.

A value is a tensor, None, a bool, int, float or str, or a tuple, list or dict of values. Inputs, targets and outputs of
the model may also hold named tuples, dataclasses and containers that are registered with torch. Values that travel
between stages may not: their structure is JSON, so a peer cannot have this rank make an object of any other class.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import NamedTuple, TypeAlias

import torch

from echelon._torch_private import tree_flatten, tree_unflatten
from echelon.backends.admission import check_values
from echelon.errors import ProtocolError, UnsupportedOp

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
