"""Private interfaces of torch about modules, optimizers, the compiler and the profiler."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.nn.parallel import DistributedDataParallel

from echelon._torch_private.tensors import FakeTensor
from echelon._torch_versions import COMPILED_NAMES, FLEX_NAMES, FSDP1_NAMES, missing

F = TypeVar("F", bound=Callable[..., Any])

COMPILED, RECOMPUTED = "_orig_mod", "_checkpoint_wrapped_module"
"""Attributes in which the wrappers of torch.compile and of activation checkpointing hold their module. In the names of
parameters and buffers they are left out: a checkpoint has the names of the plain model."""


def never_compiled(function: F) -> F:
    """Decorator of a function that torch.compile does not compile, nor any function that it calls.

    `torch.compiler.disable` does the same in each call, and imports torch's compiler, which takes a second.
    """
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, strategy)
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


@contextmanager
def precisions_set_by(wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> Iterator[None]:
    """Inside, torch sets a precision of float32 by a wrapper of its own function of backend, operation and value."""
    native: Any = torch._C
    original = native._set_fp32_precision_setter
    native._set_fp32_precision_setter = wrap(original)
    try:
        yield
    finally:
        native._set_fp32_precision_setter = original


@contextmanager
def devices_as_on_gpu() -> Iterator[None]:
    """Inside, torch finds an accelerator, "cuda", and FSDP1 computes on the CPU in its place.

    Both are found by private functions. FSDP1 compares the device that it has found with that of its tensors, and
    refuses tensors of the CPU where it would broadcast them.
    """
    find_accelerator = torch._C._get_accelerator
    torch._C._get_accelerator = lambda *_: torch.device("cuda")
    try:
        with _fsdp1_on_cpu():
            yield
    finally:
        torch._C._get_accelerator = find_accelerator


@contextmanager
def _fsdp1_on_cpu() -> Iterator[None]:
    if missing(FSDP1_NAMES):
        yield
        return
    init: Any = importlib.import_module("torch.distributed.fsdp._init_utils")
    find, check = init._get_compute_device, init._check_module_states_for_sync_module_states

    def compute_device(*args: Any, **kwargs: Any) -> torch.device:
        device: torch.device = find(*args, **kwargs)
        return torch.device("cpu") if device.type == "cuda" else device

    init._get_compute_device = compute_device
    init._check_module_states_for_sync_module_states = lambda _: None
    try:
        yield
    finally:
        init._get_compute_device, init._check_module_states_for_sync_module_states = find, check


@contextmanager
def offloaded_parameters_by(
    gather: Callable[[Callable[..., bool]], Callable[..., bool]],
    begin: Callable[[Callable[..., None]], Callable[..., None]],
) -> Iterator[None]:
    """Inside, FSDP1 prepares a flat parameter by wrappers of its private methods, which compare devices of tensors.

    Args:
        gather: wraps the method before the parameter is gathered, which moves an offloaded one to the GPU.
        begin: wraps the method before the backward pass, which drops a gradient on the host.
    """
    if missing(FSDP1_NAMES):
        yield
        return
    handle: Any = importlib.import_module("torch.distributed.fsdp._flat_param").FlatParamHandle
    before_gathering, before_backward = handle.pre_unshard, handle.prepare_gradient_for_backward
    handle.pre_unshard, handle.prepare_gradient_for_backward = gather(before_gathering), begin(before_backward)
    try:
        yield
    finally:
        handle.pre_unshard, handle.prepare_gradient_for_backward = before_gathering, before_backward


def move_to_gpu(handle: Any) -> bool:
    """Moves the flat parameter of a handle of FSDP1 from the host to the GPU. Returns False if it need not be moved."""
    # In 16 bits a copy in that type is on the GPU already.
    if handle._uses_param_mixed_precision and not handle._force_full_precision:
        return False
    handle.flat_param_to(torch.device("cuda"), non_blocking=True)
    return True


@contextmanager
def compiled_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, a function that was compiled before calls a wrapper of its choice of a compiler.

    The wrapper gets the compiler, None or False where nothing is compiled. It returns the compiler to use; None runs
    the function as it is.
    """
    if missing(COMPILED_NAMES):
        yield
        return
    frames: Any = importlib.import_module("torch._dynamo.eval_frame")
    original = frames._callback_from_stance
    frames._callback_from_stance = wrap(original)
    try:
        yield
    finally:
        frames._callback_from_stance = original


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


@contextmanager
def flex_attention_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, `flex_attention` computes by a wrapper of its operator, by whichever name a program has imported it.

    The wrapper gets query, key, value, the modification of scores, the parts of the block mask and the scale. The last
    part of the mask is its function. It returns the output, the logarithms of sums and the largest scores.
    """
    if missing(FLEX_NAMES):
        yield
        return
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    operator, check, is_debugged = (
        flex.flex_attention_hop,
        flex._validate_device,
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG,
    )
    flex.flex_attention_hop, flex._validate_device = wrap(operator), lambda *_: None
    # Otherwise it compiles the operator.
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        flex.flex_attention_hop, flex._validate_device = operator, check
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = is_debugged


@contextmanager
def ddp_of_sync_batch_norm() -> Iterator[None]:
    """Inside, torch's DDP takes a SyncBatchNorm on the CPU, which its constructor refuses by a private method."""
    original = DistributedDataParallel._passing_sync_batchnorm_handle
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel._passing_sync_batchnorm_handle = original  # type: ignore[method-assign]


@contextmanager
def optimizers_as_on_gpu() -> Iterator[None]:
    """Inside, optimizers and gradient clipping handle many parameters at once by default, as for tensors of a GPU.

    torch asks private functions which devices and types of tensors can be handled so.
    """
    name = "_get_foreach_kernels_supported_devices"
    optimizers: Any = importlib.import_module("torch.optim.optimizer")  # no attribute of its package
    original = optimizers._get_foreach_kernels_supported_devices
    # A list of each module: of optimizers, and of gradient clipping.
    modules: tuple[Any, ...] = optimizers, torch.utils._foreach_utils
    for module in modules:
        setattr(module, name, lambda: [*original(), "cpu"])
        module._foreach_supported_types.append(FakeTensor)
    try:
        yield
    finally:
        for module in modules:
            module._foreach_supported_types.remove(FakeTensor)
            setattr(module, name, original)


@contextmanager
def clipping_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, torch computes the norm of gradients, and scales gradients by it, by wrappers of its own functions.

    `clip_grad_norm_` finds both by their private names. Programs may have imported it by its own name.
    """
    module: Any = importlib.import_module("torch.nn.utils.clip_grad")
    public: Any = torch.nn.utils
    norm, scale = module._get_total_norm, module._clip_grads_with_norm_
    module._get_total_norm = public.get_total_norm = wrap(norm)
    module._clip_grads_with_norm_ = public.clip_grads_with_norm_ = wrap(scale)
    try:
        yield
    finally:
        module._get_total_norm = public.get_total_norm = norm
        module._clip_grads_with_norm_ = public.clip_grads_with_norm_ = scale


@contextmanager
def profilers_that_ask(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Inside, every profiler of torch calls `begin` before its session starts, and `end` after it has ended.

    `torch.profiler` starts the sessions of `torch.autograd.profiler` by a private method, for which there is no hook.
    """
    profiler: Any = torch.autograd.profiler.profile
    prepare, leave = profiler._prepare_trace, profiler.__exit__

    def prepare_trace(self: Any) -> Any:
        begin()
        return prepare(self)

    def exit_session(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            if self.enabled:
                end()

    profiler._prepare_trace, profiler.__exit__ = prepare_trace, exit_session
    try:
        yield
    finally:
        profiler._prepare_trace, profiler.__exit__ = prepare, leave
