"""Values of indices and masks that follow from a choice among fake numbers, such as the experts of each token.

Which experts a router chooses is unknown, since its numbers are fake. The choice is assumed to be even: each expert
gets as many tokens as the others. The indices that `topk` returns then have values, and so have the masks, counts and
positions that a program computes from them. A result whose shape depends on values, such as that of `nonzero`, gets the
shape of an even choice.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon._torch_private.tensors import (
    FakeTensor,
    draws_random_numbers,
    known_value,
    real_tensors,
    tree_leaves,
    tree_map,
)
from echelon.errors import UnsupportedOp

_aten = torch.ops.aten
_MOST, _FEW = 1 << 24, 1 << 16
"""Elements of a tensor up to which its values are computed: where they follow from a choice, and elsewhere."""
_FLOATS = 1 << 10
"""Elements of a tensor of floating-point numbers that the program wrote, up to which it has values."""
_EVENLY = "indices are chosen evenly"
_CHOICES: Mapping[Any, int] = {
    _aten.topk.default: 2,
    _aten.argmax.default: 1,
    _aten.argmin.default: 1,
    _aten.max.dim: 1,
    _aten.min.dim: 1,
    _aten.multinomial.default: -1,
}
"""Operators that choose indices along a dimension: the position of the argument that names it. -1: the last one."""
_FILLS: Mapping[Any, Callable[[Sequence[int], Sequence[Any]], Tensor]] = {
    **dict.fromkeys(
        (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default), lambda shape, _: torch.zeros(shape)
    ),
    **dict.fromkeys(
        (_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default), lambda shape, _: torch.ones(shape)
    ),
    _aten.full.default: lambda shape, args: torch.full(shape, args[1]),
    _aten.full_like.default: lambda shape, args: torch.full(shape, args[1]),
    _aten.new_full.default: lambda shape, args: torch.full(shape, args[2]),
    _aten.arange.default: lambda _, args: torch.arange(*args),
    _aten.arange.start: lambda _, args: torch.arange(*args),
    _aten.arange.start_step: lambda _, args: torch.arange(*args),
    _aten.linspace.default: lambda _, args: torch.linspace(*args[:3]),
    _aten.logspace.default: lambda _, args: torch.logspace(*args[:4]),
}
"""Operators that make tensors of known integers: functions of the shape and the arguments that make them."""
_SPACED = frozenset({_aten.linspace.default, _aten.logspace.default})
"""Operators whose floating-point numbers count, too, such as the rates at which vision models leave layers out."""
_DRAWS: Mapping[Any, Callable[[Sequence[int], Sequence[Any]], Tensor]] = {
    _aten.randint.default: lambda shape, args: _spread(shape, 0, args[0]),
    _aten.randint.low: lambda shape, args: _spread(shape, args[0], args[1]),
    _aten.randperm.default: lambda shape, _: _spread(shape, 0, math.prod(shape)),
}
"""Operators that draw integers: functions that spread them evenly over their range."""
_ASSUMED: Mapping[Any, tuple[str, Callable[[Tensor], Tensor]]] = {
    _aten.nonzero.default: ("all elements are chosen", torch.ones_like),
    **dict.fromkeys(
        (_aten._unique.default, _aten._unique2.default, _aten.unique_dim.default, _aten.unique_consecutive.default),
        ("all elements differ", lambda each: torch.arange(each.numel()).view_as(each)),
    ),
    _aten.bincount.default: ("all elements are 0", torch.zeros_like),
    _aten.repeat_interleave.Tensor: ("each element is repeated once", torch.ones_like),
}
"""Operators whose results have a shape that depends on values: the assumption for an input without known values."""
_ALIGNMENTS = _aten._ctc_loss.default
"""Operator that also returns a number for each step and each place of the longest target, whose length is a value."""
_COLLECTIVES: Mapping[str, Callable[[Tensor, int, int], Tensor]] = {
    "all_reduce(sum)": lambda value, _, size: value * size,
    "all_reduce(max)": lambda value, *_: value,
    "all_reduce(min)": lambda value, *_: value,
    "all_gather": lambda value, _, size: value.reshape(-1).repeat(size),
    "all_to_all": lambda value, rank, size: value.reshape(-1).tensor_split(size)[rank].repeat(size),
}
"""Results of collectives from a rank's own values, its rank and the size of the group, if all ranks choose alike."""


MASKS = frozenset({torch.bool, torch.uint8})


class _Known(NamedTuple):
    """Values of a fake tensor."""

    value: Tensor
    is_chosen: bool
    """Whether they follow from a choice, and not only from numbers that the program wrote."""
    holder: weakref.ref[Tensor]


def _spread(shape: Sequence[int], low: int, high: int) -> Tensor:
    """Returns integers from `low` up to `high`, each as often as the others, and neighbours apart."""
    size = max(1, high - low)
    # The golden ratio of the range, made coprime to it: equal values are as far apart as they can be.
    step = next(each for each in range(max(1, round(size * 0.618)), 2 * size + 2) if math.gcd(each, size) == 1)
    return (torch.arange(math.prod(shape)) % size * step % size + low).reshape(list(shape))


class _UnknownError(Exception):
    """A tensor has no known values."""


def decides_shape(func: Any) -> bool:
    """Whether the results of an operator have a shape that depends on values."""
    return func in _ASSUMED or func is _ALIGNMENTS


def without_masks(
    func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], is_number: Callable[[Tensor], bool]
) -> Any:
    """Runs an operator with the positions of true elements in place of masks, as torch does on a GPU.

    A number written by one mask, as by `x[mask] = 0`, needs no positions there. Source: `canDispatchToMaskedFill` in
    ATen/native/TensorAdvancedIndexing.cpp.

    Args:
        func: the operator.
        name: its name.
        args, kwargs: its arguments.
        is_number: whether a tensor is a number of the host.
    """
    if name == "masked_select":
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        source, mask = args[0].expand(shape), args[1].expand(shape)
        return _aten.index.Tensor(source, list(_aten.nonzero.default(mask).unbind(1)))
    source, indices, *others = args
    _check_masks(source, indices)
    if name != "index" and all(each is None for each in indices[:-1]):
        accumulates = kwargs.get("accumulate", others[1] if len(others) > 1 else False)
        if not accumulates and is_number(others[0]):
            return _filled(source, indices, others[0], in_place=name != "index_put")
    positions: list[Tensor | None] = []
    for each in indices:
        positions += _aten.nonzero.default(each).unbind(1) if each is not None and each.dtype in MASKS else (each,)
    return func(source, positions, *others, **kwargs)


def _check_masks(source: Tensor, indices: Sequence[Tensor | None]) -> None:
    """Raises IndexError, as torch does, if a mask has other sizes than the dimensions that it indexes."""
    dim = 0
    for each in indices:
        if each is None or each.dtype not in MASKS:
            dim += 1
            continue
        for axis, size in enumerate(each.shape):
            if dim + axis < source.ndim and size != source.shape[dim + axis]:
                raise IndexError(
                    f"The shape of the mask {list(each.shape)} at index {axis} does not match the shape of the indexed "
                    f"tensor {list(source.shape)} at index {dim + axis}"
                )
        dim += each.ndim


def _filled(source: Tensor, indices: Sequence[Tensor | None], value: Tensor, *, in_place: bool) -> Tensor:
    """Writes a number where the last index, a mask, is true."""
    mask = indices[-1]
    assert mask is not None
    mask = mask.reshape(*mask.shape, *[1] * (source.ndim - mask.ndim - len(indices) + 1))
    fill = _aten.masked_fill_ if in_place else _aten.masked_fill
    result: Tensor
    if (known := known_value(value)) is None:
        result = fill.Tensor(source, mask, value.reshape(()))
    else:
        with real_tensors():
            number = known.item()
        result = fill.Scalar(source, mask, number)
    return result


class Routing:
    """Known values of fake tensors of one rank."""

    def __init__(self, assume: Callable[[str], None]) -> None:
        self._assume = assume
        self._values: dict[int, _Known] = {}
        """Values by the identity of the fake tensor."""
        self._filled: dict[int, tuple[partial[Tensor], weakref.ref[Tensor]]] = {}
        """Functions that make the values of large tensors that were filled, which are rarely needed."""

    # Values

    def read(self, tensor: Tensor) -> Tensor | None:
        """Returns the values of a fake tensor that the host reads. None if they are unknown."""
        if (known := self._values.get(id(tensor))) is None:
            return None
        if known.is_chosen:
            self._assume(_EVENLY)
        return known.value

    def is_chosen(self, tensor: Tensor) -> bool:
        """Whether the values of a fake tensor follow from a choice."""
        known = self._values.get(id(tensor))
        return known is not None and known.is_chosen

    def summary(self, tensor: Tensor) -> Hashable:
        """Returns a value that two tensors of one form have in common if their known values are equal, else None."""
        if (filled := self._filled.get(id(tensor))) is not None:
            return str((filled[0].func, filled[0].args))
        if (value := self._value(tensor)) is None and (value := known_value(tensor)) is None:
            return None
        with real_tensors():
            return hashlib.blake2b(value.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()

    def _value(self, tensor: Tensor) -> Tensor | None:
        found = self._values.get(id(tensor))
        return None if found is None else found.value

    def _set(self, tensor: Tensor, value: Tensor, *, is_chosen: bool) -> None:
        key = id(tensor)
        self._values[key] = _Known(value, is_chosen, weakref.ref(tensor, partial(_remove, self._values, key)))

    def drop(self, tensors: Sequence[Tensor]) -> None:
        """Forgets tensors that get unknown values, and all tensors that share their memory."""
        for tensor in tensors:
            self._filled.pop(id(tensor), None)
            if (value := self._value(tensor)) is not None:
                # Views have the memory that was overwritten.
                memory = value.untyped_storage().data_ptr()
                alike = [key for key, it in self._values.items() if it.value.untyped_storage().data_ptr() == memory]
                for key in alike:
                    del self._values[key]

    def _on_host(self, each: Any) -> Any:
        """Returns an argument of an operator for the host: values in place of a fake tensor."""
        if isinstance(each, torch.device):
            return torch.device("cpu")
        if not isinstance(each, FakeTensor):
            return each
        if (value := self._value(each)) is not None:
            return value
        if (filled := self._filled.pop(id(each), None)) is not None:
            self._set(each, filled[0]().to(each.dtype), is_chosen=False)
            return self._value(each)
        if (value := known_value(each)) is None:
            raise _UnknownError
        return value

    def wrote(self, tensor: Tensor, value: Tensor) -> None:
        """Notes the values of a tensor that the program makes of its own numbers."""
        if value.numel() <= (_FLOATS if value.dtype.is_floating_point else _FEW):
            with real_tensors():
                self._set(tensor, value.detach().clone(), is_chosen=False)

    # Operations

    def concerns(self, func: Any, inputs: Sequence[Tensor], writes: bool) -> bool:
        """Whether `follow` has something to do after an operation."""
        if func in _CHOICES or func in _FILLS or func in _DRAWS or (writes and self._filled):
            return True
        return bool(self._values) and any(id(each) in self._values for each in inputs)

    def follow(
        self,
        func: Any,
        inputs: Sequence[Tensor],
        written: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
    ) -> None:
        """Computes the values of an operation's results, where all of its inputs have known ones."""
        if self._values and any(id(each) in self._values for each in inputs):
            if not self._run(func, inputs, args, kwargs, out):
                self.drop(written)
        elif func in _CHOICES:
            self._choose(_CHOICES[func], args, kwargs, out)
        elif func in _FILLS:
            self._fill(partial(_FILLS[func], list(out.shape), args), out, func in _SPACED)
        elif func in _DRAWS and not out.dtype.is_floating_point and out.numel() <= _FEW:
            with real_tensors():
                self._set(out, _DRAWS[func](list(out.shape), args).to(out.dtype), is_chosen=True)
        elif written and self._filled:
            self.drop(written)

    def _fill(self, make: partial[Tensor], out: Tensor, is_spaced: bool) -> None:
        if (out.dtype.is_floating_point and not is_spaced) or out.numel() > _MOST:
            return
        if out.numel() > _FEW:
            key = id(out)
            self._filled[key] = make, weakref.ref(out, partial(_remove, self._filled, key))
        else:
            with real_tensors():
                self._set(out, make().to(out.dtype), is_chosen=False)

    def _choose(self, position: int, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        source, indices = args[0], out if isinstance(out, Tensor) else out[1]
        dim = args[position] if 0 < position < len(args) else kwargs.get("dim", None if position == 1 else -1)
        # Without a dimension the choice is among all elements, and says nothing of experts.
        if dim is None or not source.ndim or not indices.numel() or indices.numel() > _MOST:
            return
        dim %= source.ndim
        shape = list(indices.shape)
        if len(shape) < source.ndim:
            shape.insert(dim, 1)
        *others, count = [*shape[:dim], *shape[dim + 1 :], shape[dim]]
        with real_tensors():
            numbers = torch.arange(math.prod(shape)) % source.shape[dim]
            self._set(indices, numbers.view(*others, count).movedim(-1, dim).reshape(indices.shape), is_chosen=True)

    def _run(
        self, func: Any, inputs: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> bool:
        """Runs an operation on values. Returns False if that cannot be done."""
        results = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        known = [self._values[id(each)] for each in inputs if id(each) in self._values]
        is_chosen = any(each.is_chosen for each in known)
        most = _MOST if is_chosen else _FEW
        is_chosen &= func not in _FILLS  # they take the input's shape alone
        if draws_random_numbers(func) or any(each.numel() > most for each in results):
            return False
        try:
            with real_tensors():
                args, kwargs = tree_map(self._on_host, (tuple(args), dict(kwargs)))
                made = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
                made = [value.to(each.dtype) for each, value in zip(results, made, strict=True)]
        # An operator may refuse assumed values, such as an index beyond the last one.
        except (_UnknownError, RuntimeError, IndexError, TypeError):
            return False
        for each, value in zip(results, made, strict=True):
            self._set(each, value, is_chosen=is_chosen)
        return True

    def communicated(
        self, kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], rank: int, size: int
    ) -> None:
        """Computes the result of a collective of one tensor, as if all ranks chose alike. Others become unknown."""
        if not self._values and not self._filled:
            return
        known = self._values.get(id(inputs[0])) if len(inputs) == len(outputs) == 1 else None
        if known is None or kind not in _COLLECTIVES:
            self.drop(outputs)
            return
        with real_tensors():
            made = _COLLECTIVES[kind](known.value, rank, size)
            if made.numel() != outputs[0].numel():
                self.drop(outputs)
            elif inputs[0] is outputs[0]:
                known.value.copy_(made)
            else:
                self.drop(outputs)
                self._set(outputs[0], made.reshape(outputs[0].shape), is_chosen=known.is_chosen)

    # Results whose shape depends on values

    def made(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], new: Callable[..., Tensor]) -> Any:
        """Returns the results of an operator whose shape depends on values. `new(shape, dtype)` makes a fake tensor."""
        if func is _ALIGNMENTS:
            steps, batch = args[0].shape[:2]
            # For each label, and for a blank before, between and after them.
            alignments = [batch, steps, 2 * max(args[3], default=0) + 1]
            return new([batch], args[0].dtype), new(alignments, args[0].dtype)
        text, assumed = _ASSUMED[func]
        source = args[0]
        if source.numel() > _MOST:
            raise UnsupportedOp(
                f"the shape of {func.overloadpacket.__name__}'s result depends on the values of {source.numel():,} "
                f"fake elements, and at most {_MOST:,} can be assumed: compute it without such a shape"
            )
        value = self.read(source)
        is_chosen, size = value is None or self.is_chosen(source), kwargs.get("output_size")
        if value is None:
            self._assume(text if size is None else "each element is repeated equally often")
        with real_tensors():
            if value is None and size is not None:
                number = source.numel()
                value = (torch.arange(number) < size % max(1, number)).to(source.dtype) + size // max(1, number)
            value = assumed(torch.empty(source.shape, dtype=source.dtype)) if value is None else value
            made = func(value, *(None if isinstance(each, Tensor) else each for each in args[1:]), **kwargs)
        results = []
        for each in made if isinstance(made, tuple) else (made,):
            results.append(new(list(each.shape), each.dtype))
            self._set(results[-1], each, is_chosen=is_chosen)
        return tuple(results) if isinstance(made, tuple) else results[0]

    def lengths_of_targets(self, lengths: Tensor | Sequence[int], targets: Tensor, batch: int) -> list[int]:
        """Returns the lengths of the targets of `ctc_loss`, which the host reads. Equal ones are assumed if unknown."""
        known = self.read(lengths) if isinstance(lengths, Tensor) else lengths
        if isinstance(known, Tensor):
            with real_tensors():
                return [int(each) for each in known.reshape(-1)]
        if known is not None:
            return list(known)
        self._assume("targets of ctc_loss are equally long")
        longest = targets.shape[1] if targets.ndim == 2 else math.ceil(targets.numel() / max(1, batch))
        return [longest] * batch


def _remove(table: dict[int, Any], key: int, _: object) -> None:
    table.pop(key, None)
