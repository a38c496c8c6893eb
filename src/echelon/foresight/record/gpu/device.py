"""Function mode that maps devices of CUDA to the CPU, and chooses operators as on a GPU.

torch's autograd on fake tensors of CUDA needs a build for CUDA, and a GPU. So the tensors of a recorded rank are on the
CPU for torch, and on the device for the recorder. A program that reads the device gets the recorder's. Where torch
chooses an operator by the device, as for attention, this mode makes the choice of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from echelon._torch_private.tensors import FakeTensor, default_device_of, known_value, real_tensors, set_known_value
from echelon.foresight.record.gpu.attention import attention
from echelon.foresight.record.gpu.recurrent import GATES, pack_padded, pad_packed, recurrent, with_batch_sizes
from echelon.foresight.record.gpu.signals import inverse_transform
from echelon.foresight.record.here import recording_here
from echelon.foresight.record.log.callers import asked_by_program
from echelon.foresight.record.log.placement import FACTORIES, HOST, MOVES, is_gpu, is_host
from echelon.foresight.record.refusals import unknown_result
from echelon.foresight.record.writer import writer
from echelon.foresight.trace import HostWait
from echelon.wording import counted

_CUDA = "cuda"


def mapped(value: Any) -> Any:
    """Returns the CPU for a device of CUDA. Other values are returned as they are.

    Raises:
        RuntimeError: the host has no GPU of this number.
    """
    if not is_gpu(value):
        return value
    if (recording := recording_here()) is not None and (placement := recording.placement) is not None:
        recording.log.gpus.has_tensors = True
        if placement.is_read(value):
            return torch.device("cpu")
        recording.log.gpus.name()
    check_gpu(torch.device(value).index)
    return "cpu" if isinstance(value, str) else torch.device("cpu")


def check_gpu(index: int | None) -> None:
    """Raises RuntimeError, as CUDA does, if the rank's host has no GPU of this number."""
    if index is None or (recording := recording_here()) is None:
        return
    gpus = recording.log.gpus
    if not 0 <= index < gpus.count:
        raise RuntimeError(
            f"cuda:{index} is no GPU: its host has {counted(gpus.count, 'GPU')}, from cuda:0 on; a rank's own is "
            "cuda:LOCAL_RANK"
        )
    gpus.choose(index)


class OnHost(TorchFunctionMode):
    """Gives a program assumed values of fake tensors that it reads."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        read = _ON_HOST.get(name)
        if (at := _NUMBERS_AT.get(name)) is not None:
            args = _with_numbers(args, at)
        elif name == "__deepcopy__" and not isinstance(args[0], FakeTensor):
            return _copied_with_values(func, args, {})
        if read is None or not args or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        return read(func, args, kwargs or {})


class OnDevice(TorchFunctionMode):
    """Maps devices of CUDA, and chooses operators as on a GPU."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # half of all calls
            return _attribute(func, args[0]) if func.__self__ in OF_DEVICE else func(*args)
        kwargs = kwargs or {}
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": torch.device(_CUDA, kwargs["device"])}
        elif kwargs.get("device") is None and (default := default_device_of(func)) is not None:
            kwargs = {**kwargs, "device": default}  # torch itself would add it below this mode
        if (read := _READS.get(name)) is not None and args and isinstance(args[0], FakeTensor):
            return read(func, args, kwargs)
        if (at := _NUMBERS_AT.get(name)) is not None:
            args = _with_numbers(args, at)
        if (special := _SPECIAL.get(name)) is not None:
            return special(func, args, kwargs)
        if name == "to" and len(args) > 1 and type(args[1]) is int:
            args = (args[0], torch.device(_CUDA, args[1]), *args[2:])
        if name == "to":
            # Where a move also changes the type or the layout, each part of it is a call, in torch's order.
            *parts, (args, kwargs) = _parts_of_move(args, kwargs)
            for others, named in parts:
                out = func(args[0], *map(mapped, others), **named)
                args = (_placed(name, (args[0], *others), named, out), *args[1:])
        given = (args, kwargs)
        # Fast path: few calls have a device among their arguments.
        for each in args:
            if isinstance(each, str | torch.device):
                args = tuple(mapped(each) for each in args)
                break
        if kwargs:
            kwargs = {
                key: mapped(each) if isinstance(each, str | torch.device) else each
                for key, each in kwargs.items()
                # torch refuses to pin memory on a machine without a GPU.
                if key != "pin_memory"
            }
        if name in FACTORIES and given[1].get("device") is None and (makes := _making(given)) is not None:
            with makes:
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if name in FACTORIES or name in MOVES or "device" in given[1] or "pin_memory" in given[1]:
            return _placed(name, *given, out)
        return out


def _making(given: tuple[tuple[Any, ...], dict[str, Any]]) -> AbstractContextManager[None] | None:
    """Returns a context for a function that makes a tensor of the host. None if other tensors decide the device."""
    recording = recording_here()
    if recording is None or recording.placement is None:
        return None
    if any(isinstance(each, Tensor) for each in (*given[0], *given[1].values())):
        return None
    return recording.placement.making(depth=3)


def device_said(tensor: Any, depth: int) -> torch.device | None:
    """Returns the device that a tensor says, if the program asks. None: the one that torch says.

    Args:
        tensor: the tensor.
        depth: number of frames between this call and the one that asks.
    """
    recording = recording_here()
    if recording is not None and (placement := recording.placement) is not None:
        return placement.device_of(tensor) if asked_by_program(depth + 1) else None
    if recording is None and (recording := writer()) is not None and (placement := recording.placement) is not None:
        return placement.device_in_thread(tensor) if asked_by_program(depth + 1) else None
    return None


def _attribute(func: Any, tensor: Any) -> Any:
    """Returns an attribute of a tensor that depends on its device."""
    # Frames between: this function and the mode.
    device = device_said(tensor, 3)
    return func(tensor) if device is None else OF_DEVICE[func.__self__](device)


OF_DEVICE: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device: lambda device: device,
    Tensor.is_cuda: lambda _: True,
    Tensor.is_cpu: lambda _: False,
}
"""Attributes of a tensor that depend on its device, with the value for a GPU."""


def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the number of a tensor's GPU, and -1 on the CPU."""
    device = device_said(args[0], 3)
    return int(func(*args, **kwargs)) if device is None else device.index


_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def _parts_of_move(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Arguments]:
    """Returns the calls of `to` that a call consists of. All but the last one are without their tensor.

    A move that does not block changes the type on the GPU, any other one on the host. Layouts of tensors that come to
    the GPU are changed there. Source: `copy_kernel_cuda` in ATen/native/cuda/Copy.cu.
    """
    tensor, *others = args
    given = (*others, *kwargs.values())
    device = next((each for each in given if isinstance(each, str | torch.device)), None)
    if device is None or not isinstance(tensor, FakeTensor):
        return [(args, kwargs)]
    dtype = next((each for each in given if isinstance(each, torch.dtype)), tensor.dtype)
    layout = kwargs.get("memory_format", torch.preserve_format)
    has_layout = layout == torch.preserve_format or tensor.is_contiguous(memory_format=layout)
    recording = recording_here()
    if (dtype == tensor.dtype and has_layout) or recording is None or (placement := recording.placement) is None:
        return [(args, kwargs)]
    non_blocking = _non_blocking(args, kwargs)
    is_on_host = placement.goal_of(tensor) == HOST
    move: _Arguments = (device,), {"non_blocking": non_blocking}
    if is_on_host and is_gpu(device) and not placement.is_unsure(device):
        first: list[_Arguments] = [] if non_blocking or dtype == tensor.dtype else [((dtype,), {})]
        return [*first, move, ((tensor, dtype), {"memory_format": layout})]
    if not is_on_host and is_host(device) and not non_blocking and dtype != tensor.dtype:
        return [move, ((tensor, dtype), {"memory_format": layout})]
    return [(args, kwargs)]


def _placed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """Notes the device of a tensor that a function of torch has made or moved. Returns the tensor."""
    recording = recording_here()
    if recording is None or (placement := recording.placement) is None:
        return out
    device = kwargs.get("device")
    if name in MOVES and isinstance(args[0], Tensor):
        goals: list[Any] = [
            placement.goal_of(each) if isinstance(each, Tensor) else each
            for each in (*args[1:], device)
            if isinstance(each, str | torch.device | Tensor)
        ]
        goals += [HOST] * (name == "cpu")
        if goals:  # not if the dtype alone changes
            non_blocking = _non_blocking(args, kwargs)
            if any(map(is_gpu, goals)):
                out = placement.of_thread(recording.threads, out, non_blocking)
            # Frames between: this function and the mode.
            return placement.moved(args[0], out, goals, non_blocking, depth=3)
    elif (is_pinned := bool(kwargs.get("pin_memory", False))) or is_host(device):
        placement.made_on_host(out, is_pinned, depth=3)
    elif device is None:
        # A tensor among the arguments decides the device, as `out=` does.
        if name in FACTORIES and not any(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
            # Frames between: this function and the mode. Functions of torch in C have none.
            placement.made(out, on_gpu=False, depth=3)
    elif is_gpu(device) and not placement.is_unsure(device):
        placement.made(out, on_gpu=True)
    else:
        placement.lose(out)
    return out


def _non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a move need not be waited for: the first truth value among its arguments."""
    return bool(kwargs.get("non_blocking", next((each for each in args[1:] if isinstance(each, bool)), False)))


def _device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the device that the program asked for. A number is the index of a GPU."""
    if len(args) == 1 and isinstance(args[0], int) and not kwargs:
        check_gpu(args[0])
        return func(_CUDA, args[0])
    return func(*args, **kwargs)


def _parsed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the device to which a module is moved as it is: its tensors are moved one by one then."""
    if args and type(args[0]) is int:
        args = (torch.device(_CUDA, args[0]), *args[1:])
    for each in (*args, *kwargs.values()):
        mapped(each)
    return func(*args, **kwargs)


def _moved_to_gpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001
    """Returns the tensor on the GPU: for torch the same, unless it is known to stay on the host."""
    for each in (*args[1:], *kwargs.values()):
        if isinstance(each, int) and not isinstance(each, bool):
            check_gpu(each)
        else:
            mapped(each)
    if (recording := recording_here()) is not None and recording.placement is not None:
        recording.log.gpus.has_tensors = True
        recording.log.gpus.name()
        non_blocking = _non_blocking(args, kwargs)
        tensor = recording.placement.of_thread(recording.threads, args[0], non_blocking)
        return recording.placement.moved(tensor, tensor, [_CUDA], non_blocking)
    return args[0]


def _pinned(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    """Returns the tensor in pinned memory of the host."""
    if (recording := recording_here()) is None or recording.placement is None:
        return args[0]
    return recording.placement.copies.pinned(args[0])


def _is_pinned(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> bool:
    recording = recording_here()
    return recording is not None and recording.placement is not None and recording.placement.copies.is_pinned(args[0])


def _typed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a tensor of another type. One such as `torch.cuda.FloatTensor`, or its name, says the device, too."""
    tensor, *others = args
    goal = others[0] if others else kwargs.get("dtype")
    if isinstance(goal, str) and goal.startswith("torch.cuda."):
        goal = getattr(torch.cuda, goal.removeprefix("torch.cuda."))
    if goal is None and device_said(tensor, 3) is not None:
        return str(func(tensor)).replace("torch.", "torch.cuda.")
    if goal is None or isinstance(goal, torch.dtype):
        return func(*args, **kwargs)
    if isinstance(goal, str | type):  # of the CPU
        return _placed("cpu", (tensor,), {}, func(*args, **kwargs))
    return _placed("to", (tensor, torch.device(_CUDA)), {}, tensor.to("cpu", goal.dtype))


def _values(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    """Returns the assumed values of a tensor as nested lists."""
    tensor = args[0]
    if (known := _known(tensor)) is not None:
        return known.tolist()

    def nested(shape: Sequence[int], value: object) -> object:
        return [nested(shape[1:], value) for _ in range(shape[0])] if shape else value

    return nested(tensor.shape, tensor.reshape(-1)[0].item() if tensor.numel() else 0)


def _array(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    """Returns the assumed values of a tensor as an array. A large one takes no memory."""
    tensor = args[0]
    if tensor.requires_grad:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    recording = recording_here()
    placement = None if recording is None else recording.placement
    if recording is not None and placement is not None and recording.memory.known(tensor) in recording.memory.on_gpu:
        raise TypeError(
            f"can't convert {placement.gpu} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )
    if (known := _known(tensor)) is not None:
        return known
    with real_tensors():
        dtype = torch.empty((), dtype=tensor.dtype).numpy().dtype
    value = np.array(tensor.reshape(-1)[0].item() if tensor.numel() else 0, dtype)
    # A program may write to it.
    return np.full(tensor.shape, value) if tensor.numel() <= _WRITABLE else np.broadcast_to(value, tensor.shape)


def _known(tensor: Tensor) -> np.ndarray[Any, Any] | None:
    """Returns the known values of a fake tensor, see `routing`, which the host waits for. None if they are unknown."""
    if (recording := recording_here()) is None or (value := recording.routing.read(tensor)) is None:
        return None
    if recording.memory.known(tensor) not in recording.memory.on_host:
        recording.log.entries.append(HostWait(recording.log.stream, -1, recording.log.place()))
    # A mode would make a fake tensor of several floating-point numbers.
    with real_tensors():
        return value.detach().clone().numpy()


def _formatted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Formats the assumed value of a number, as a tensor of a GPU formats its value."""
    tensor, *spec = args
    return str(func(*args, **kwargs)) if tensor.dim() else format(tensor.item(), *spec)


def _address(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> int:
    """Returns the address of a tensor, which no other storage has."""
    tensor = args[0]
    return int(tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size())


def _copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies a tensor for `copy.deepcopy`, which would ask for the address of its values."""
    tensor, memo = args
    if id(tensor) not in memo:
        with torch.no_grad():
            copy: Tensor = tensor.clone(memory_format=torch.preserve_format)
        if (known := known_value(tensor)) is not None:
            with real_tensors():
                set_known_value(copy, known.clone())
        if isinstance(tensor, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, tensor.requires_grad)
        elif tensor.is_floating_point():
            copy.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copy.grad = _copied(func, (tensor.grad, memo), kwargs)
        memo[id(tensor)] = copy
    return memo[id(tensor)]


def _histogram(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Counts integers as floating-point numbers, since torch counts integers only on GPUs."""
    tensor, *others = args
    if not isinstance(tensor, FakeTensor) or tensor.is_floating_point():
        return func(*args, **kwargs)
    return func(tensor.double(), *others, **kwargs).to(tensor.dtype)


def _ctc_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes a CTC loss by its kernel. torch's own function reads lengths, and makes a tensor of them in C++."""
    names = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
    given: dict[str, Any] = {"blank": 0, "reduction": 0, "zero_infinity": False}  # torch's own; F.ctc_loss gives all
    given |= {**dict(zip(names, args, strict=False)), **kwargs}
    log_probs, targets, _, lengths, blank, reduction, zero_infinity = (given[each] for each in names)
    if not isinstance(log_probs, FakeTensor) or (recording := recording_here()) is None:
        return func(*args, **kwargs)
    if recording.placement is not None:
        # cuDNN takes joined targets of the host, in 32 bits. Others must lie where the probabilities do.
        if targets.ndim == 1 and targets.dtype == torch.int32:
            targets = _moved_to_gpu(Tensor.cuda, (targets,), {})
        recording.placement.of_call("ctc_loss", [log_probs, targets])
    if is_single := log_probs.ndim == 2:
        log_probs = log_probs.unsqueeze(1)
    steps, batch = log_probs.shape[:2]
    lengths = recording.routing.lengths_of_targets(lengths, targets, batch)
    if len(lengths) != batch:
        raise RuntimeError(f"ctc_loss takes a target length for each of {batch} sequences, and got {len(lengths)}")
    loss = torch.ops.aten._ctc_loss(log_probs, targets, [steps] * batch, lengths, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == math.inf, 0.0, loss)
    # torch.ctc_loss has a number in place of the name.
    if reduction in ("mean", 1):
        return (loss / torch.ones_like(loss)).mean()  # divided by the lengths
    if reduction in ("sum", 2):
        return loss.sum()
    return loss.squeeze(0) if is_single else loss


def _kept(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
    """Returns the tensor, which has no memory to be shared with other processes."""
    return args[0]


def _applied(func: Any, _: tuple[Any, ...], __: dict[str, Any]) -> Any:
    """Refuses a function of Python for each element: torch would call it for memory that is not there."""
    recording = recording_here()
    raise unknown_result(func.__name__, "an unknown line" if recording is None else recording.log.line())


def _with_numbers(args: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    """Returns the arguments of a function that makes a tensor of numbers. The host reads numbers that are tensors.

    Args:
        args: the arguments.
        at: position of the numbers.
    """
    if len(args) <= at or not isinstance(args[at], list | tuple | torch.UntypedStorage):
        return args
    return *args[:at], _numbers(args[at]), *args[at + 1 :]


def _numbers(data: Any) -> Any:
    if isinstance(data, FakeTensor):
        return data.item() if data.ndim == 0 or data.numel() == 1 else data.tolist()
    if isinstance(data, torch.UntypedStorage):  # of a file that safetensors has opened
        with real_tensors():
            return torch.asarray(data, dtype=torch.uint8).numpy()
    if isinstance(data, list | tuple) and any(isinstance(each, list | tuple | FakeTensor) for each in data):
        return [_numbers(each) for each in data]
    return data


def _split_by_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Splits a tensor at indices, or into a number of parts, that a tensor of the host has."""
    tensor, *others = args
    if not others and "tensor_indices_or_sections" in kwargs:
        others = [kwargs.pop("tensor_indices_or_sections")]
    places = others[0] if others else None
    if not isinstance(places, FakeTensor) or (recording := recording_here()) is None:
        return func(tensor, *others, **kwargs)
    if recording.memory.known(places) in recording.memory.on_gpu:
        raise RuntimeError(
            "tensor_split expected tensor_indices_or_sections to be on cpu, but it is on a GPU: move it by .cpu()"
        )
    if (known := recording.routing.read(places)) is None:
        raise unknown_result("tensor_split", recording.log.line())
    with real_tensors():
        numbers = known.tolist()
    return func(tensor, numbers, *others[1:], **kwargs)


def _copied_with_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies a tensor with data, such as the number of steps of an optimizer, for `copy.deepcopy`."""
    with real_tensors():
        return func(*args, **kwargs)


_WRITABLE = 1 << 20
"""Elements up to which an array of assumed values has memory of its own."""
_Special: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_NUMBERS_AT = {"tensor": 0, "as_tensor": 0, "asarray": 0, "new_tensor": 1}
"""Functions of torch that take lists of numbers, with the position of the list."""

_READS: dict[str, _Special] = {
    "tolist": _values,
    "numpy": _array,
    "__array__": _array,
    "__format__": _formatted,
    "data_ptr": _address,
    "__deepcopy__": _copied,
    "ctc_loss": _ctc_loss,
    "istft": inverse_transform,
    "tensor_split": _split_by_values,
    "share_memory_": _kept,
    **dict.fromkeys(("apply_", "map_", "map2_"), _applied),
}
"""Functions of torch that depend on values or addresses of a fake tensor, by name."""

_ON_HOST: dict[str, _Special] = {
    **_READS,
    **dict.fromkeys(GATES, with_batch_sizes),
    "_pack_padded_sequence": pack_padded,
    "_pad_packed_sequence": pad_packed,
}
"""Functions that do something else in a program on processors, by name."""

_SPECIAL: dict[str, _Special] = {
    "device": _device,
    "_parse_to": _parsed,
    "cuda": _moved_to_gpu,
    "histc": _histogram,
    **dict.fromkeys(GATES, recurrent),
    "_pack_padded_sequence": pack_padded,
    "_pad_packed_sequence": pad_packed,
    "type": _typed,
    "get_device": _index,
    "pin_memory": _pinned,
    "is_pinned": _is_pinned,
    "__deepcopy__": _copied_with_values,  # a fake one is read, see above
    # As libraries have it that were imported before. `device_names` replaces it, too.
    "scaled_dot_product_attention": attention,
}
"""Functions of torch that do something else on a GPU, by name."""
