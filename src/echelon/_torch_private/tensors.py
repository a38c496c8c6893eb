"""Private interfaces of torch about tensors, their memory, and operators."""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch._C import _get_dispatch_mode, _len_torch_dispatch_stack, _TorchDispatchModeKey
from torch._C._functorch import peek_interpreter_stack
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.export import ExportedProgram
from torch.nested._internal.nested_int import NestedIntNode
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

# Names of torch that are only re-exported.
__all__ = ["FakeTensor", "HigherOrderOperator", "TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
# FakeTensor: tensor with a shape, a dtype and a device, but no data.
# HigherOrderOperator: operator whose arguments are functions, such as torch.cond.
# tree_...: torch.export flattens inputs and outputs with them. Libraries register their own containers there.

# Without a frame of Python each, because every small operation asks: the depth of the stack of dispatch modes; and the
# innermost transform of torch.func, or None.
dispatch_depth: Callable[[], int] = _len_torch_dispatch_stack
transform_stack: Callable[[], object] = peek_interpreter_stack


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base of modes whose `__torch_dispatch__` sees every operation of a thread, in backward too.

    Documented, but in a private module. torch's own class imports torch.compile at the first operation, to keep the
    mode out of compiled code; that takes more than a second in the first step.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_faking() -> bool:
    """Whether FakeTensorMode is active in this thread, so that every new tensor is fake. torch has no public way."""
    # The depth of the stack first: it takes a third of the time.
    return _len_torch_dispatch_stack() > 0 and _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None


def has_symbols() -> bool:
    """Whether sizes of tensors can be symbols in this thread, as while torch.compile traces."""
    return is_faking() and _get_dispatch_mode(_TorchDispatchModeKey.FAKE).shape_env is not None


def wraps_new_tensors() -> bool:
    """Whether new tensors of this thread can be without memory, in FakeTensorMode or a transform of torch.func.

    Inside of `torch.func.grad`, `jvp` and `functionalize` even `torch.empty` returns a wrapper.
    """
    return peek_interpreter_stack() is not None or is_faking()


def storage_users(storage: torch.UntypedStorage) -> int:
    """Returns the number of owners of a storage beside this object: tensors, their views, graphs that saved one.

    torch has no public way: views of views and tensors saved by autograd own the memory without the original tensor.
    """
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def references(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns the number of owners of an argument: of the Python object, of torch's tensor, and of its storage.

    torch has no public way. Autograd asks before it adds to a gradient in place.
    """
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return sys.getrefcount(tensor), tensor._use_count(), int(storage)  # type: ignore[attr-defined]


def version_of(tensor: torch.Tensor) -> int:
    """Returns the version counter: in-place changes of a tensor and of its views.

    torch compares it for tensors that it saves for backward, but not for those in `saved_tensors_hooks`.
    """
    return tensor._version


def fake_tensors() -> AbstractContextManager[object]:
    """Returns a context in which new tensors have a shape, a dtype and a device, but no data.

    The meta device is no substitute: its tensors do not mix with those of the device that a model will run on.
    """
    return FakeTensorMode()


def recorded_tensors() -> AbstractContextManager[object]:
    """Returns a context like `fake_tensors`, in which tensors with data may be mixed with fake ones."""
    return _RecordedMode(allow_non_fake_inputs=True)


class _RecordedMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Mode of fake tensors in which the ragged size of nested ones is no symbol, as outside of torch.compile."""

    _raggeds = itertools.count(1 << 32)
    """Numbers of ragged sizes. torch counts those of real nested tensors from 0 on."""

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> torch.SymInt:
        """Returns a ragged size, which tensors with the same offsets share."""
        number = next(self._raggeds) if nt_tensor_id is None else nt_tensor_id
        return torch.SymInt(NestedIntNode(number, 1))  # type: ignore[no-untyped-call]


def longest_of(nested: torch.Tensor) -> int:
    """Returns the length of the longest sequence of a nested tensor. torch has no public way."""
    return int(nested._get_max_seqlen())  # type: ignore[attr-defined] # of NestedTensor


def shortest_of(nested: torch.Tensor) -> int:
    """Returns the length of the shortest sequence of a nested tensor."""
    return int(nested._get_min_seqlen())  # type: ignore[attr-defined] # of NestedTensor


def as_fake(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a fake tensor of a mode like another tensor, also in a thread that has not entered the mode.

    The mode's own `from_tensor` keeps notes of all tensors, for one thread at a time.
    """
    with real_tensors():
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, like, torch.device("cpu"))


@contextmanager
def real_tensors() -> Iterator[None]:
    """Inside, no mode of torch is active in this thread, so that new tensors have data."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, no mode of torch is active in this thread, though other ones may be entered. `real_tensors` is faster."""
    functions = [_pop_mode() for _ in _get_current_function_mode_stack()]  # type: ignore[no-untyped-call]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(functions):
            _push_mode(mode)  # type: ignore[no-untyped-call]


def without_functions() -> AbstractContextManager[object]:
    """Returns a context in which function modes see no call: a mode takes longer than a query of a tensor's size."""
    return torch._C.DisableTorchFunction()


def default_device_of(function: object) -> torch.device | None:
    """Returns the device that torch gives a function that makes tensors, as inside of `with torch.device("cuda")`.

    None for other functions, and where there is none. The public `get_default_device` makes a tensor there.
    """
    if function not in _device_constructors():
        return None
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next((mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), None)


def is_in_function_mode(kind: type) -> bool:
    """Whether a function mode of a class sees the functions of torch that this thread calls now."""
    return any(isinstance(mode, kind) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the value of a fake tensor of one element, where torch knows it, as for `torch.tensor(1)`. Else None."""
    value: torch.Tensor | None = getattr(tensor, "constant", None)
    return value


def set_known_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Sets the value of a fake tensor that has a known one."""
    tensor.constant = value  # type: ignore[attr-defined] # of FakeTensor


def move_fake(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    """Gives a fake tensor the memory, the dtype and the device of another one, as `tensor.data = moved` does."""
    if moved is not tensor:
        tensor.data = moved
        tensor.fake_device = moved.fake_device  # type: ignore[attr-defined] # of FakeTensor


def storage_address(storage: torch.UntypedStorage) -> int:
    """Returns a number that no other living storage has. Fake storages have no `data_ptr`."""
    return int(storage._cdata)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor of this rank inside of a DTensor, without autograd. Other tensors are returned as they are."""
    return getattr(tensor, "_local_tensor", tensor)


NO_FAKE_RESULT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""Errors of an operator whose result FakeTensorMode cannot tell without values."""
_NO_DATA = (
    "The tensor has a non-zero number of elements, but its data is not allocated yet",
    "Cannot access data pointer of",
    "Not available for 'meta' device type",
    "Creating a new Tensor subclass",
)
"""Beginnings of errors of code in C++ that takes no tensor without data. They have no type of their own."""
_NO_IMPLEMENTATION = "There was no fake impl registered"
"""Beginning of the error of an operator of the program that has no function for fake tensors."""
_SUBCLASSES = os.path.join("torch", "_subclasses", "")
"""Folder of torch with the code of fake tensors."""


def is_of_fake_tensors(error: BaseException) -> bool:
    """Whether an error arises because tensors are fake, so that no run with data has it."""
    if isinstance(error, (*NO_FAKE_RESULT, UnsupportedFakeTensorException)):
        return True
    if isinstance(error, AssertionError | AttributeError):  # an assumption of torch's own code fails
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        return bool(frames) and _SUBCLASSES in frames[-1].f_code.co_filename
    return isinstance(error, RuntimeError) and str(error).startswith((*_NO_DATA, _NO_IMPLEMENTATION))


def lacks_implementation(error: BaseException) -> bool:
    """Whether an error is that of an operator of the program that has no function for fake tensors."""
    return isinstance(error, RuntimeError) and str(error).startswith(_NO_IMPLEMENTATION)


class OperatorFacts(NamedTuple):
    """Facts of an operator's schema."""

    namespace: str
    name: str
    """Name without namespace and overload, such as "mm"."""
    overload: str
    """Such as "dtype_out". "" for the default one."""
    writes: tuple[int | str, ...]
    """Arguments that it changes: their positions, or names of arguments that have to be named."""
    may_return_view: bool
    is_composite: bool
    """Whether torch computes it by other operators, on the CPU and for autograd."""


def facts_of(operator: Any) -> OperatorFacts:
    """Returns the facts of one of torch's operators."""
    schema = operator._schema
    namespace, _, name = schema.name.partition("::")
    writes = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    may_return_view = any(each.alias_info is not None for each in schema.returns)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # Some have kernels beside their formula, such as silu_backward.
    is_composite = has_kernel(operator.name(), "CompositeImplicitAutograd") and not has_kernel(operator.name(), "CPU")
    return OperatorFacts(namespace, name, schema.overload_name, writes, may_return_view, is_composite)


def code_of(operator: Any) -> FunctionType | None:
    """Returns the Python function of an operator that `torch.library.custom_op` has made, the same for all devices.

    None: it has several ones, or none. torch keeps it under private names.
    """
    made = OPDEFS.get(operator._schema.name)
    # Only its instances have these names.
    return getattr(made, "_init_fn", None) if len(getattr(made, "_backend_fns", ())) == 1 else None


def guards_of(exported: ExportedProgram) -> torch.nn.Module | None:
    """Returns the guards of an exported program, to be called with the flat inputs. None if it has none.

    They raise AssertionError unless the inputs take the exported path. torch makes them only as a child of the unlifted
    module, under a private name.
    """
    return dict(exported.module().named_children()).get("_guards_fn")


def writes_in_place(operation: object) -> bool:
    """Whether one of torch's operators changes its arguments. Only its schema knows, which has no public name."""
    return isinstance(operation, torch._ops.OpOverload) and operation._schema.is_mutable


class UsedMemory(NamedTuple):
    """Argument of an operator whose memory the operator writes to, or shares with its results."""

    position: int
    name: str
    is_written: bool


def used_memory(operation: object) -> list[UsedMemory]:
    """Returns the arguments that one of torch's operators writes to, or returns views of."""
    arguments = operation._schema.arguments if isinstance(operation, torch._ops.OpOverload) else ()
    return [
        UsedMemory(position, each.name, each.alias_info.is_write)
        for position, each in enumerate(arguments)
        if each.alias_info is not None
    ]


def draws_random_numbers(operation: object) -> bool:
    """Whether one of torch's operators draws random numbers from its device's generator."""
    return isinstance(operation, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in operation.tags


def has_autocast(operator: str, key: str) -> bool:
    """Whether autocast of a device treats one of torch's operators, such as "softmax.int" for "AutocastCUDA"."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key))


def below_autocast() -> AbstractContextManager[None]:
    """Returns a context in which an operator, and all operators that it calls, run without autocast of the CPU."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_OF_CPU)


def below_autograd() -> AbstractContextManager[None]:
    """Returns a context in which operators run without autograd, so that none is replaced by its formula there."""
    return torch._C._AutoDispatchBelowAutograd()


_AUTOCAST_OF_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def by_formula(operator: Any, *args: Any) -> Any:
    """Calls an operator of the CPU that torch computes by others, in place of a kernel of Python for autograd.

    The public `decompose` prefers formulas in Python, some of which draw other random numbers.
    """
    return operator.redispatch(_CPU, *args)


_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def position_of(operator: Any, name: str) -> int:
    """Returns the number of arguments before a named one."""
    return [each.name for each in operator._schema.arguments].index(name)


def destroy_library(library: torch.library.Library) -> None:
    """Removes the operators of a library from torch.

    torch itself does so once the library is collected. It never is if the function of an operator refers to it.
    """
    library._destroy()  # type: ignore[no-untyped-call]
