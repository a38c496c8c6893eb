"""Parameter hooks that report gradients and optimizer steps to a data-parallel wrapper.

The hooks are on the parameters, so it does not matter how the module was called. They hold the wrapper weakly. An
optimizer is recognised by its parameters' hooks, so it may be made before or after the wrapper. A step compiled by
torch.compile calls no hook; it counts in a tensor that is an attribute of the parameters.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from echelon._torch_private import hooks_after_gradient
from echelon.errors import UnsupportedOp

_COMPILED_STEPS = "_echelon_compiled_steps"
"""Attribute of a parameter that holds its listener's `compiled_steps`."""


class Listener(Protocol):
    """Receiver of the reports: the wrapper. `index` is the parameter's number."""

    @property
    def compiled_steps(self) -> torch.Tensor:
        """Counter to which compiled code adds 1 for each step of an optimizer that has some of the parameters."""

    def before_gradient(self, index: int) -> None:
        """A gradient is complete. Autograd adds it to .grad next, unless it is for torch.autograd.grad."""

    def on_gradient(self, index: int) -> None:
        """A gradient has been added to .grad."""

    def on_step(self) -> None:
        """An optimizer that has some of the parameters has made a step."""

    def give_up(self) -> bool:
        """Releases the parameters for another wrapper if this one has failed. True if it did."""


def watch_gradients(
    parameters: Sequence[torch.nn.Parameter], listener: Listener, before: bool
) -> list[RemovableHandle]:
    """Reports the gradients of `parameters` to `listener`, as long as it lives.

    Args:
        parameters: watched parameters; their positions are the `index` of the reports.
        listener: receiver of the reports, held weakly.
        before: whether to call `before_gradient` as well, which takes a second hook per parameter.

    Returns:
        The handles that remove the hooks.
    """
    _watch_optimizers()
    handles = []
    for index, parameter in enumerate(parameters):
        hook = _Hook(listener, index)
        handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        # Not for GPU parameters: a CPU tensor among them would cost the compiled step its CUDA graph.
        if parameter.device.type == "cpu":
            setattr(parameter, _COMPILED_STEPS, listener.compiled_steps)
        if before:
            handles.append(parameter.register_hook(hook.before))  # type: ignore[no-untyped-call]
    return handles


def take_over(named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Takes these parameters from wrappers that have failed.

    Raises:
        UnsupportedOp: a wrapper that has not failed has one of them. Each would read gradients that the other reduces.
    """
    for name, parameter in named:
        for hook in hooks_after_gradient(parameter):
            if isinstance(hook, _Hook) and (listener := hook.listener()) and not listener.give_up():
                raise UnsupportedOp(
                    f"the gradient of parameter {name!r} is reduced by another DistributedDataParallel already: wrap "
                    "each module once, or del the other wrapper first"
                )


# Cached: one hook for all optimizers of the process, registered once. It finds the wrappers through the parameters.
@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        _count_compiled_step(optimizer)
        return
    parameters = (parameter for each in optimizer.param_groups for parameter in each["params"])
    hooks = (hook for parameter in parameters for hook in hooks_after_gradient(parameter) if isinstance(hook, _Hook))
    told = {id(listener): listener for hook in hooks if (listener := hook.listener())}
    for listener in told.values():
        listener.on_step()


def _count_compiled_step(optimizer: torch.optim.Optimizer) -> None:
    # torch.compile traces this function into the step, so it may only use tensors and plain Python: calling a listener
    # would break fullgraph=True.
    counts: list[torch.Tensor] = []
    for each in optimizer.param_groups:
        for parameter in each["params"]:
            count = getattr(parameter, _COMPILED_STEPS, None)
            if count is not None and not any(count is other for other in counts):
                counts.append(count)
    for count in counts:
        count.add_(1)


class _Hook:
    def __init__(self, listener: Listener, index: int) -> None:
        self.listener = weakref.ref(listener)
        self._index = index

    def before(self, _: torch.Tensor) -> None:
        if listener := self.listener():
            listener.before_gradient(self._index)

    def __call__(self, _: torch.Tensor) -> None:
        if listener := self.listener():
            listener.on_gradient(self._index)
