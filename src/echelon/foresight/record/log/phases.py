"""Phase of an operation: forward, backward, recomputation or optimizer, by the calls that are under way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from echelon._torch_private.autograd import is_in_backward
from echelon.foresight.record.log.callers import is_checkpointed
from echelon.foresight.trace import Phase


class Phases:
    """Calls of one rank that are under way: steps of optimizers, their closures, backwards and repeated forwards.

    Calls of one kind end in the reverse order of their begins, and leave all as it was before them. A closure belongs
    to the innermost step, so its depth is at most that of the steps. Only a backward that makes a graph is repeated.
    """

    def __init__(self) -> None:
        self.optimizer_depth = 0
        """Number of nested calls of `step` of optimizers."""
        self._closure_depth = 0
        """The same where the innermost closure of an optimizer began. 0 outside of closures."""
        self._makes_graph = False
        """Whether the present backward makes a graph of its own operations."""
        self._backward_is_repeated = False
        """Whether it does so inside of a forward that checkpointing repeats."""
        self._is_in_stage = False
        """Whether a stage of a pipeline repeats its forward, which it does before the backward."""

    def of(self, inputs: Iterable[torch.Tensor], is_in_module: bool) -> Phase:
        """Returns the phase of an operation.

        Args:
            inputs: its tensors.
            is_in_module: whether the forward of a module runs.
        """
        if self.is_in_optimizer:
            return "optimizer"
        if self._is_in_stage:
            return "recompute"
        if is_in_backward():
            return "recompute" if self.is_repeated() else "backward"
        if is_in_module:
            return "forward"
        is_in_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        return "forward" if is_in_graph else "other"

    def is_repeated(self) -> bool:
        """Whether checkpointing repeats a forward in the present backward."""
        # Fast path: most backwards make no graph. Then only a repeated forward does, also in a checkpointing of others.
        if not (torch.is_grad_enabled() and self._makes_graph):
            return torch.is_grad_enabled()
        return self._backward_is_repeated or is_checkpointed()

    @contextmanager
    def backward(self, makes_graph: bool) -> Iterator[None]:
        """Inside, a backward runs that may make a graph of its own operations, as with `create_graph=True`."""
        before = self._makes_graph, self._backward_is_repeated
        # As a penalty on gradients inside of a checkpointed module: its backward is a part of the module's forward.
        self._backward_is_repeated = makes_graph and is_in_backward() and is_checkpointed()
        self._makes_graph = makes_graph
        try:
            yield
        finally:
            self._makes_graph, self._backward_is_repeated = before

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Inside, a stage of a pipeline repeats its forward."""
        self._is_in_stage = True
        try:
            yield
        finally:
            self._is_in_stage = False

    @property
    def is_in_optimizer(self) -> bool:
        """Whether an optimizer steps, and does not call its closure."""
        return self.optimizer_depth > self._closure_depth

    @contextmanager
    def in_closure(self) -> Iterator[None]:
        """Inside, an optimizer calls its closure, which computes forward and backward, as that of LBFGS."""
        before, self._closure_depth = self._closure_depth, self.optimizer_depth
        try:
            yield
        finally:
            self._closure_depth = before
