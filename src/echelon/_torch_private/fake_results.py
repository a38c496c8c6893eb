"""Results of operators on fake tensors, made again from the result of an equal earlier call.

FakeTensorMode computes the shape of each result, or looks it up in a cache of its own, which takes 60 us. Nine of ten
operations of a training step are repeated by the next block. Their results are made here in 10 us.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor

_VALUES = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types of arguments that are equal only if they mean the same."""
_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_NEW = -1


class _Unsure(Exception):
    """The result may depend on more than shapes and types."""


class Form(NamedTuple):
    """Form of one new tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    attributes: Mapping[str, Any]
    """Attributes that FakeTensor sets on each of its instances."""
    source: int
    """Number of the input whose memory it is. `_NEW`: it has memory of its own."""


_Part: TypeAlias = Form | int | None
"""Form of a new tensor, the number of the input that is returned, or None."""


class _Result(NamedTuple):
    parts: tuple[_Part, ...]
    container: type[Any] | None
    """Tuple or list. None: the only part is the result."""


class FakeResults:
    """Results of operators so far, by the operator and the form of its arguments."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Result | None] = {}
        """None: the result cannot be made again."""

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of an operator: a new one, of the same form as FakeTensorMode's."""
        if not _is_repeatable(func):
            return _faked(func, args, kwargs)
        inputs: list[FakeTensor] = []
        try:
            key = _key(func, args, kwargs, inputs)
        except _Unsure:
            return _faked(func, args, kwargs)
        if (result := self._known.get(key)) is not None:
            return _made(result, inputs)
        out = _faked(func, args, kwargs)
        if key not in self._known:
            try:
                result = _result(out, inputs)
                # Made once now, and compared. The operator may have changed the form of inputs in place.
                is_equal = _forms(_made(result, inputs)) == _forms(out) and _key(func, args, kwargs, []) == key
                self._known[key] = result if is_equal else None
            except _Unsure:
                self._known[key] = None
            except LookupError:
                pass  # another call with equal arguments may show it
        return out


def form_of(tensor: torch.Tensor) -> Form | None:
    """Returns the form of a fake tensor that has memory of its own, all of it. None for other tensors."""
    if type(tensor) is not FakeTensor or tensor.layout != torch.strided:
        return None
    detached = tensor.detach()
    with torch._C.DisableTorchFunction():
        form = _part(detached, (), [])
        assert isinstance(form, Form)
        made = made_of(form)
        is_whole = not form.offset and made.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
        return form if is_whole and _form(made) == _form(detached) else None  # type: ignore[arg-type]


def made_of(form: Form) -> FakeTensor:
    """Returns a new fake tensor."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return _tensor(form, ())


def _faked(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns FakeTensorMode's result of an operator, in the layout that torch's kernels give it."""
    if func is torch.ops.aten.baddbmm.dtype:
        # Its decomposition, which fake tensors use, takes the type of the result for a factor.
        func, args, kwargs = torch.ops.aten.bmm.dtype, args[1:4], {}
    out = func(*args, **kwargs)
    if func is torch.ops.aten.native_layer_norm_backward.default and out[0] is not None:
        # The fake gradient has the layout of the input, such as a transposed one.
        return out[0].contiguous(), *out[1:]
    return out


@functools.cache
def _is_repeatable(func: Any) -> bool:
    """Whether the form of an operator's result depends on nothing but its arguments' forms."""
    return (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace in ("aten", "_c10d_functional")
        and not _DEPENDENT.intersection(func.tags)
        and not func.overloadpacket.__name__.startswith("lift")  # values of constants
    )


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[FakeTensor]) -> Hashable:
    """Returns the form of a call. Tensors among its arguments join `inputs`."""
    found: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    with torch._C.DisableTorchFunction():
        _describe(found, args, inputs)
        for name, value in kwargs.items():
            found.append(name)
            _describe(found, (value,), inputs)
    if not inputs:
        raise _Unsure
    return tuple(found)


def _describe(found: list[Any], values: Sequence[Any], inputs: list[FakeTensor]) -> None:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout != torch.strided:  # a sparse one has no storage
                raise _Unsure
            inputs.append(value)
            found.append(_form(value))
        elif kind in _VALUES:
            found.append(kind)  # 1 and True are equal, and not the same argument
            found.append(value)
        elif issubclass(kind, tuple | list):
            found.append((kind, len(value)))
            _describe(found, value, inputs)
        else:
            raise _Unsure


def _form(tensor: FakeTensor) -> Hashable:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.untyped_storage().nbytes(),
        torch._C._dispatch_keys(tensor).raw_repr(),  # layout, conjugation, inference and more
        tensor.fake_device,
        tensor.fake_mode,
    )


def _forms(out: Any) -> list[Hashable]:
    found: list[Hashable] = []
    with torch._C.DisableTorchFunction():
        _describe(found, (out,), [])
    return found


def _result(out: Any, inputs: Sequence[FakeTensor]) -> _Result:
    """Returns a result to be made again. Raises LookupError if two inputs may be its source."""
    container = type(out) if isinstance(out, tuple | list) else None
    if container not in (None, tuple, list):
        raise _Unsure
    outputs = out if container else (out,)
    with torch._C.DisableTorchFunction():
        if any(isinstance(each, torch.Tensor) and each.layout != torch.strided for each in outputs):
            raise _Unsure
        addresses = [each.untyped_storage()._cdata for each in inputs]
        parts = tuple(_part(each, inputs, addresses) for each in outputs)
        made = [each.untyped_storage()._cdata for each in outputs if each is not None]
    new = [each for each in made if each not in addresses]
    if len(new) > len(set(new)):  # two outputs share memory
        raise _Unsure
    return _Result(parts, container)


def _part(out: Any, inputs: Sequence[FakeTensor], addresses: list[int]) -> _Part:
    if out is None:
        return None
    if type(out) is not FakeTensor:
        raise _Unsure
    address = out.untyped_storage()._cdata
    sources = [position for position, each in enumerate(addresses) if each == address]
    if len(sources) > 1:
        raise LookupError
    if sources and inputs[sources[0]] is out:
        return sources[0]
    if out.layout != torch.strided or out.requires_grad:
        raise _Unsure
    return Form(
        tuple(out.shape),
        out.stride(),
        int(out.storage_offset()),
        out.dtype,
        out.fake_device,
        dict(vars(out)),
        sources[0] if sources else _NEW,
    )


def _made(result: _Result, inputs: Sequence[FakeTensor]) -> Any:
    # Without modes: the tensors inside of fake ones are on the meta device.
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        made = [_tensor(part, inputs) if type(part) is Form else _given(part, inputs) for part in result.parts]
    return made[0] if result.container is None else result.container(made)


def _given(part: Any, inputs: Sequence[FakeTensor]) -> FakeTensor | None:
    return None if part is None else inputs[part]


def _tensor(form: Form, inputs: Sequence[FakeTensor]) -> FakeTensor:
    inside = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
    if form.source != _NEW:
        inside.set_(inputs[form.source].untyped_storage(), form.offset, form.shape, form.stride)
    made: FakeTensor = torch.Tensor._make_subclass(
        FakeTensor, inside, False, dispatch_device=True, device_for_backend_keys=form.device
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(form.attributes)
    return made
