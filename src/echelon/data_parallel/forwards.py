"""Module hooks that report forwards and backwards to a data-parallel wrapper, and `join` for uneven batches.

The hooks are on the module, so it does not matter whether the wrapper or the module was called. They hold the wrapper
weakly. The hooks of a copied, or saved and loaded, module report to nobody.

A forward in training needs a backward, so it counts as soon as it has ended well: one that failed may be retried. A
forward in evaluation counts when a backward reaches its output, if ever.

Strategy of `Joining`. While ranks join, each announces its next step to all others before each forward and each
reduction, in one all_gather of one byte. A rank without batches announces NOTHING and takes part in the others' steps,
with gradients that count as none. It ends when all announce NOTHING.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from echelon.errors import CollectiveMismatch
from echelon.group.group import ProcessGroup


class Next(IntEnum):
    """Next step of a rank, as announced to the others. NOTHING: it has no batches left."""

    NOTHING = 0
    FORWARD = 1
    REDUCTION = 2


class Joining:
    """State of `join`: whether it is on, and which ranks still have batches."""

    def __init__(self, group: ProcessGroup) -> None:
        """Takes the group in which ranks announce their next steps."""
        self._group = group
        self._is_on = False
        self.last_active = 0
        """Lowest rank that had a batch in the latest step with any."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, `announce` exchanges steps. A rank without batches must iterate over `others` before it leaves."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def others(self) -> Iterator[tuple[Next, int]]:
        """Yields the next step of the ranks with batches, and the lowest such rank. Ends when none has batches."""
        while (src := first_active(steps := self.announce(Next.NOTHING))) is not None:
            yield steps[src], src

    def announce(self, mine: Next) -> list[Next]:
        """Announces this rank's next step and returns the step of each rank. Blocks. Empty, at once, outside `on`.

        Raises:
            CollectiveMismatch: on every rank, if two that still have batches do different things.
        """
        if not self._is_on:
            return []
        # device="cpu": torch.set_default_device may name another.
        told = self._group.all_gather(torch.tensor([mine], dtype=torch.uint8, device="cpu"))
        steps = [Next(step) for step in told.tolist()]
        if {Next.FORWARD, Next.REDUCTION} <= set(steps):
            pairs = zip(self._group.ranks, steps, strict=True)
            listed = ", ".join(f"rank {rank} {step.name.lower()}" for rank, step in pairs)
            raise CollectiveMismatch(
                f"ranks that join do different things next ({listed}): run as many forwards for each backward on all "
                "ranks"
            )
        active = first_active(steps)
        self.last_active = self.last_active if active is None else active
        return steps


def first_active(steps: Sequence[Next]) -> int | None:
    """Returns the first rank that still has batches; None if there is none."""
    return next((rank for rank, step in enumerate(steps) if step != Next.NOTHING), None)


class Listener(Protocol):
    """Receiver of the reports: the wrapper."""

    def before_forward(self) -> None:
        """A forward that records a graph begins."""

    def on_forward(self, num_samples: int) -> None:
        """A forward of `num_samples` samples counts. Called after it, or in a backward pass."""

    def on_backward(self) -> None:
        """A backward pass has reached the output of a forward. Called inside that pass, maybe several times."""


def watch_forwards(module: nn.Module, listener: Listener) -> list[RemovableHandle]:
    """Reports the forwards of `module` that record a graph to `listener`, as long as it lives."""
    hook = _Hook(weakref.ref(listener))
    return [
        module.register_forward_pre_hook(hook.before),
        module.register_forward_hook(hook.after, with_kwargs=True),
    ]


class _Hook:
    def __init__(self, listener: weakref.ref[Listener] | None) -> None:
        self._listener = listener

    # A weak reference cannot be pickled, and the module with its hooks must be: deepcopy and torch.save go this way.
    def __reduce__(self) -> tuple[type[_Hook], tuple[None]]:
        return _Hook, (None,)

    def _told(self) -> Listener | None:
        return self._listener() if self._listener is not None and torch.is_grad_enabled() else None

    def before(self, _: nn.Module, __: tuple[Any, ...]) -> None:
        if listener := self._told():
            listener.before_forward()

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        listener = self._told()
        if listener is None:
            return
        first = next(_tensors_of([*args, *kwargs.values()]), None)
        passed = _Forward(listener, len(first) if first is not None and first.dim() else 0)
        if module.training:
            passed.count()
        for tensor in _tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(passed.on_gradient)  # type: ignore[no-untyped-call]


class _Forward:
    """One forward. The hooks on its output tensors refer to it."""

    def __init__(self, listener: Listener, num_samples: int) -> None:
        self._listener = weakref.ref(listener)
        self._num_samples = num_samples
        self._has_counted = False

    def count(self) -> None:
        listener = self._listener()
        if listener and not self._has_counted:
            self._has_counted = True  # a forward counts once, however many outputs and backwards it has
            listener.on_forward(self._num_samples)

    def on_gradient(self, _: Tensor) -> None:
        self.count()
        if listener := self._listener():
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
