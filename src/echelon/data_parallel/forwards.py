"""Tells a data-parallel wrapper of each forward of its module, and of each backward through what that returned.

Hooks on the module, so it does not matter whether the wrapper or the module was called. They hold the wrapper weakly,
and a copy of the module, or one that was saved and loaded, tells nobody.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Listener(Protocol):
    """Who is told."""

    def on_forward(self, num_samples: int) -> None:
        """A forward that records a graph has begun, of as many samples."""

    def on_backward(self) -> None:
        """A backward pass has come to what a forward returned. Called inside that pass, maybe several times."""


def watch_forwards(module: nn.Module, listener: Listener) -> list[RemovableHandle]:
    """Has `listener` told, as long as it lives, of the training forwards of `module`."""
    hook = _Hook(weakref.ref(listener))
    return [
        module.register_forward_pre_hook(hook.before, with_kwargs=True),
        module.register_forward_hook(hook.after),
    ]


class _Hook:
    def __init__(self, listener: weakref.ref[Listener] | None) -> None:
        self._listener = listener

    def __reduce__(self) -> tuple[type[_Hook], tuple[None]]:
        return _Hook, (None,)

    def _told(self, module: nn.Module) -> Listener | None:
        if self._listener is None or not module.training or not torch.is_grad_enabled():
            return None
        return self._listener()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if listener := self._told(module):
            first = next(_tensors_of([*args, *kwargs.values()]), None)
            listener.on_forward(len(first) if first is not None and first.dim() else 0)

    def after(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._told(module):
            for tensor in _tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, _: Tensor) -> None:
        listener = self._listener and self._listener()
        if listener:
            listener.on_backward()


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_of(item)
