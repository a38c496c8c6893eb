"""Private interfaces of torch about modules, optimizers, the compiler and the profiler."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.nn.parallel import DistributedDataParallel

from echelon._torch_private.tensors import FakeTensor
from echelon._torch_versions import COMPILED_NAMES, FLASH_NAMES, FLEX_NAMES, FSDP1_NAMES, missing
from echelon.replacements import Replacement, replaced

F = TypeVar("F", bound=Callable[..., Any])

COMPILED, RECOMPUTED = "_orig_mod", "_checkpoint_wrapped_module"
"""Attributes in which the wrappers of torch.compile and of activation checkpointing hold their module. In the names of
parameters and buffers they are left out: a checkpoint has the names of the plain model."""


_NOT_TRACED = "_torchdynamo_disable"
"""Attribute by which torch's compiler knows a function that is no part of the code that it traces."""


def never_compiled(function: F) -> F:
    """Decorator of a function that torch.compile does not compile, nor any function that it calls.

    `torch.compiler.disable` does the same in each call, and imports torch's compiler, which takes a second.
    """
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, strategy)
    # For a call from code that is compiled, of which it would become a part.
    setattr(function, _NOT_TRACED, True)
    return function


def hooks_of_all_modules() -> dict[str, Any]:
    """Returns torch's hooks for all modules, as of `register_module_forward_hook`, by their private names."""
    return {name: value for name, value in vars(torch.nn.modules.module).items() if name.startswith("_global_")}


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks that a backward calls, as of `register_full_backward_hook`."""
    return any(vars(module).get(name) for name in ("_backward_hooks", "_backward_pre_hooks"))


def print_options() -> tuple[Any, str]:
    """Returns the module that has the options of `torch.set_printoptions`, and their private name."""
    return torch._tensor_str, "PRINT_OPTS"


def precision_of(backend: str, operation: str) -> str:
    """Returns the precision of float32 of a backend, such as that of `torch.backends.cuda.matmul.fp32_precision`.

    The public attributes of some backends read one value and set another one.
    """
    found: str = torch._C._get_fp32_precision_getter(backend, operation)
    return found


def precisions_set_by(wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> list[Replacement]:
    """Lets torch set a precision of float32 by a wrapper of its own function of backend, operation and value."""
    return [Replacement(torch._C, "_set_fp32_precision_setter", wrap)]


def devices_as_on_gpu() -> list[Replacement]:
    """Lets torch find an accelerator, "cuda", and FSDP1 compute on the CPU in its place.

    Both are found by private functions. FSDP1 compares the device that it has found with that of its tensors, and
    refuses tensors of the CPU where it would broadcast them.
    """
    found = [Replacement(torch._C, "_get_accelerator", lambda _: lambda *_: torch.device("cuda"))]
    if missing(FSDP1_NAMES):
        return found
    init = importlib.import_module("torch.distributed.fsdp._init_utils")
    return [
        *found,
        Replacement(init, "_get_compute_device", _on_cpu),
        Replacement(init, "_check_module_states_for_sync_module_states", lambda _: lambda _: None),
    ]


def _on_cpu(find: Callable[..., torch.device]) -> Callable[..., torch.device]:
    def compute_device(*args: Any, **kwargs: Any) -> torch.device:
        device = find(*args, **kwargs)
        return torch.device("cpu") if device.type == "cuda" else device

    return compute_device


def casts_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Replacement:
    """Lets `torch.amp.custom_fwd` convert arguments by a wrapper of its own function, which compares devices."""
    return Replacement(torch.amp.autocast_mode, "_cast", wrap)


def offloaded_parameters_by(
    gather: Callable[[Callable[..., bool]], Callable[..., bool]],
    begin: Callable[[Callable[..., None]], Callable[..., None]],
) -> list[Replacement]:
    """Lets FSDP1 prepare a flat parameter by wrappers of its private methods, which compare devices of tensors.

    Args:
        gather: wraps the method before the parameter is gathered, which moves an offloaded one to the GPU.
        begin: wraps the method before the backward pass, which drops a gradient on the host.
    """
    if missing(FSDP1_NAMES):
        return []
    handle = importlib.import_module("torch.distributed.fsdp._flat_param").FlatParamHandle
    return [
        Replacement(handle, "pre_unshard", gather),
        Replacement(handle, "prepare_gradient_for_backward", begin),
    ]


def move_to_gpu(handle: Any) -> bool:
    """Moves the flat parameter of a handle of FSDP1 from the host to the GPU. Returns False if it need not be moved."""
    # In 16 bits a copy in that type is on the GPU already.
    if handle._uses_param_mixed_precision and not handle._force_full_precision:
        return False
    handle.flat_param_to(torch.device("cuda"), non_blocking=True)
    return True


def compiled_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[Replacement]:
    """Lets a function that was compiled before call a wrapper of its choice of a compiler.

    The wrapper gets the compiler, None or False where nothing is compiled. It returns the compiler to use; None runs
    the function as it is.
    """
    if missing(COMPILED_NAMES):
        return []
    return [Replacement(importlib.import_module("torch._dynamo.eval_frame"), "_callback_from_stance", wrap)]


_INNER = "_torchdynamo_orig_backend"
"""Attribute of torch's callables that compile: the compiler inside. Without it ranks would share compiled code."""


def backend_of(compiler: Any) -> object:
    """Returns the innermost compiler of one of torch's callables, by which compiled code is found again."""
    while hasattr(compiler, _INNER):
        compiler = getattr(compiler, _INNER)
    return compiler


class OfRank:
    """One of torch's callables that compile, under another innermost compiler."""

    def __init__(self, compiler: Any, backend: object, world_size: int) -> None:
        """Takes the callable, an object in place of its innermost compiler, and the number of ranks."""
        self._compiler = compiler
        setattr(self, _INNER, backend)
        self._world_size = world_size

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compiles, as often as torch allows for each rank."""
        config: Any = importlib.import_module("torch._dynamo.config")
        names = "recompile_limit", "accumulated_recompile_limit"
        # Here, since the configuration belongs to a thread.
        with config.patch(**{name: self._world_size * getattr(config, name) for name in names}):
            return self._compiler(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler, name)


def flex_attention_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[Replacement]:
    """Lets `flex_attention` compute by a wrapper of its operator, by whichever name a program has imported it.

    The wrapper gets query, key, value, the modification of scores, the parts of the block mask and the scale. The last
    part of the mask is its function. It returns the output, the logarithms of sums and the largest scores.
    """
    if missing(FLEX_NAMES):
        return []
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    return [
        Replacement(flex, "flex_attention_hop", wrap),
        Replacement(flex, "_validate_device", lambda _: lambda *_: None),
        # Otherwise it compiles the operator.
        Replacement(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", lambda _: True),
    ]


def flash_attention_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[Replacement]:
    """Lets programs choose a newer flash attention, such as "FA3", by wrappers of the functions that install it.

    Such a function returns an object with `remove`. torch's own imports a package for GPUs.
    """
    if missing(FLASH_NAMES):
        return []
    registry = importlib.import_module("torch.nn.attention._registry")
    return [
        Replacement(
            registry, "_FLASH_ATTENTION_IMPLS", lambda known: {name: wrap(install) for name, install in known.items()}
        ),
        Replacement(registry, "_FLASH_ATTENTION_ACTIVE", lambda active: active),  # restored afterwards
    ]


_Groups: TypeAlias = dict[tuple[torch.device, torch.dtype], tuple[list[list[Any]], list[int]]]
"""Lists of tensors by device and dtype, with their places in the lists before."""


def ddp_of_sync_batch_norm() -> list[Replacement]:
    """Lets torch's DDP take a SyncBatchNorm on the CPU, which its constructor refuses by a private method."""
    return [Replacement(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda _: lambda *_: None)]


@contextmanager
def optimizers_as_on_gpu(is_on_host: Callable[[object], bool]) -> Iterator[None]:
    """Inside, optimizers and gradient clipping handle many parameters at once by default, as for tensors of a GPU.

    They also take `capturable=True`. torch asks private functions which devices and types of tensors can be handled so.
    Tensors of which `is_on_host` is true are handled apart.
    """

    # Wrapped: torch.distributed.optim compiles the callers by torch.jit as it is imported, from the originals' source.
    def chosen(choose: Callable[..., tuple[bool, bool]]) -> Callable[..., tuple[bool, bool]]:
        @functools.wraps(choose)
        def choice(params: list[Tensor], *args: bool, **kwargs: bool) -> tuple[bool, bool]:
            # As torch, unless all parameters are on a GPU.
            return (False, False) if any(map(is_on_host, params)) else choose(params, *args, **kwargs)

        return choice

    def grouped(group: Callable[..., _Groups]) -> Callable[..., _Groups]:
        @functools.wraps(group)
        def groups(lists: list[list[Any]], with_indices: bool = False) -> _Groups:
            devices = ["cpu" if is_on_host(each) else "cuda" for each in lists[0]]
            if len(set(devices)) < 2:
                return group(lists, with_indices)
            found = {}
            for device in dict.fromkeys(devices):
                kept = [i for i, each in enumerate(devices) if each == device]
                parts = group([[each[i] for i in kept] if each else each for each in lists], with_indices)
                for (_, dtype), (tensors, indices) in parts.items():
                    found[torch.device(device), dtype] = tensors, [kept[i] for i in indices]
            return found

        return groups

    optimizers: Any = importlib.import_module("torch.optim.optimizer")  # no attribute of its package
    clipping: Any = importlib.import_module("torch.nn.utils.clip_grad")
    # A list of each module: of optimizers, and of gradient clipping. DTensor appends to them as it is imported.
    modules: tuple[Any, ...] = optimizers, torch.utils._foreach_utils
    for module in modules:
        module._foreach_supported_types.append(FakeTensor)
    try:
        with replaced(
            [
                *(Replacement(each, "_get_foreach_kernels_supported_devices", _and_cpu) for each in modules),
                *(Replacement(each, "_group_tensors_by_device_and_dtype", grouped) for each in (optimizers, clipping)),
                *_in_optimizers("_get_capturable_supported_devices", _and_cpu),
                *_in_optimizers("_default_to_fused_or_foreach", chosen),
            ]
        ):
            yield
    finally:
        for module in modules:
            module._foreach_supported_types.remove(FakeTensor)


def _in_optimizers(name: str, make: Callable[[Any], Any]) -> list[Replacement]:
    """Returns the replacements of a function in the modules of optimizers, which import it by its name."""
    modules = [each for path, each in list(sys.modules.items()) if path.startswith("torch.optim.")]
    return [Replacement(each, name, make) for each in modules if name in vars(each)]


def _and_cpu(devices: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(devices)  # likewise
    def and_cpu(*args: Any, **kwargs: Any) -> list[str]:
        return [*devices(*args, **kwargs), "cpu"]

    return and_cpu


def clipping_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[Replacement]:
    """Lets torch compute the norm of gradients, and scale gradients by it, by wrappers of its own functions.

    `clip_grad_norm_` finds both by their private names. Programs may have imported it by its own name.
    """
    module, public = importlib.import_module("torch.nn.utils.clip_grad"), torch.nn.utils
    return [
        Replacement(module, "_get_total_norm", wrap),
        Replacement(public, "get_total_norm", wrap),
        Replacement(module, "_clip_grads_with_norm_", wrap),
        Replacement(public, "clip_grads_with_norm_", wrap),
    ]


def profilers_that_ask(begin: Callable[[], None], end: Callable[[], None]) -> list[Replacement]:
    """Lets every profiler of torch call `begin` before its session starts, and `end` after it has ended.

    `torch.profiler` starts the sessions of `torch.autograd.profiler` by a private method, for which there is no hook.
    """

    def preparing(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_trace(self: Any) -> Any:
            begin()
            return prepare(self)

        return prepare_trace

    def leaving(leave: Callable[..., Any]) -> Callable[..., Any]:
        def exit_session(self: Any, *error: Any) -> Any:
            try:
                return leave(self, *error)
            finally:
                if self.enabled:
                    end()

        return exit_session

    profiler = torch.autograd.profiler.profile
    return [Replacement(profiler, "_prepare_trace", preparing), Replacement(profiler, "__exit__", leaving)]
