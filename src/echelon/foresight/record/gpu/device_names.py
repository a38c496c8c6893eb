"""Functions and methods of torch on fake tensors, on a machine without a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import CausalBias
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from echelon._torch_private.autograd import backward_with
from echelon._torch_private.distributed import all_gather_into, batches_noted, ddp_checks_by, objects_packed_by
from echelon._torch_private.modules import (
    casts_by,
    ddp_of_sync_batch_norm,
    devices_as_on_gpu,
    flash_attention_by,
    flex_attention_by,
    move_to_gpu,
    offloaded_parameters_by,
    optimizers_as_on_gpu,
)
from echelon._torch_private.tensors import (
    FakeTensor,
    default_device_of,
    has_symbols,
    is_in_function_mode,
    move_fake,
    real_tensors,
    storage_address,
    tree_leaves,
    tree_map,
)
from echelon.errors import UnsupportedOp
from echelon.foresight.record.gpu.attention import attention
from echelon.foresight.record.gpu.autocast import autocast_as_on_gpu
from echelon.foresight.record.gpu.device import OnDevice, OnHost, device_said, mapped
from echelon.foresight.record.gpu.fused import fused_as_on_gpu
from echelon.foresight.record.gpu.gpu_names import Gpu, gpu_names, set_device
from echelon.foresight.record.here import Recording, in_ranks, recording_here
from echelon.foresight.record.log.callers import asked_by_program
from echelon.foresight.record.log.copies import Copies
from echelon.foresight.record.log.placement import is_gpu
from echelon.foresight.record.writer import writer
from echelon.replacements import Replacement, replaced, replaced_in


@contextmanager
def device_names(num_devices: int, gpu: Gpu | None) -> Iterator[None]:
    """Inside, names of CUDA work in threads of recorded ranks, and functions of torch take fake tensors.

    Args:
        num_devices: number of GPUs of the largest host.
        gpu: facts of each. None: hosts have no GPUs, and names of CUDA are as they are.
    """
    with ExitStack() as stack:
        if gpu is not None:
            stack.enter_context(replaced(_of_gpu(num_devices, gpu)))
            for each in (optimizers_as_on_gpu(_is_kept_on_host), autocast_as_on_gpu(), fused_as_on_gpu()):
                stack.enter_context(each)
        stack.enter_context(replaced(_of_fake_tensors(OnDevice if gpu is not None else OnHost)))
        stack.enter_context(replaced_in("transformers.utils.import_utils", _untraced))
        yield


def _of_gpu(num_devices: int, gpu: Gpu) -> Iterator[Replacement]:
    """Yields the names of CUDA, and functions of torch that differ on GPUs."""
    for owner, names in gpu_names(num_devices, gpu):
        for name, value in names.items():
            yield Replacement(owner, name, partial(_constant, value), may_be_missing=True)
    yield Replacement(torch.autograd.profiler.profile, "__init__", in_ranks(_without_kernels))
    yield Replacement(torch.autograd.profiler.emit_nvtx, "__enter__", in_ranks(lambda _, __, context: context))
    yield Replacement(torch.autograd.profiler.emit_nvtx, "__exit__", in_ranks(lambda *_: None))
    yield Replacement(FakeTensor, "device", _said)
    yield Replacement(DeviceMesh, "device_type", _type_said)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        yield Replacement(torch, name, in_ranks(_of_autocast))
    yield Replacement(torch, "get_autocast_gpu_dtype", in_ranks(lambda *_: torch.get_autocast_dtype("cuda")))
    yield Replacement(
        torch, "set_autocast_gpu_dtype", in_ranks(lambda _, __, dtype: torch.set_autocast_dtype("cuda", dtype))
    )
    yield Replacement(torch, "set_autocast_dtype", in_ranks(_set_autocast_dtype))
    yield Replacement(torch, "set_autocast_enabled", in_ranks(_enable_autocast))
    yield casts_by(in_ranks(_cast))
    yield Replacement(
        torch.backends.cuda, "preferred_linalg_library", in_ranks(lambda _, original, *__, **___: original())
    )
    yield Replacement(torch, "get_default_device", in_ranks(_default_device))
    yield Replacement(torch, "set_default_tensor_type", in_ranks(_set_default_type))
    for name in ("from_numpy", "frombuffer"):  # no function mode sees them
        yield Replacement(torch, name, in_ranks(_on_host))
    yield Replacement(torch.autocast, "__init__", in_ranks(_on_cpu))
    yield Replacement(DistributedDataParallel, "__init__", in_ranks(_without_devices))
    # Not by `OnDevice`, which torch leaves while it runs a function that calls it, as of nn.MultiheadAttention.
    yield Replacement(nn.functional, "scaled_dot_product_attention", in_ranks(_attention))
    yield Replacement(nn.SyncBatchNorm, "forward", in_ranks(_synchronized))
    yield Replacement(nn.DataParallel, "forward", in_ranks(_of_one_gpu))
    yield Replacement(torch.autograd.graph.saved_tensors_hooks, "__init__", in_ranks(_hooked))
    yield from flex_attention_by(in_ranks(_flexible_attention))
    yield from flash_attention_by(in_ranks(_newer_flash_attention))
    yield from ddp_of_sync_batch_norm()
    yield from devices_as_on_gpu()
    yield from offloaded_parameters_by(in_ranks(_gathered_on_gpu), in_ranks(_without_offloaded_gradient))


def _of_fake_tensors(mode: type[OnDevice | OnHost]) -> Iterator[Replacement]:
    """Yields functions of torch that would refuse fake tensors, or take them for others."""
    yield from backward_with(lambda _: mode() if _is_recorded_here() else nullcontext())
    for name in ("__init__", "__getitem__", "_flatten"):
        yield Replacement(DeviceMesh, name, in_ranks(_with_values))
    yield Replacement(DeviceMesh, "__init__", in_ranks(_name_groups))
    yield from ddp_checks_by(in_ranks(_with_values))
    yield from objects_packed_by(in_ranks(_with_values))
    yield from batches_noted(_begin_batch)
    yield Replacement(DataLoader, "__init__", in_ranks(_without_workers))
    # A tensor without values, of a class that no fake tensor can have.
    yield Replacement(CausalBias, "__new__", in_ranks(_really_made))
    yield Replacement(torch.inference_mode, "__enter__", in_ranks(_infer))
    yield Replacement(torch.inference_mode, "__exit__", in_ranks(_end_inference))
    yield Replacement(torch, "is_inference_mode_enabled", in_ranks(_is_inferring))
    yield Replacement(nn.Module, "_apply", in_ranks(_apply))
    yield Replacement(torch.UntypedStorage, "resize_", in_ranks(_resize))
    yield Replacement(torch.UntypedStorage, "data_ptr", in_ranks(_address))


def _untraced(utils: ModuleType) -> Iterator[Replacement]:
    """Yields replacements by which models of Hugging Face take recorded tensors for ordinary ones.

    A fake tensor means a trace to them, which has to hold for all values. They would keep a mask of ones, and one of
    the sequences in a row, for which attention takes a slower kernel.
    """
    name = "is_fake_tensor"
    if (found := vars(utils).get(name)) is not None:  # older versions have none
        # Other modules may have imported the function by its name.
        modules = [each for each in list(sys.modules.values()) if getattr(each, "__dict__", {}).get(name) is found]
        for each in dict.fromkeys((utils, *modules)):
            yield Replacement(each, name, in_ranks(_is_of_trace))


def _is_of_trace(_: Recording, is_fake: Callable[[object], bool], value: object) -> bool:
    return has_symbols() and is_fake(value)


def _constant(value: Any, _: object) -> Any:
    return value


def _is_recorded_here() -> bool:
    return (recording := recording_here()) is not None and not recording.log.calls.are_answered


def _is_kept_on_host(tensor: object) -> bool:
    return (recording := recording_here()) is not None and _is_on_host(recording, tensor)


def _begin_batch(size: int) -> None:
    if (recording := recording_here()) is not None:
        recording.log.begin_batch(size)


def _without_kernels(_: Recording, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Makes a profiler of the host alone. torch would log an error for each operator, since it finds no GPU."""
    original(*args, **{**kwargs, "use_cpu": True, "use_device": None, "use_cuda": False})


def _really_made(_: Recording, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with real_tensors():
        return original(*args, **kwargs)


def _infer(recording: Recording, __: Callable[..., None], context: Any) -> None:
    """Begins `torch.inference_mode` as `torch.no_grad`. In torch's own mode a recorder sees no products."""
    context.gradients = torch.set_grad_enabled(not context.mode)
    context.was_inferring, recording.log.is_inferring = recording.log.is_inferring, context.mode


def _end_inference(recording: Recording, __: Callable[..., None], context: Any, *error: Any) -> None:
    recording.log.is_inferring = context.was_inferring
    context.gradients.__exit__(*error)


def _is_inferring(recording: Recording, original: Callable[[], bool]) -> bool:
    """Whether inference mode is enabled, as a program asks. torch and this package act by the mode of their tensors."""
    # Frames between: this function and its wrapper.
    return original() or (recording.log.is_inferring and asked_by_program(3))


# Methods of torch that treat fake tensors on the CPU differently from tensors of a GPU


def _with_values(_: Recording, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function whose tensors are numbers of ranks or sizes: they need values."""
    with real_tensors():
        return original(*map(mapped, args), **{name: mapped(each) for name, each in kwargs.items()})


def _attention(_: Recording, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return attention(original, args, kwargs)


def _flexible_attention(recording: Recording, _: Callable[..., Any], *args: Any, **__: Any) -> tuple[Tensor, ...]:
    """Computes `flex_attention` by the kernels of other attention. The function of its mask may depend on values."""
    query, key, value, _, mask, scale = args[:6]
    is_masked = getattr(mask[-1], "__name__", "") != "noop_mask"
    text = "flex_attention takes the time of flash attention"
    recording.log.assume(f"{text}, and its mask that of a causal one" if is_masked else text)
    if is_masked and query.shape[-2] != key.shape[-2]:
        # As in context parallelism: a part of the queries, which sees half of the pairs.
        key, value = (each[..., : -(-key.shape[-2] // 2), :] for each in (key, value))
        is_masked = False
    given = {"is_causal": is_masked, "scale": scale, "enable_gqa": True}
    out = attention(nn.functional.scaled_dot_product_attention, (query, key, value), given)
    sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    return out, sums, sums


def _newer_flash_attention(recording: Recording, _: Callable[..., Any]) -> SimpleNamespace:
    """Stands for the installation of a newer flash attention."""
    recording.log.assume("flash attention of version 3 or 4 takes the time of version 2, which is longer")
    return SimpleNamespace(remove=lambda: None)


def _name_groups(
    recording: Recording, original: Callable[..., None], mesh: DeviceMesh, *args: Any, **kwargs: Any
) -> None:
    """Makes a mesh. For a dimension of all ranks torch uses the default group, which has no name."""
    if is_gpu(kwargs.get("device_type", args[0] if args else None)):
        recording.log.gpus.mesh_type = "cuda"
        if not recording.log.gpus.has_tensors:  # torch chooses the rank's own
            set_device(int(os.environ.get("LOCAL_RANK", "0")))
        else:  # the program may have chosen it by the same number
            recording.log.gpus.name(int(os.environ.get("LOCAL_RANK", "0")))
    original(mesh, *args, **kwargs)
    for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False):
        if size == dist.get_world_size():
            recording.log.name_of_all = recording.log.name_of_all or name


def _said(original: Any) -> property:
    """Returns the attribute of fake tensors that tells a program their device."""
    own = original.fget

    def device(tensor: Any) -> torch.device:
        if (said := device_said(tensor, 2)) is not None:
            return said
        # In a thread of the program, the mode's own answer would depend on the present kernel of the rank.
        is_of_rank = recording_here() is not None or writer() is None
        found: torch.device = own(tensor) if is_of_rank else tensor.fake_device
        return found

    return property(device, original.fset)


def _type_said(original: Any) -> property:
    """Returns the attribute of a mesh that tells a program the type of its devices."""
    own = original.fget

    def device_type(mesh: DeviceMesh) -> str:
        recording = recording_here()
        return own(mesh) if recording is None or not asked_by_program(2) else recording.log.gpus.mesh_type

    return property(device_type)


def _on_host(recording: Recording, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Makes a tensor of values in the memory of the host."""
    tensor = original(*args, **kwargs)
    if recording.placement is not None:
        # Frames between: this function and its wrapper.
        recording.placement.made(tensor, on_gpu=False, depth=3)
    return tensor


def _default_device(recording: Recording, original: Callable[[], torch.device]) -> torch.device:
    """Returns the device of new tensors. torch's function makes one, which is on the CPU."""
    device = default_device_of(torch.empty)
    if recording.placement is None or device is None or not is_gpu(device):
        return original()
    return device if device.index is not None else recording.placement.gpu


def _set_default_type(_: Recording, __: Callable[..., None], kind: Any) -> None:
    """Sets the type of new tensors. One such as `torch.cuda.FloatTensor`, or its name, says the device, too."""
    if isinstance(kind, str):
        kind = getattr(torch.cuda if kind.startswith("torch.cuda.") else torch, kind.rpartition(".")[2])
    torch.set_default_device(None if isinstance(kind, type) else "cuda")
    torch.set_default_dtype(kind.dtype)


def _of_autocast(_: Recording, original: Callable[..., Any], device_type: str = "cuda") -> Any:
    """Answers for a GPU: there autocast acts on operators of the CPU."""
    return original("cpu" if device_type == "cuda" and torch.is_autocast_enabled("cpu") else device_type)


def _set_autocast_dtype(_: Recording, original: Callable[..., None], device_type: str, dtype: torch.dtype) -> None:
    original(device_type, dtype)
    if device_type == "cuda":
        original("cpu", dtype)


def _enable_autocast(_: Recording, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Enables or disables autocast of a device, by default that of a GPU."""
    args = (*args, *(kwargs[each] for each in ("device_type", "enabled") if each in kwargs))
    device_type, is_enabled = args if len(args) > 1 else ("cuda", *args)
    if device_type == "cuda":
        torch.set_autocast_dtype("cuda", torch.get_autocast_dtype("cuda"))
    original("cpu" if device_type == "cuda" else device_type, is_enabled)


def _cast(_: Recording, original: Callable[..., Any], value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Converts the arguments of a function with `torch.amp.custom_fwd(cast_inputs=...)`."""
    return original(value, "cpu" if device_type == "cuda" else device_type, dtype)


def _on_cpu(
    recording: Recording,
    original: Callable[..., None],
    autocast: Any,
    device_type: str,
    dtype: torch.dtype | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Makes an autocast, which acts on operators of one device."""
    if device_type == "cuda":
        device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
    # Frames between: this function and its wrapper.
    elif device_type == "cpu" and (args[0] if args else kwargs.get("enabled", True)) and asked_by_program(3):
        recording.log.assume("autocast of the CPU changes no operator")
        dtype, args = torch.get_autocast_dtype("cpu"), ()
        kwargs["enabled"] = torch.is_autocast_enabled("cpu")
    original(autocast, device_type, dtype, *args, **kwargs)


def _apply(
    recording: Recording,
    original: Callable[..., Any],
    module: nn.Module,
    function: Callable[..., Any],
    recurse: bool = True,
) -> Any:
    """Moves a module. torch swaps fake parameters, but overwrites parameters of a GPU."""
    parameters = module._parameters
    for name, each in parameters.items():
        if isinstance(each, FakeTensor):
            with torch.no_grad():
                moved = function(each)
                # As torch: a parameter of the meta device has no memory that could be replaced.
                if "meta" in (each.fake_device.type, moved.fake_device.type):
                    parameters[name] = nn.Parameter(moved, each.requires_grad)
                    continue
                move_fake(each, moved)
                if each.grad is not None:
                    move_fake(each.grad, function(each.grad))
    module._parameters = {name: each for name, each in parameters.items() if not isinstance(each, FakeTensor)}
    try:
        return original(module, function, recurse)
    finally:
        module._parameters = {name: module._parameters.get(name, each) for name, each in parameters.items()}
        # Wrappers of torch may move them from the host to the GPU later.
        recording.memory.loosen((*module._parameters.values(), *module._buffers.values()))


def _without_devices(
    recording: Recording, original: Callable[..., None], ddp: Any, module: Any, *args: Any, **kwargs: Any
) -> None:
    """Makes a DDP, which takes no device for modules on the CPU."""
    others = {name: each for name, each in kwargs.items() if name not in ("device_ids", "output_device")}
    device_ids = kwargs.get("device_ids", args[0] if args else None) or ()
    if not device_ids and recording.placement is not None:
        recording.placement.still.add(ddp)
    for each in device_ids:
        recording.log.gpus.name(each if isinstance(each, int) else torch.device(each).index)
    original(ddp, module, None, None, *args[2:], **others)
    if (device := recording.placement and recording.placement.device_of(next(ddp.parameters()))) is not None:
        ddp.device = device


_OF_WORKERS = ("prefetch_factor", "multiprocessing_context", "worker_init_fn")


def _without_workers(
    recording: Recording, original: Callable[..., None], loader: Any, *args: Any, **kwargs: Any
) -> None:
    """Makes a loader whose workers run in the rank's own thread."""
    pins = bool(kwargs.get("pin_memory", args[7] if len(args) > 7 else False))
    # Nothing is recorded in the process of a worker, and torch pins no memory without a GPU.
    # dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, ...
    args = (*args[:5], *(0 for _ in args[5:6]), *args[6:7], *(False for _ in args[7:8]), *args[8:9])
    kwargs.update({name: 0 for name in ("num_workers", "timeout") if name in kwargs})
    kwargs.update({name: False for name in ("pin_memory", "persistent_workers") if name in kwargs})
    kwargs.update({name: None for name in _OF_WORKERS if name in kwargs})
    original(loader, *args, **kwargs)
    if pins and recording.placement is not None:
        loader.collate_fn = partial(_pinned_batch, recording.placement.copies, loader.collate_fn)


def _pinned_batch(copies: Copies, collate: Callable[[Any], Any], samples: Any) -> Any:
    """Makes a batch in pinned memory, as the thread of a loader does beside the program."""
    batch = collate(samples)
    for each in tree_leaves(batch):
        copies.loaded(each)
    return batch


def _address(_: Recording, original: Callable[..., int], storage: torch.UntypedStorage) -> int:
    """Returns the address of a storage. It is 0 for all fake storages, but programs tell storages apart by it."""
    if storage.device.type == "meta":
        return storage_address(storage) if storage.nbytes() else 0
    return original(storage)


def _resize(recording: Recording, original: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
    result = original(storage, size)
    recording.memory.resized(storage)
    return result


# SyncBatchNorm refuses to run on tensors of the CPU. As by torch on GPUs, statistics of all ranks are gathered in
# forward, and sums of gradients are added up in backward. Else it takes the time of a BatchNorm.


class _Reduce(torch.autograd.Function):
    """Adds up two sums for each channel in backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns the output itself, since a view could not be changed in place, as by ReLU."""
        ctx.group = group
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Returns the gradient."""
        sums = gradient.new_empty(2 * gradient.shape[1], dtype=torch.float32)
        dist.all_reduce(sums, group=ctx.group)
        return gradient, None


def _gathered_on_gpu(recording: Recording, original: Callable[..., bool], handle: Any) -> bool:
    """Prepares a flat parameter of FSDP1 for its gathering, which NCCL does on the GPU. Returns whether it changed."""
    has_changed = original(handle)
    return (_is_on_host(recording, handle.flat_param) and move_to_gpu(handle)) or has_changed


def _without_offloaded_gradient(recording: Recording, original: Callable[..., None], handle: Any) -> None:
    """Prepares a flat parameter of FSDP1 for its backward pass."""
    # FSDP1 keeps an offloaded gradient in another tensor, too.
    if _is_on_host(recording, handle.flat_param.grad):
        handle.flat_param.grad = None
    original(handle)


def _is_on_host(recording: Recording, tensor: object) -> bool:
    """Whether a fake tensor is known to be on the host."""
    return recording.memory.number_inside(tensor) in recording.memory.on_host


def _hooked(_: Recording, original: Callable[..., None], context: Any, pack: Any, unpack: Any) -> None:
    """Makes a context whose hooks move saved tensors as the program does elsewhere: torch calls them inside a mode."""
    # Those of checkpointing move nothing, and run forward passes.
    if type(context).__module__ != "torch.utils.checkpoint":
        pack, unpack = _in_mode(pack), _in_mode(unpack)
    original(context, pack, unpack)


def _in_mode(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(value: Any) -> Any:
        with nullcontext() if is_in_function_mode(OnDevice) else OnDevice():
            return hook(value)

    return call


def _of_one_gpu(_: Recording, __: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the module of a DataParallel, which copies it to its GPUs in each step if there are several."""
    if len(module.device_ids) > 1:
        raise UnsupportedOp(
            f"nn.DataParallel on {len(module.device_ids)} GPUs is not foreseen: use DistributedDataParallel with a "
            "rank for each GPU, as torch advises"
        )
    # It moves them, as DDP does.
    args, kwargs = tree_map(lambda each: each.cuda() if isinstance(each, Tensor) else each, (args, kwargs))
    return module.module(*args, **kwargs)


def _synchronized(_: Recording, original: Callable[..., Tensor], module: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    group = module.process_group or dist.group.WORLD
    if not module.training or group is None or group.size() == 1:
        return original(module, input)
    # As on a GPU: mean and inverse deviation of each channel, and the count.
    statistics = input.new_empty(2 * input.shape[1] + 1, dtype=torch.float32)
    all_gather_into(group, statistics.new_empty(group.size() * statistics.numel()), statistics).wait()
    is_tracked = module.track_running_stats
    if is_tracked and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    output = nn.functional.batch_norm(
        input,
        module.running_mean if is_tracked else None,
        module.running_var if is_tracked else None,
        module.weight,
        module.bias,
        True,
        module.momentum or 0.0,
        module.eps,
    )
    reduced: Tensor = _Reduce.apply(output, group)  # type: ignore[no-untyped-call]
    return reduced
