"""Trial of a stage's split backward: runs I and W once, and detects work that both would do."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from echelon._torch_private import DispatchMode, version_of
from echelon.pipeline.stage.nested import Value, map_tensors
from echelon.pipeline.stage.replay import outside_autocast, same_buffers
from echelon.pipeline.stage.split_backward import (
    CannotSplit,
    Group,
    Root,
    SavedTensors,
    SeparateUses,
    SplitBackward,
    edge_of,
    num_bytes,
)
from echelon.pipeline.stage.stage import Forward, Halves, Stage, entries

_CHEAP = ("_prelu_kernel_backward",)
"""Pointwise operators without torch's tag for them."""


class Repeated(NamedTuple):
    """Operation that was done before, with the label at the time of its repetition."""

    name: str
    label: object


class RepeatedWork(DispatchMode):  # type: ignore[no-untyped-call]
    """Detector of repeated work: operations on the same values in two parts of a program.

    It sees all operations of this thread, in backward too. Every tensor gets a number for its origin: the operation,
    and the numbers of its inputs. Two operations are the same work if their names and input numbers are equal. Views
    cost nothing, and pointwise operations little beside a matrix product: they may be repeated.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Repeated] = []
        """Operations that repeat work of an earlier part."""
        self.label: object = None
        """Label of the operations that run now, for `found`."""
        self._earlier: set[Hashable] = set()
        self._now: set[Hashable] = set()
        self._numbers: dict[Hashable, int] = {}
        # Every tensor is kept until the end: a tensor is recognised by its address, which must not be used again.
        self._alive: list[torch.Tensor] = []

    def next_part(self) -> None:
        """Begins the next part of the program."""
        self._earlier |= self._now
        self._now = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        work = (str(func), self._describe(args), self._describe(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_cheap = func.is_view or torch.Tag.pointwise in func.tags or name in _CHEAP
        if not is_cheap and any(True for _ in _tensors(args)):
            if work in self._earlier:
                self.found.append(Repeated(name, self.label))
            self._now.add(work)
        for index, tensor in enumerate(_tensors(result)):
            self._alive.append(tensor)
            self._numbers.setdefault(_place(tensor), self._number((work, index)))
        return result

    def _describe(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            self._alive.append(value)
            place = _place(value)
            return ("tensor", self._numbers.setdefault(place, self._number(place)))
        if isinstance(value, list | tuple):
            return tuple(self._describe(item) for item in value)
        if isinstance(value, dict):
            return tuple((name, self._describe(item)) for name, item in value.items())
        return str(value)

    def _number(self, what: Hashable) -> int:
        return self._numbers.setdefault(("number", what), len(self._numbers))


def _place(tensor: torch.Tensor) -> Hashable:
    """Returns the identity of a tensor and its content, which several Python objects may share."""
    return (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, version_of(tensor))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


class Finding(NamedTuple):
    """Result of a probe."""

    output: Value
    """Output of the stage; its tensors that require a gradient are leaves."""
    halves: Halves | None
    """Settings of the split backward; None if the backward cannot be split."""
    reason: str = ""
    """Reason why it cannot be split, beginning with the name of the module."""


def probe(stage: Stage, forward: Forward) -> Finding:
    """Runs forward, I and W of one microbatch, and reports whether the backward can be split.

    Gradients, buffers and the state of random generators are the same afterwards. The user's hooks see one run more.
    """
    with _without_trace(stage.module), torch.enable_grad():
        output = map_tensors(_leaf, forward.on_copies().entered().run().output)
        try:
            return Finding(output, _try(stage, forward, ()))
        except CannotSplit as error:
            # Second try: weights that are used in several places get an edge in the graph for each use.
            reused = _parameters_of(error.weights)
        try:
            return Finding(output, _try(stage, forward, reused))
        except CannotSplit as error:
            return Finding(output, None, f"{_owners(stage, error.weights)} {error.reason}")


def _try(stage: Stage, forward: Forward, reused: tuple[nn.Parameter, ...]) -> Halves:
    """Runs both halves once.

    Raises:
        CannotSplit: an operation ran in both halves, or refused to run in halves.
    """
    saved, watch = SavedTensors(), RepeatedWork()
    forward = forward.on_copies().entered()
    ends = entries(forward.value) if stage.index > 0 else []
    with saved.saving(), SeparateUses(reused):
        roots = forward.run().roots
    split = SplitBackward([Root(edge_of(tensor), torch.ones_like(tensor)) for tensor in roots], ends)
    _refuse_custom_formulas(split.groups)
    del roots  # only `split` holds the graph now, as in a step
    before = num_bytes(saved.tensors())
    try:
        # Outside of autocast, as the halves are run in a step.
        with outside_autocast(), watch, saved.dropping():
            split.run_input(saved)
        frees = num_bytes(saved.tensors()) < before
        watch.next_part()
        with outside_autocast(), watch:
            # Not into .grad: a trial adds no gradients.
            split.run_weights(lambda group: setattr(watch, "label", group), into_leaves=False)
    except RuntimeError as error:  # torch.utils.checkpoint inside of the model, for example
        weights = watch.label.leaves if isinstance(watch.label, Group) else ()
        raise CannotSplit(f"refuses it ({str(error).splitlines()[0]})", weights) from error
    if watch.found:
        name, group = watch.found[0]
        assert isinstance(group, Group)
        raise CannotSplit(f"does the same work for both ({name})", group.leaves)
    return Halves(reused, frees)


def _refuse_custom_formulas(groups: Sequence[Group]) -> None:
    """Raises CannotSplit if a junction is a torch.autograd.Function of the user.

    Its Python formula cannot know which gradients are wanted in this half, and would compute all of them twice.
    """
    for group in groups:
        for node, _ in group.junctions:
            if isinstance(node, BackwardCFunction):
                raise CannotSplit(f"has a formula of its own for all its gradients ({node.name()})", group.leaves)


def _parameters_of(weights: Sequence[Node]) -> tuple[nn.Parameter, ...]:
    found = (getattr(node, "variable", None) for node in weights)
    return tuple(parameter for parameter in found if isinstance(parameter, nn.Parameter))


def _owners(stage: Stage, weights: Sequence[Node]) -> str:
    """Returns the names of the modules that hold some weights, for the warning."""
    ids = set(map(id, _parameters_of(weights)))
    names = [
        f"{stage.prefix}{name}".rstrip(".") + f" ({type(module).__name__})"
        for name, module in stage.module.named_modules()
        if any(id(parameter) in ids for parameter in module.parameters(recurse=False))
    ]
    return " and ".join(names) or f"a module of its {type(stage.module).__name__}"


@contextmanager
def _without_trace(module: nn.Module) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), same_buffers(module):
        yield


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
