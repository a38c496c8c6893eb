"""State of an optimizer by the names of its parameters and their keys.

The state of a parameter is a dict. A tensor in it with the parameter's shape is cut as the parameter is, by
ZeroOptimizer or as a DTensor. Other tensors are whole on every rank that has a part of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.arguments import named
from echelon.checkpoint.objects.encoding import Encoded, decode, encode, joined
from echelon.checkpoint.objects.model import is_sharded, ranges_of, spec_of
from echelon.checkpoint.objects.param_groups import ParamGroup
from echelon.checkpoint.state import Json, Piece, Spec
from echelon.data_parallel.zero import ZeroOptimizer, gather_state, in_memory_order
from echelon.errors import InvalidArgument


class OptimizerState(NamedTuple):
    """This rank's part of an optimizer's state."""

    specs: dict[str, Spec]
    pieces: list[Piece]
    groups: list[ParamGroup]
    options: list[Encoded]
    """Options of each group; their tensors are the same on all ranks."""
    values: dict[str, Json]
    """Values that are no tensors, by the name under which a tensor would be stored."""

    def add_tensor(self, name: str, spec: Spec, ranges: Iterable[tuple[int, Tensor]]) -> None:
        """Adds the ranges of a tensor that this rank holds."""
        self.specs[name] = spec
        self.pieces.extend(Piece(name, *each) for each in ranges)

    def add_encoded(self, encoded: Encoded) -> None:
        """Adds the tensors of a value."""
        for name, tensor in encoded.tensors.items():
            self.add_tensor(name, spec_of(tensor), [(0, tensor)])

    def add(self, name: str, value: object) -> None:
        """Adds the part of a tensor that this rank holds, or another value."""
        if isinstance(value, Tensor):
            self.add_tensor(name, spec_of(value), ranges_of(value, name))
        else:
            encoded = encode(value, name)
            self.values[name] = encoded.data
            self.add_encoded(encoded)


class Target(NamedTuple):
    """Memory that takes elements [start, start + numel) of a stored tensor."""

    name: str
    start: int
    tensor: Tensor
    """Of any strides, on any device."""


def check_optimizer(optimizer: object, section: str) -> torch.optim.Optimizer:
    """Returns `optimizer` if it is one of torch. Raises InvalidArgument otherwise."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    raise InvalidArgument(
        f"{section} is {named(optimizer)}: pass an optimizer of torch or a ZeroOptimizer, and others by a keyword of "
        "their own"
    )


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns the name of the class whose rule updates the parameters."""
    return optimizer.kind if isinstance(optimizer, ZeroOptimizer) else type(optimizer).__name__


def groups_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str], section: str) -> list[ParamGroup]:
    """Returns the param groups by the names of their parameters, and their options.

    Raises:
        InvalidArgument: a parameter has no name, or an option cannot be stored.
    """
    encoded = options_of(optimizer, section)
    return [
        ParamGroup(tuple(_named(group["params"], names, number, section)), options.data)
        for number, (group, options) in enumerate(zip(optimizer.param_groups, encoded, strict=True))
    ]


def options_of(optimizer: torch.optim.Optimizer, section: str) -> list[Encoded]:
    """Returns the options of each group."""
    return [
        encode(
            # torch's param_names are names on this rank. Groups are stored with those of the unsplit model.
            {key: value for key, value in group.items() if key not in ("params", "param_names")},
            joined(section, "groups", str(number)),
        )
        for number, group in enumerate(optimizer.param_groups)
    ]


def state_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str], section: str) -> OptimizerState:
    """Returns the state that this rank holds. Blocks only for a ZeroOptimizer of transposed parameters.

    Args:
        optimizer: any.
        names: name of each parameter, by its id.
        section: begins the names of the tensors.

    Raises:
        InvalidArgument: a parameter has no name, or a key or value cannot be stored.
        UnsupportedOp: a tensor has no values of its own.
    """
    found = OptimizerState({}, [], groups_of(optimizer, names, section), options_of(optimizer, section), {})
    for options in found.options:
        found.add_encoded(options)
    if isinstance(optimizer, ZeroOptimizer):
        _add_shards(found, optimizer, names, section)
        return found
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                found.add(_key_name(section, names[id(parameter)], key), value)
    return found


def _named(parameters: list[Tensor], names: Mapping[int, str], number: int, section: str) -> Iterator[str]:
    for index, parameter in enumerate(parameters):
        if id(parameter) not in names:
            raise InvalidArgument(
                f"parameter {index} of param group {number} of the {section} is in no model that was passed, so it has "
                "no name: pass the model that it trains as model="
            )
        yield names[id(parameter)]


def _key_name(section: str, parameter: str, key: object) -> str:
    # The name is all that a load has of the key: a number would come back as text, and a path as another parameter.
    if not isinstance(key, str) or "/" in key:
        raise InvalidArgument(f"the {section} has state of {parameter} under {key!r}: use text without '/' as keys")
    return f"{section}/state/{parameter}/{key}"


def _add_shards(found: OptimizerState, optimizer: ZeroOptimizer, names: Mapping[int, str], section: str) -> None:
    transposed = []
    for parameter, piece, view in optimizer.shards:
        state = optimizer.local_state.get(view, {})
        if not parameter.is_contiguous():
            transposed.append((piece, state))
            continue
        for key, value in state.items():
            name = _key_name(section, names[id(parameter)], key)
            if isinstance(value, Tensor) and value.dim():
                spec = Spec(tuple(parameter.shape), value.dtype)
                found.add_tensor(name, spec, [(piece.start, value.detach())])
            else:
                found.add(name, value)
    # Shards are cut in the order of memory, which is not that of the elements here: whole states are stored.
    # All parameters are asked, as gather_state is collective: this rank may have no part of a transposed one.
    if any(not parameter.is_contiguous() for parameter in optimizer.whole_parameters):
        whole = gather_state(transposed, optimizer.whole_parameters, optimizer.group)
        for number, state in whole.items():
            for key, value in state.items():
                found.add(_key_name(section, names[id(optimizer.whole_parameters[number])], key), value)


class SavedState(NamedTuple):
    """State of one parameter in a checkpoint."""

    tensors: dict[str, str]
    """Name of each tensor, by its key."""
    values: dict[str, Json]
    """Encoded values that are no tensors, by their key."""


def saved_states(
    parameters: list[str], specs: Mapping[str, Spec], values: Mapping[str, Json], section: str
) -> dict[str, SavedState]:
    """Returns the state of each parameter in a checkpoint."""
    found = {name: SavedState({}, {}) for name in parameters}
    begin = f"{section}/state/"
    # Tensors inside of lists and dicts belong to their value.
    for name in specs:
        if name.startswith(begin):
            parameter, _, key = name.removeprefix(begin).rpartition("/")
            if parameter in found and name not in values:
                found[parameter].tensors[key] = name
    for name, value in values.items():
        parameter, _, key = name.removeprefix(begin).rpartition("/")
        if name.startswith(begin) and parameter in found:
            found[parameter].values[key] = value
    return found


def is_cut(key: str, spec: Spec, parameter: Tensor) -> bool:
    """Whether a tensor of the state has an element for each element of the parameter."""
    # "step" by name: a scalar parameter's step has the parameter's shape, but is a count.
    return key != "step" and spec.shape == tuple(parameter.shape)


def restored(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    saved: Mapping[str, SavedState],
    specs: Mapping[str, Spec],
    tensor_of: Callable[[str], Tensor],
    rename: Callable[[str], str],
) -> Iterator[Target]:
    """Replaces the state of an optimizer, and yields the memory that is to be filled, a parameter at a time.

    Tensors that fit stay the same objects.

    Args:
        optimizer: any; its param groups are loaded already.
        names: name of each parameter, by its id.
        saved: state of each parameter in the checkpoint.
        specs: shapes and dtypes of the checkpoint's tensors.
        tensor_of: reads a small tensor by its name.
        rename: returns the stored name of this rank's copy.
    """
    if isinstance(optimizer, ZeroOptimizer):
        holders = [(shard.parameter, shard.view, shard.piece.start) for shard in optimizer.shards]
        states: Any = optimizer.local_state
    else:
        holders = [(one, one, 0) for group in optimizer.param_groups for one in group["params"]]
        states = optimizer.state
    options = {id(one): group for group in optimizer.param_groups for one in group["params"]}
    for parameter, view, start in holders:
        # Removed: a parameter whose state was not saved has none afterwards.
        before, (tensors, values) = states.pop(view, {}), saved[names[id(parameter)]]
        state: dict[str, Any] = {}
        for key, value in values.items():
            state[key] = decode(value, partial(_read_to, view.device, tensor_of))
        for key, stored in tensors.items():
            spec, name = specs[stored], rename(stored)
            has_cut = is_cut(key, spec, parameter)
            shape = (view.numel(),) if has_cut and view is not parameter else spec.shape
            target = _fitting(before.get(key), shape, spec.dtype)
            if target is None and has_cut:
                target = torch.empty_like(view, dtype=spec.dtype, requires_grad=False)
            elif target is None:
                target = _small(spec, key, view, options[id(parameter)])
            state[key] = target
            if not has_cut:
                yield Target(name, 0, target)
            elif view is parameter:
                yield from (Target(name, *each) for each in ranges_of(target, stored))
            elif parameter.is_contiguous():
                yield Target(name, start, target)
            else:
                whole = torch.empty_like(parameter, dtype=spec.dtype, requires_grad=False)
                yield Target(name, 0, whole)
                target.copy_(in_memory_order(whole)[start : start + view.numel()])
        if state:
            # In the order in which the optimizer has made them, as its state_dict shows it.
            states[view] = {key: state[key] for key in (*before, *state) if key in state}


def _read_to(device: torch.device, tensor_of: Callable[[str], Tensor], name: str) -> Tensor:
    return tensor_of(name).to(device)


def _fitting(before: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    fits = isinstance(before, Tensor) and before.dtype == dtype and tuple(before.shape) == shape
    return before.detach() if fits and isinstance(before, Tensor) else None


def _small(spec: Spec, key: str, view: Tensor, options: Mapping[str, Any]) -> Tensor:
    # As torch places them: counts of steps stay on the CPU, unless a GPU kernel reads them.
    stays = key == "step" and not (options.get("capturable") or options.get("fused"))
    return torch.empty(spec.shape, dtype=spec.dtype, device="cpu" if stays or is_sharded(view) else view.device)
