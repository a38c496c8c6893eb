"""Tells a data-parallel wrapper of each forward of its module, and of each backward through what that returned.

Hooks on the module, so it does not matter whether the wrapper or the module was called. They hold the wrapper weakly,
and a copy of the module, or one that was saved and loaded, tells nobody.

A forward in training is to be followed by a backward, so it counts when it has ended well: one that failed may be tried
again. One in evaluation counts when a backward comes to what it returned, if ever.
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

# Lets ranks with fewer batches take part in what the others still do.
#
# Strategy. While ranks join, each tells all others what it does next, before each forward and each reduction, in one
# round of one byte. Who has no batches left says so and does the same as the others, with gradients that count as
# none.


class Next(IntEnum):
    """What a rank does next."""

    NOTHING = 0
    FORWARD = 1
    REDUCTION = 2


class Joining:
    """Whether the ranks join at present, and which of them still have batches."""

    def __init__(self, group: ProcessGroup) -> None:
        """Takes the group in which ranks tell each other what they do next."""
        self._group = group
        self._is_on = False
        self.last_active = 0
        """The first of the ranks that had batches last."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Ranks may leave the with block early, if they take part in `others` before."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def others(self) -> Iterator[tuple[Next, int]]:
        """Yields what the other ranks do next, with the first of them, until none has batches."""
        while (src := first_active(steps := self.announce(Next.NOTHING))) is not None:
            yield steps[src], src

    def announce(self, mine: Next) -> list[Next]:
        """Tells the other ranks what is next, if ranks may leave early; returns what each does, else nothing.

        Raises:
            CollectiveMismatch: on every rank, if two that still have batches do different things.
        """
        if not self._is_on:
            return []
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
    """Who is told."""

    def before_forward(self) -> None:
        """A forward that records a graph begins."""

    def on_forward(self, num_samples: int) -> None:
        """A forward of as many samples counts. Called after it, or in a backward pass."""

    def on_backward(self) -> None:
        """A backward pass has come to what a forward returned. Called inside that pass, maybe several times."""


def watch_forwards(module: nn.Module, listener: Listener) -> list[RemovableHandle]:
    """Has `listener` told, as long as it lives, of the forwards of `module` that record a graph."""
    hook = _Hook(weakref.ref(listener))
    return [
        module.register_forward_pre_hook(hook.before),
        module.register_forward_hook(hook.after, with_kwargs=True),
    ]


class _Hook:
    def __init__(self, listener: weakref.ref[Listener] | None) -> None:
        self._listener = listener

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
    """One forward, known to what it returned."""

    def __init__(self, listener: Listener, num_samples: int) -> None:
        self._listener = weakref.ref(listener)
        self._num_samples = num_samples
        self._has_counted = False

    def count(self) -> None:
        listener = self._listener()
        if listener and not self._has_counted:
            self._has_counted = True
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
