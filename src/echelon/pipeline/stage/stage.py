"""One stage: a part of the model, and what it keeps of each microbatch between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from echelon._torch_private import run_backward
from echelon.errors import ScheduleError
from echelon.pipeline.stage.nested import Value, map_tensors, tensors_of
from echelon.pipeline.stage.replay import Autocast, same_buffers
from echelon.pipeline.stage.split_backward import (
    Gradient,
    Root,
    SavedTensors,
    SeparateUses,
    SplitBackward,
    edge_of,
    num_bytes,
)

# Where a value enters a stage, and its gradient leaves it.


class _Entry(torch.autograd.Function):
    """Does nothing, but what it returns is no leaf: a layer may write to it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.gradient = None
        # Not a view, which autograd would protect as it protects the leaf; what was saved of it is still watched.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        ctx.gradient = gradient


def enter(value: Value) -> Value:
    """Returns the same value for a stage, which may write to it."""
    return map_tensors(_enter, value)


def entries(value: Value) -> list[GradientEdge]:
    """Returns the places where the gradients of a value leave a stage, of those tensors that require one.

    Args:
        value: what `enter` returned, before the stage did anything to it.
    """
    return [edge_of(tensor) for tensor in tensors_of(value) if tensor.requires_grad]


def gradient_at(entry: GradientEdge) -> Gradient:
    """Returns what a backward brought to an entry; None if nothing depended on the tensor."""
    node: Any = entry.node
    gradient: Gradient = node.gradient
    return gradient


def copied(value: Value) -> Value:
    """Returns a copy, for a stage that will be run again with the value as it is now."""
    return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), value)


def _enter(tensor: torch.Tensor) -> Value:
    return _Entry.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]


class Made(NamedTuple):
    """What a forward made."""

    output: Value
    roots: list[torch.Tensor]
    """Where the backward will start: what of the output requires a gradient, or the loss."""


class Forward(NamedTuple):
    """The forward of a stage for one microbatch, to be run once, or again."""

    value: Value
    """What comes from the stage before; its gradient is what the backward returns."""
    kwargs: Mapping[str, Value]
    target: Value
    """What the loss takes, where that is."""
    make: Callable[[Value, Mapping[str, Value], Value], Made]
    """Is given the three above. The stage may write to them in place."""

    def run(self) -> Made:
        """Runs it, without a backward to follow."""
        return self.make(self.value, self.kwargs, self.target)

    def entered(self) -> Forward:
        """Returns the same with the value as it is inside of the stage."""
        return Forward(enter(self.value), self.kwargs, self.target, self.make)

    def on_copies(self) -> Forward:
        """Returns the same with copies, so that this one can be run another time."""
        kwargs = {name: copied(item) for name, item in self.kwargs.items()}
        return self._replace(value=copied(self.value), kwargs=kwargs, target=copied(self.target))


class Halves(NamedTuple):
    """How the backward of a stage is done in two halves, I and W; found out by `probe`."""

    reused: tuple[nn.Parameter, ...] = ()
    """The parameters that are used in several places, and get an edge in the graph for each."""
    frees: bool = True
    """Whether I uses saved tensors that W does not need, so that it pays to let go of them in between."""


class _Microbatch:
    """What is kept of one microbatch."""

    __slots__ = ("again", "entries", "roots", "saved", "split")

    def __init__(self) -> None:
        self.entries: list[GradientEdge] = []
        self.roots: list[GradientEdge] = []
        self.saved: SavedTensors | None = None
        self.split: SplitBackward | None = None
        self.again: tuple[Forward, Autocast] | None = None

    def tensors(self) -> list[torch.Tensor]:
        return [
            *(() if self.again is None else tensors_of(self.again[0].value)),
            *(() if self.saved is None else self.saved.tensors()),
            *(() if self.split is None else self.split.kept),
        ]


class Stage:
    """Runs one contiguous part of the model for one microbatch at a time."""

    def __init__(self, index: int, module: nn.Module, prefix: str = "", *, spreads: bool = False) -> None:
        """Makes a stage.

        Args:
            index: its place in the model.
            module: its part of the model.
            prefix: what the names of its parameters begin with in the unsplit model.
            spreads: whether a tuple from the stage before becomes several positional arguments.
        """
        self.index = index
        self.module = module
        self.prefix = prefix
        self.recomputes = False
        """Whether only the input is kept from forward to backward, and the forward is run again."""
        self.halves = Halves()
        self.is_metered = False
        """Whether `num_bytes` can be asked for. It costs some microseconds per layer."""
        self._spreads = spreads
        self._held: dict[int, _Microbatch] = {}

    def __repr__(self) -> str:
        return f"<Stage {self.index}: {sum(p.numel() for p in self.module.parameters())} parameters>"

    @property
    def num_held(self) -> int:
        """The number of microbatches between forward and the end of backward."""
        return len(self._held)

    def num_bytes(self, microbatch: int, but: Collection[int] = ()) -> int:
        """Returns the bytes of what is held of a microbatch between forward and backward, while the stage is metered.

        Args:
            microbatch: which one.
            but: addresses of memory that does not count: parameters, and what belongs to the user.
        """
        held = self._held.get(microbatch)
        return 0 if held is None else num_bytes(held.tensors(), but)

    def call(self, value: Value, kwargs: Mapping[str, Value]) -> Value:
        """Returns what the module makes of the batch's inputs (a tuple), or of what the stage before returned."""
        if isinstance(value, tuple) and (self._spreads or self.index == 0):
            return self.module(*value, **kwargs)
        return self.module(value, **kwargs)

    def forward(self, microbatch: int, forward: Forward, *, splits: bool) -> Made:
        """Runs the forward, and keeps what the backward needs.

        Args:
            microbatch: its number.
            forward: runs `call`, and the loss where that is; on copies, if the stage recomputes.
            splits: whether the backward may be done in two halves.
        """
        held = self._held[microbatch] = _Microbatch()
        if not self.recomputes:
            return self._make(held, forward, splits)
        held.again = forward, Autocast.now()
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, _was_not_kept):
            return forward.on_copies().entered().run()

    def recompute(self, microbatch: int, *, splits: bool) -> None:
        """Runs the forward again, as it was: with the same random numbers, which belong to the microbatch.

        Buffers stay as the first run left them: running statistics count a microbatch once.
        """
        held = self._held[microbatch]
        assert held.again is not None, "the forward comes before"
        forward, autocast = held.again
        with autocast.again(), same_buffers(self.module):
            self._make(held, forward, splits)
        held.again = None

    def backward(self, microbatch: int, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Adds into the parameters' .grad, and returns the gradients of the inputs that require one.

        Args:
            microbatch: which of those that forward was called for.
            gradients: for each root its gradient; None where nothing depends on it.

        Raises:
            ScheduleError: there are more or fewer gradients than roots, or all are missing.
        """
        held = self._held.pop(microbatch)
        if roots := self._roots(held, microbatch, gradients):
            run_backward(roots, into_leaves=True)
        return [gradient_at(entry) for entry in held.entries]

    def backward_input(self, microbatch: int, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Returns the gradients of the inputs, and keeps what `backward_weight` needs.

        Raises:
            ScheduleError: as `backward`.
            CannotSplit: the graph is unlike the one that was probed.
        """
        held = self._held[microbatch]
        split = SplitBackward(self._roots(held, microbatch, gradients), held.entries)
        held.split, held.roots = split, []
        if held.saved is None:
            return split.run_input()
        with held.saved.dropping():
            return split.run_input(held.saved)

    def backward_weight(self, microbatch: int) -> None:
        """Adds into the parameters' .grad."""
        held = self._held.pop(microbatch)
        assert held.split is not None, "I comes before W"
        held.split.run_weights()

    def forget(self) -> None:
        """Drops all that is held, after a step that failed."""
        self._held.clear()

    def _make(self, held: _Microbatch, forward: Forward, splits: bool) -> Made:
        if self.is_metered or (splits and self.halves.frees):
            held.saved = SavedTensors()
        separate = SeparateUses(self.halves.reused) if splits and self.halves.reused else nullcontext()
        if self.index > 0:  # what the first one gets is the user's
            forward = forward.entered()
            held.entries = entries(forward.value)
        with nullcontext() if held.saved is None else held.saved.saving(), separate:
            made = forward.run()
        held.roots = [edge_of(tensor) for tensor in made.roots if tensor.requires_grad]
        return made

    def _roots(self, held: _Microbatch, microbatch: int, gradients: Sequence[Gradient]) -> list[Root]:
        if len(gradients) != len(held.roots):
            raise ScheduleError(
                f"stage {self.index} has {len(held.roots)} outputs that require a gradient for microbatch "
                f"{microbatch}, but {len(gradients)} gradients came back"
            )
        found = [Root(edge, value) for edge, value in zip(held.roots, gradients, strict=True) if value is not None]
        if gradients and not found:
            raise ScheduleError(
                f"no gradient came back for what stage {self.index} returned for microbatch {microbatch}: stage "
                f"{self.index + 1} does not use it, or detaches it; if that is meant, freeze stages 0 to {self.index}"
            )
        return found


def _was_not_kept(_: None) -> torch.Tensor:
    raise ScheduleError("a backward came before its forward was run again: plan it with the stage in `recomputed`")
