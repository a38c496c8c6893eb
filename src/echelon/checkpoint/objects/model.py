"""Tensors of a model in any layout, under the names of the unsplit, unwrapped model."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor, nn

from echelon._torch_private.modules import COMPILED, RECOMPUTED
from echelon.arguments import named
from echelon.backends.admission import check_values
from echelon.checkpoint.state import Spec
from echelon.data_parallel.ddp import DistributedDataParallel, Unwrapped, unwrap
from echelon.errors import InvalidArgument, UnsupportedOp
from echelon.group import ProcessGroup
from echelon.pipeline.run.pipeline import Pipeline

_EXTRA_STATE = "_extra_state"
"""Last part of the name under which a state dict has the value of `Module.get_extra_state`."""


class Range(NamedTuple):
    """Elements that this rank holds of a tensor: [start, start + numel) of the whole, flattened one."""

    start: int
    values: Tensor
    """The elements where they are, as a view."""


class Coordinates(NamedTuple):
    """Place of a rank in the layout, for values that belong to ranks."""

    dp: int
    num_dp: int
    pp: int
    num_pp: int

    @classmethod
    def of(cls, group: ProcessGroup | None) -> Coordinates:
        """Returns this rank's place if each rank has the whole model. `group`: None for one rank."""
        return cls(0, 1, 0, 1) if group is None else cls(group.rank, group.world_size, 0, 1)


@dataclass
class ModelTensors:
    """Parameters and persistent buffers that this rank holds, each once."""

    place: Coordinates
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Live tensors by name. A tied weight has one name."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Name in `tensors` of a tied weight, by its other names."""
    buffers: set[str] = field(default_factory=set)
    """Names of the buffers, which replicas need not have equal."""
    names: dict[int, str] = field(default_factory=dict)
    """Name of each parameter, by its id."""
    extra_state: dict[str, nn.Module] = field(default_factory=dict)
    """Modules with an extra state, by its name in the state dict."""
    modules: list[nn.Module] = field(default_factory=list)
    """Unwrapped modules: the model, or this rank's stages."""
    pipeline: Pipeline | None = None
    wrapped: Unwrapped | None = None
    """Parts of DistributedDataParallel."""

    @property
    def is_local(self) -> bool:
        """Whether each data-parallel rank has values of its own between two averages, as with LocalSGD."""
        hook = None if self.wrapped is None else self.wrapped.hook
        return hook is not None and hook.leaves_gradients


def tensors_of(model: object, place: Coordinates, prefix: str = "", *, takes_meta: bool = False) -> ModelTensors:
    """Returns the tensors of a model that this rank holds.

    Args:
        model: a module, plain, compiled or wrapped, or a Pipeline.
        place: of this rank, if `model` is not wrapped.
        prefix: begins all names.
        takes_meta: whether tensors may be on the meta device, to get memory later.

    Raises:
        InvalidArgument: `model` is something else.
        UnsupportedOp: a tensor has no values of its own, or belongs to a wrapper that cannot be stored.
    """
    if isinstance(model, Pipeline):
        replicas = model.data_parallel
        found = ModelTensors(
            Coordinates.of(replicas)._replace(pp=model.group.rank, num_pp=model.group.world_size), pipeline=model
        )
        for stage in model.stages:
            _add(found, stage.module, prefix + stage.prefix, takes_meta)
        _rename_ties(found, {prefix + name: prefix + names[0] for name, names in model.tied_names.items()})
        return found
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is {named(model)}: pass a module, a DistributedDataParallel or a Pipeline")
    wrapped = wrapped_by(model)
    found = ModelTensors(place if wrapped is None else Coordinates.of(wrapped.group), wrapped=wrapped)
    _add(found, _unwrapped(model), prefix, takes_meta)
    return found


def spec_of(tensor: Tensor) -> Spec:
    """Returns the shape and dtype of a whole tensor. That of a DTensor is global already."""
    return Spec(tuple(tensor.shape), tensor.dtype)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. Asks without importing it, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def ranges_of(tensor: Tensor, name: str) -> Iterator[Range]:
    """Yields the elements of a tensor that this rank holds: all of a plain one, the shard of a DTensor.

    Raises:
        UnsupportedOp: a DTensor is placed in a way that has no ranges.
    """
    if not is_sharded(tensor):
        yield Range(0, tensor.detach())
        return
    local, box = _local_box(tensor, name)
    if local.numel() == 0:
        return
    shape = tensor.shape
    # Dims behind the last one that is cut are whole: their elements are neighbours.
    cut = [dim for dim, (size, whole) in enumerate(zip(local.shape, shape, strict=True)) if size != whole]
    last = cut[-1] if cut else 0
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    begin = sum(start * stride for start, stride in zip(box, strides, strict=True))
    for place in product(*(range(size) for size in local.shape[:last])):
        start = begin + sum(index * stride for index, stride in zip(place, strides, strict=False))
        yield Range(start, local[place] if place else local)


def _local_box(tensor: Any, name: str) -> tuple[Tensor, list[int]]:
    """Returns this rank's shard, and the index of its first element in the whole tensor."""
    from torch.distributed.tensor import Replicate, Shard

    where, mesh = tensor.device_mesh.get_coordinate(), tensor.device_mesh
    begins, sizes = [0] * tensor.dim(), list(tensor.shape)
    local: Tensor = tensor.to_local().detach()
    for axis, placement in enumerate(tensor.placements):
        # Not a subclass: for fully_shard beside tensor parallel torch has one with another order of elements.
        if type(placement) is Shard:
            dim = placement.dim
            # As torch.chunk cuts: ceil(size / number) each, and less or nothing at the end.
            step = -(-sizes[dim] // mesh.size(axis))
            first = min(where[axis] * step, sizes[dim])
            begins[dim] += first
            sizes[dim] = min(step, sizes[dim] - first)
        elif not isinstance(placement, Replicate):
            raise UnsupportedOp(
                f"{name} is a DTensor placed as {type(placement).__name__}, and a checkpoint takes Shard and "
                "Replicate: redistribute it first"
            )
    if list(local.shape) != sizes and local.numel():
        raise UnsupportedOp(
            f"{name} is a DTensor whose part here has shape {tuple(local.shape)}, and {tuple(sizes)} was expected from "
            f"{tensor.placements}: pass full tensors"
        )
    return local, begins


def wrapped_by(model: object) -> Unwrapped | None:
    """Returns the parts of the DistributedDataParallel around a module or in a compiled one. None if there is none."""
    while isinstance(model, nn.Module):
        if isinstance(model, DistributedDataParallel):
            return unwrap(model)
        model = _inside(model)
    return None


def _inside(model: nn.Module) -> nn.Module | None:
    """Returns the module inside of a wrapper of torch. None if this is no wrapper."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return dict(model.named_children()).get(COMPILED)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Returns the user's module."""
    while True:
        inner = unwrap(model).module if isinstance(model, DistributedDataParallel) else _inside(model)
        if inner is None:
            return model
        model = inner


def _add(found: ModelTensors, module: nn.Module, prefix: str, takes_meta: bool) -> None:
    found.modules.append(module)
    _refuse_fsdp1(module)
    parameters = {id(one): name for name, one in module.named_parameters()}
    buffers = {id(one): name for name, one in module.named_buffers()}
    seen = {id(tensor): name for name, tensor in found.tensors.items()}
    # keep_vars: the tensors themselves, not detached ones, which have other ids.
    for raw, value in module.state_dict(keep_vars=True).items():
        name = prefix + plain_name(raw)
        if raw.rpartition(".")[2] == _EXTRA_STATE:
            found.extra_state[name] = module.get_submodule(raw.rpartition(".")[0])
            continue
        if id(value) not in parameters and id(value) not in buffers:
            raise UnsupportedOp(
                f"{name} in the state_dict of {type(module).__name__} is no parameter or buffer of the module, so it "
                "cannot be filled in place: remove the hook that makes it, or store it in extra="
            )
        if id(value) in seen:
            found.aliases[name] = seen[id(value)]
            continue
        _check(value, name, takes_meta)
        seen[id(value)] = name
        found.tensors[name] = value
        if id(value) in buffers:
            found.buffers.add(name)
    for raw, parameter in module.named_parameters():
        found.names.setdefault(id(parameter), seen.get(id(parameter), prefix + plain_name(raw)))


def _check(tensor: Tensor, name: str, takes_meta: bool) -> None:
    if is_sharded(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    check_values(tensor, f"a checkpoint, {name},", takes_meta=takes_meta)
    if tensor.is_quantized:
        raise UnsupportedOp(f"{name} is a quantized tensor, which a checkpoint does not take: dequantize it first")
    # As after expand(). torch itself refuses to write into it.
    if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise UnsupportedOp(f"{name} has elements that share memory, so it cannot be filled by a load: clone() it")


def plain_name(name: str) -> str:
    """Returns a name without the parts that wrappers of torch add."""
    return ".".join(part for part in name.split(".") if part not in (COMPILED, RECOMPUTED))


def _refuse_fsdp1(module: nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for name, one in module.named_modules():
        if isinstance(one, fsdp.FullyShardedDataParallel):
            raise UnsupportedOp(
                f"module {name!r} is a FullyShardedDataParallel, whose flat parameters have no names of their own: use "
                "fully_shard, or ZeroOptimizer"
            )


def _rename_ties(found: ModelTensors, canonical: dict[str, str]) -> None:
    """Calls a weight that several stages share by the same name on all ranks."""
    for name in list(found.tensors):
        first = canonical.get(name, name)
        if first != name:
            tensor = found.tensors.pop(name)
            # Another stage of this rank may have it already, as the same object.
            found.tensors.setdefault(first, tensor)
            found.names[id(tensor)] = first
            found.aliases = {other: first if to == name else to for other, to in found.aliases.items()}
    for name, first in canonical.items():
        if name != first:
            found.aliases[name] = first
