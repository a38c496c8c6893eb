"""Forward and backward as two calls, so that a program can compute with the outputs in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from echelon._torch_private.tensors import tree_leaves
from echelon.backends.admission import check_values
from echelon.backends.memory import describe
from echelon.errors import ScheduleError, SizeMismatch
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.run.interpreter import Interpreter
from echelon.pipeline.run.runtime import Runtime
from echelon.pipeline.run.step import Batch
from echelon.pipeline.run.weights import Replicas
from echelon.pipeline.schedules.forward_only import forward_then_backward
from echelon.pipeline.stage.nested import Value, map_tensors, merge, tensors_of


class _Begun(NamedTuple):
    """Forward whose backward was not run yet."""

    schedule: Schedule
    batch: Batch
    run: Interpreter


class ManualStep:
    """Forwards and backwards of the stages of one rank, as two calls in GPipe's order."""

    def __init__(self, runtime: Runtime, replicas: Replicas) -> None:
        """Prepares to run.

        Args:
            runtime: this rank's runtime.
            replicas: the reductions of the gradients.
        """
        self._runtime = runtime
        self._replicas = replicas
        self._begun: _Begun | None = None

    def forget(self) -> None:
        """Drops a forward whose backward will not be run, and cancels its receives."""
        if self._begun is not None:
            self._begun.run.withdraw()
            self._begun = None
            self._runtime.forget()

    def forward(self, placement: Sequence[int], batch: Batch) -> Value:
        """Runs all microbatches forward. Returns the outputs, as leaves, on the rank of the last stage; else None.

        Raises:
            PeerFailed, Timeout, NotFinite: as for `Runtime.run`.
        """
        schedule = forward_then_backward(placement, len(batch.kwargs))
        self._begun = _Begun(schedule, batch, self._runtime.begin(schedule, batch, self._replicas.start))
        if not batch.outputs:
            return None
        outputs = [batch.outputs[index] for index in range(len(batch.kwargs))]
        needs = iter([tensor.requires_grad for tensor in tensors_of(outputs[0])])
        # Leaves: their .grad collects the gradients of the user's computation, and is the argument of `backward`.
        with torch.no_grad():
            whole = merge(outputs)
        return map_tensors(lambda tensor: tensor.requires_grad_(next(needs)), whole)

    def backward(self, grad_outputs: Value) -> None:
        """Runs all microbatches backward.

        Raises:
            ScheduleError: no forward was run before.
            SizeMismatch: the gradients do not fit the outputs.
            PeerFailed, Timeout: as for `Runtime.run`.
        """
        if self._begun is None:
            raise ScheduleError("there is nothing to run backward: call forward(..., train=True) first")
        schedule, batch, run = self._begun
        self._begun = None  # also if this backward fails: it cannot be run twice
        # A gradient that does not fit is found on the rank of the last stage alone; the other ranks wait for it
        # already.
        with self._runtime.failures.told():
            if batch.outputs:
                batch.grad_outputs = _cut([batch.outputs[index] for index in range(len(batch.kwargs))], grad_outputs)
            with self._replicas.synchronizing():
                self._runtime.finish(schedule, run)


def _cut(outputs: Sequence[Value], grad_outputs: Value) -> list[list[torch.Tensor | None]]:
    """Cuts gradients like the outputs: for each microbatch, one for each tensor that requires a gradient."""
    rows = [[tensor for tensor in tensors_of(output) if tensor.requires_grad] for output in outputs]
    given = tree_leaves(grad_outputs)
    if len(given) != len(rows[0]):
        raise SizeMismatch(
            f"{len(rows[0])} gradients, one for each tensor of the outputs that requires one",
            len(given),
            "backward(grad_outputs)",
            "pass None for an output that nothing depends on",
        )
    cut: list[list[torch.Tensor | None]] = [[] for _ in outputs]
    for column, gradient in zip(zip(*rows, strict=True), given, strict=True):
        pieces = [None] * len(column) if gradient is None else _pieces(column, gradient)
        for row, piece in zip(cut, pieces, strict=True):
            row.append(piece)
    return cut


def _pieces(column: Sequence[torch.Tensor], gradient: object) -> Sequence[torch.Tensor]:
    """Cuts the gradient of one tensor of the outputs along dim 0, or unstacks it if the outputs had no dim."""
    stacked = column[0].dim() == 0
    rows = len(column) if stacked else sum(map(len, column))
    shape = (rows, *column[0].shape[0 if stacked else 1 :])
    if not isinstance(gradient, torch.Tensor) or gradient.shape != shape or gradient.dtype != column[0].dtype:
        got = describe(gradient.shape, gradient.dtype) if isinstance(gradient, torch.Tensor) else repr(gradient)
        raise SizeMismatch(
            describe(torch.Size(shape), column[0].dtype), got, "backward(grad_outputs)", "pass the outputs' .grad"
        )
    check_values(gradient, "backward(grad_outputs)")
    return gradient.unbind() if stacked else torch.split(gradient, [len(tensor) for tensor in column])
