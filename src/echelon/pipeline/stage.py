"""One stage: a part of the model, and the graphs of the microbatches between their forward and their backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from echelon.errors import ScheduleError
from echelon.pipeline.nested import Value, tensors_of


class _Graph(NamedTuple):
    """What is kept of a microbatch: the leaves its gradient arrives at, and the tensors it starts from."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


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
        self._spreads = spreads
        self._graphs: dict[int, _Graph] = {}

    def __repr__(self) -> str:
        return f"<Stage {self.index}: {sum(p.numel() for p in self.module.parameters())} parameters>"

    @property
    def num_held(self) -> int:
        """The number of microbatches between forward and backward."""
        return len(self._graphs)

    def forward(self, microbatch: int, value: Value, kwargs: Mapping[str, Value], *, keeps_graph: bool) -> Value:
        """Returns what the module makes of the batch's inputs (a tuple), or of what the stage before returned.

        With `keeps_graph`, remembers where the gradient of `value` is to arrive, and where that of the output starts.
        """
        with torch.set_grad_enabled(keeps_graph):
            if isinstance(value, tuple) and (self._spreads or self.index == 0):
                output = self.module(*value, **kwargs)
            else:
                output = self.module(value, **kwargs)
        if keeps_graph:
            inputs = [tensor for tensor in tensors_of(value) if tensor.requires_grad]
            outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
            self._graphs[microbatch] = _Graph(inputs, outputs)
        return output

    def backward(self, microbatch: int, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Adds into the parameters' .grad, and returns the gradients of the inputs that require one.

        Args:
            microbatch: which of those that forward was called for.
            gradients: for each tensor of the output that requires one, its gradient; None where nothing depends on it.

        Raises:
            ScheduleError: there are more or fewer gradients than outputs.
        """
        graph = self._graphs[microbatch]
        if len(gradients) != len(graph.outputs):
            raise ScheduleError(
                f"stage {self.index} has {len(graph.outputs)} outputs that require a gradient for microbatch "
                f"{microbatch}, but {len(gradients)} gradients came back"
            )
        pairs = [pair for pair in zip(graph.outputs, gradients, strict=True) if pair[1] is not None]
        return self._run_backward(microbatch, [output for output, _ in pairs], [gradient for _, gradient in pairs])

    def backward_from(self, microbatch: int, loss: torch.Tensor) -> list[torch.Tensor | None]:
        """As `backward`, but from a loss that was made of the output."""
        return self._run_backward(microbatch, [loss], [None])

    def _run_backward(
        self, microbatch: int, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        graph = self._graphs.pop(microbatch)
        if roots:
            torch.autograd.backward(roots, gradients)
        return [tensor.grad for tensor in graph.inputs]

    def forget(self) -> None:
        """Drops all graphs, after a step that failed."""
        self._graphs.clear()
