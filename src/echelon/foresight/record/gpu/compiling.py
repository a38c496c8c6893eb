"""torch.compile and torch.export in a recorded program.

Compiled code runs as it is, and its kernels are marked: the compiler itself would need values and kernels.
`echelon.foresight.play.fusion` joins the marked kernels. Code that `torch.jit` traces or freezes runs as it is, too,
and its kernels are not joined. Code that it scripts is interpreted by torch itself.

A model is exported outside of the recording, as when a pipeline traces it. Export has fake tensors and modes of its
own, whose sizes are symbols. A recording would count its operations as the program's, and does not know symbols as
sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from echelon._torch_private.modules import COMPILED, compiled_by
from echelon._torch_private.tensors import FakeTensor, tree_map, without_modes
from echelon.foresight.record.gpu.device import mapped
from echelon.foresight.record.here import Recording, in_place_of, in_ranks, recording_here
from echelon.foresight.record.writer import nothing, skip
from echelon.replacements import Replacement

_ASSUMPTION = "torch.compile was taken as fused runs of elementwise kernels"


_OF_JIT = ("trace", "freeze", "optimize_for_inference")
"""Functions of torch.jit that read values of tensors."""
_SCRIPTS: tuple[type, ...] = (torch.jit.ScriptModule, torch.jit.ScriptFunction)


def not_compiled() -> list[Replacement]:
    """Lets recorded ranks compile nothing, which their assumptions say, and export outside of their recording."""
    return [
        Replacement(torch, "compile", in_ranks(_compile)),
        Replacement(torch.nn.Module, "compile", in_ranks(_compile_itself)),
        *(Replacement(torch.jit, name, in_ranks(_as_it_is)) for name in _OF_JIT),
        *compiled_by(in_ranks(_run_uncompiled)),
        Replacement(torch.export, "export", in_ranks(_export)),
    ]


def _compile(recording: Recording, _: Callable[..., Any], model: Any = None, **__: Any) -> Any:
    recording.log.assume(_ASSUMPTION)
    return _marked if model is None else _marked(model)


def _as_it_is(recording: Recording, original: Callable[..., Any], code: Any, *_: Any, **__: Any) -> Any:
    """Returns code that does the same, and has the method `save` of traced code."""
    recording.log.assume(f"torch.jit.{original.__name__} was taken as the code itself")
    if "save" in getattr(code, "__dict__", ()) or isinstance(code, _SCRIPTS):  # traced before
        return code
    save = in_place_of(torch.jit.save, functools.partial(skip, "torch.jit.save", nothing))
    if isinstance(code, torch.nn.Module):
        # Another object with the same attributes: the program's own module has no such method.
        traced: torch.nn.Module = object.__new__(type(code))
        vars(traced).update(vars(code), save=functools.partial(save, traced))
        return traced

    @functools.wraps(code)
    def function(*args: Any, **kwargs: Any) -> Any:
        return code(*args, **kwargs)

    function.save = functools.partial(save, function)  # type: ignore[attr-defined]
    return function


def _compile_itself(recording: Recording, _: Callable[..., Any], module: torch.nn.Module, *__: Any, **___: Any) -> None:
    recording.log.assume(_ASSUMPTION)
    recording.log.compiled.add(module)


def _run_uncompiled(recording: Recording, _: Callable[..., Any], compiler: object) -> None:
    """Lets a function run as it is that was compiled before the recording, such as one of an imported module."""
    if compiler:
        recording.log.assume("a function that was compiled earlier counts as not compiled")


def _marked(model: Any) -> Any:
    """Returns the same module, or a function that does the same. Their kernels are marked."""
    recording = recording_here()
    if isinstance(model, torch.nn.Module) and recording is not None:
        recording.log.compiled.add(model)
        # Programs take the plain module out of the compiled one, as to save it.
        plain: torch.nn.Module = object.__new__(type(model))
        vars(plain).update(vars(model))
        vars(model)[COMPILED] = plain
        return model

    return in_place_of(model, _run_compiled)


def _run_compiled(recording: Recording, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with recording.log.compiling():
        return function(*args, **kwargs)


def _export(
    recording: Recording,
    export: Callable[..., Any],
    model: torch.nn.Module,
    args: Any,
    kwargs: Any = None,
    **options: Any,
) -> Any:
    with without_modes():
        args, kwargs = tree_map(_real, (args, kwargs))
        with nullcontext() if recording.placement is None else _OnCpu():
            return export(model, args, kwargs, **options)


def _real(leaf: object) -> object:
    """Returns zeros for a fake tensor: export takes no fake ones of another mode as inputs, and reads no values."""
    return torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, FakeTensor) else leaf


class _OnCpu(TorchFunctionMode):
    """Maps devices of CUDA to the CPU, on which all tensors of an export are. `OnDevice` does more, for a recording."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _MOVES:
            return args[0]
        kwargs = {key: mapped(value) for key, value in (kwargs or {}).items()}
        return func(*map(mapped, args), **kwargs)


_MOVES = frozenset({"cuda", "pin_memory"})
"""Methods that return the tensor itself: here a device has no meaning."""
