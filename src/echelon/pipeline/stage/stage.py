"""Stage of a pipeline: a part of the model, with its state of each microbatch between forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from echelon._torch_private.autograd import run_backward
from echelon.errors import ScheduleError
from echelon.pipeline.stage.nested import Value, map_tensors, tensors_of
from echelon.pipeline.stage.replay import Autocast, BufferValues, HostRandomness, outside_autocast
from echelon.pipeline.stage.split_backward import (
    CannotSplit,
    Gradient,
    Root,
    SavedTensors,
    SplitBackward,
    edge_of,
    num_bytes,
    try_halves,
)

_NOTHING = nullcontext()


class _Entry(torch.autograd.Function):
    """Identity at which a value enters a stage, and its gradient leaves it.

    Its result is not a leaf, so a layer may write to it in place.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.gradient = None
        # Detached, not a view: autograd protects views of a leaf from writes as it protects the leaf. The version
        # counter is still shared, so changes of saved tensors are noticed. A function in Python takes 9 us; with
        # `clone` or `_unsafe_view` instead, a step took as long (benchmarks/pipeline).
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        ctx.gradient = gradient


class Entered(NamedTuple):
    """Value that has entered a stage, which may write to it in place."""

    value: Value
    edges: Sequence[GradientEdge]
    """Edges at which its gradients leave the stage, one for each tensor that requires a gradient."""


def enter(value: Value) -> Entered:
    """Returns the value with tensors that collect their gradients."""
    if isinstance(value, torch.Tensor):  # fast path: most stages have one input
        entered = _enter(value)
        return Entered(entered, [GradientEdge(entered.grad_fn, 0)] if entered.grad_fn is not None else ())
    whole = map_tensors(_enter, value)
    return Entered(whole, [edge_of(tensor) for tensor in tensors_of(whole) if tensor.requires_grad])


def copied(value: Value) -> Value:
    """Returns a copy of the value, for a stage that will run again with the original."""
    return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), value)


def _enter(tensor: torch.Tensor) -> torch.Tensor:
    entered: torch.Tensor = _Entry.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return entered


class Made(NamedTuple):
    """Result of a forward."""

    output: Value
    roots: list[torch.Tensor]
    """Tensors at which the backward will start, if they require a gradient: those of the output, or the loss."""


class Forward(NamedTuple):
    """Forward of a stage for one microbatch, to be run once, or again."""

    value: Value
    """Value from the stage before; the backward returns its gradient."""
    kwargs: Mapping[str, Value]
    target: Value
    """Target of the loss, for the last stage; else None."""
    make: Callable[[Value, Mapping[str, Value], Value], Made]
    """Called with the three fields above. The stage may write to them in place."""

    def run(self) -> Made:
        """Runs the forward. A backward returns no gradient of the value."""
        return self.make(self.value, self.kwargs, self.target)

    def on_copies(self) -> Forward:
        """Returns this forward with copied arguments, so that this one can be run again later."""
        kwargs = {name: copied(item) for name, item in self.kwargs.items()}
        return self._replace(value=copied(self.value), kwargs=kwargs, target=copied(self.target))


class Finding(NamedTuple):
    """Result of `Stage.probe`."""

    output: Value
    """Output of the stage; its tensors that require a gradient are leaves."""
    refusal: str = ""
    """Reason why the backward cannot be split, beginning with the name of the module. Empty if it can."""


class _Again(NamedTuple):
    """Forward that will be run again, with all else that its result depends on."""

    forward: Forward
    autocast: Autocast
    buffers: BufferValues
    randomness: HostRandomness


class _Microbatch:
    """State of one microbatch between forward and the end of backward."""

    entries: Sequence[GradientEdge] = ()
    roots: Sequence[GradientEdge] = ()
    saved: SavedTensors | None = None
    split: SplitBackward | None = None
    again: _Again | None = None

    def tensors(self) -> list[torch.Tensor]:
        return [
            *(() if self.again is None else [*tensors_of(self.again.forward.value), *self.again.buffers.tensors]),
            *(() if self.saved is None else self.saved.tensors()),
            *(() if self.split is None else self.split.kept),
        ]


class Stage:
    """Contiguous part of the model. Runs one microbatch at a time."""

    def __init__(self, index: int, module: nn.Module, prefix: str = "", *, spreads: bool = False) -> None:
        """Makes a stage.

        Args:
            index: position of the stage in the model.
            module: its part of the model.
            prefix: prefix of its parameters' names in the unsplit model.
            spreads: whether a tuple from the stage before becomes several positional arguments.
        """
        self.index = index
        self.module = module
        self.prefix = prefix
        self.recomputes = False
        """Whether only the input is kept from forward to backward, and the forward is run again."""
        self.is_metered = False
        """Whether `num_bytes` is available. Metering costs some microseconds per layer."""
        self._spreads = spreads
        self._releases = True
        """Whether I reads saved tensors that W does not need, so that releasing them in between saves memory."""
        self._has_warned = False
        self._held: dict[int, _Microbatch] = {}

    def __repr__(self) -> str:
        return f"<Stage {self.index}: {sum(p.numel() for p in self.module.parameters())} parameters>"

    @property
    def num_held(self) -> int:
        """Number of microbatches between forward and the end of backward."""
        return len(self._held)

    def num_bytes(self, microbatch: int, but: Collection[int] = ()) -> int:
        """Returns the bytes that the stage holds for a microbatch. Exact only while the stage is metered.

        Args:
            microbatch: its number.
            but: addresses of memory that is not counted: parameters, and the user's tensors.
        """
        held = self._held.get(microbatch)
        return 0 if held is None else num_bytes(held.tensors(), but)

    def call(self, value: Value, kwargs: Mapping[str, Value]) -> Value:
        """Calls the module with the inputs of the batch (a tuple), or with the output of the stage before."""
        if isinstance(value, tuple) and (self._spreads or self.index == 0):
            return self.module(*value, **kwargs)
        return self.module(value, **kwargs)

    def forward(self, microbatch: int, forward: Forward, *, splits: bool) -> Made:
        """Runs the forward, and keeps its state for the backward.

        Args:
            microbatch: its number.
            forward: runs `call`, and the loss after the last stage. It is run on copies if the stage recomputes.
            splits: whether the backward may be split.
        """
        held = self._held[microbatch] = _Microbatch()
        if not self.recomputes:
            return self._make(held, forward, splits)
        held.again = _Again(forward, Autocast.now(), BufferValues(self.module), HostRandomness())
        # The first run saves no tensors, since the backward goes through the graph of the second. It runs on copies,
        # because the stage may write to its input, which the second run needs as it was.
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, _was_not_kept):
            copies = forward.on_copies()
            made = copies.make(enter(copies.value).value, copies.kwargs, copies.target)
        held.again.buffers.forget_constants()
        return made

    def recompute(self, microbatch: int, *, splits: bool) -> None:
        """Runs the forward again, with the same random numbers, buffers and autocast setting.

        It begins with the buffers from before the first run. Afterwards they have their present values, so running
        statistics count a microbatch once.
        """
        held = self._held[microbatch]
        assert held.again is not None, "the forward comes before"
        forward, autocast, buffers, randomness = held.again
        with autocast.again(), buffers.again(), randomness.again():
            self._make(held, forward, splits)
        held.again = None

    def backward(self, microbatch: int, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Adds the parameters' gradients into .grad. Returns the gradients of the inputs that require one.

        Args:
            microbatch: a microbatch whose forward was run.
            gradients: the gradient of each root; None if nothing depends on it.

        Raises:
            ScheduleError: there are more or fewer gradients than roots, or all are None.
        """
        held = self._held.pop(microbatch)
        # Without roots (a frozen stage, whose input needs no gradient) there is nothing to compute.
        if roots := self._roots(held, microbatch, gradients):
            run_backward(roots, into_leaves=True)
        return [entry.node.gradient for entry in held.entries]  # type: ignore[attr-defined]

    def backward_input(self, microbatch: int, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Runs I: returns the gradients of the inputs, and keeps the state for `backward_weight`.

        Runs the whole backward, and leaves nothing to W, if the graph cannot be split: it is unlike the one that was
        probed, as after a parameter was unfrozen, or where a forward takes another branch. Warns of it once.

        Raises:
            ScheduleError: as for `backward`.
        """
        held = self._held[microbatch]
        roots, held.roots = self._roots(held, microbatch, gradients), ()
        try:
            held.split = SplitBackward(roots, held.entries)
        except CannotSplit as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"stage {self.index} does the whole backward of microbatch {microbatch} in its I, and maybe of "
                    f"others: {self._owners(error.weights)} {error.reason}, unlike in the first step",
                    stacklevel=2,
                )
            run_backward(roots, into_leaves=True)
            return [entry.node.gradient for entry in held.entries]  # type: ignore[attr-defined]
        return held.split.run_input(held.saved)

    def backward_weight(self, microbatch: int) -> None:
        """Runs W: adds the parameters' gradients into .grad."""
        held = self._held.pop(microbatch)
        if held.split is not None:  # else I did all of it
            held.split.run_weights()

    def probe(self, forward: Forward) -> Finding:
        """Runs forward, I and W of one microbatch, and reports whether the backward can be split.

        Gradients, buffers and the state of random generators are the same afterwards. The user's hooks see
        one run more.
        """
        held, self._releases = _Microbatch(), True
        randomness, buffers = HostRandomness().again(), BufferValues(self.module).again()
        with torch.random.fork_rng(devices=[]), randomness, buffers, torch.enable_grad():
            made = self._make(held, forward.on_copies(), splits=True)
            output = map_tensors(_leaf, made.output)
            roots = [Root(edge_of(tensor), torch.ones_like(tensor)) for tensor in made.roots if tensor.requires_grad]
            del made  # only `held` and the roots hold the graph now, as in a step
            assert held.saved is not None
            try:
                with outside_autocast():
                    self._releases = try_halves(SplitBackward(roots, held.entries), held.saved)
            except CannotSplit as error:
                return Finding(output, f"{self._owners(error.weights)} {error.reason}")
        return Finding(output)

    def _owners(self, weights: Sequence[Node]) -> str:
        """Returns the names of the modules that hold some weights, for the warning."""
        ids = {id(getattr(node, "variable", None)) for node in weights}
        names = [
            f"{f'{self.prefix}{name}'.rstrip('.')} ({type(module).__name__})".lstrip()
            for name, module in self.module.named_modules()
            if any(id(parameter) in ids for parameter in module.parameters(recurse=False))
        ]
        return " and ".join(names) or f"a module of its {type(self.module).__name__}"

    def forget(self) -> None:
        """Drops the state of all microbatches, after a step that failed."""
        self._held.clear()

    def _make(self, held: _Microbatch, forward: Forward, splits: bool) -> Made:
        # Hooks on saved tensors take 20 us per layer, a sixth of F, I and W of one small layer. So they are there only
        # to count bytes, or if I can release some.
        if self.is_metered or (splits and self._releases):
            held.saved = SavedTensors()
        value = forward.value
        if self.index > 0:  # the first stage's input is the user's: no gradient of it is returned
            value, held.entries = enter(value)
        with _NOTHING if held.saved is None else held.saved.saving():
            made = forward.make(value, forward.kwargs, forward.target)
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
                f"no gradient came back for the output of stage {self.index} for microbatch {microbatch}: stage "
                f"{self.index + 1} does not use it, or detaches it; if intended, freeze stages 0 to {self.index}"
            )
        return found


def _was_not_kept(_: None) -> torch.Tensor:
    raise ScheduleError("a backward came before its forward was run again: plan it with the stage in `recomputed`")


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
