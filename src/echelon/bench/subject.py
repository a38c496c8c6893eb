"""What is measured: something that can do collectives, and Echelon's groups as one of these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from echelon.bench.figures import Case
from echelon.group import ProcessGroup

Call = Callable[[], Tensor | None]
"""Does an operation once and returns its result, None where this rank gets none."""


class Subject(ABC):
    """Something that can do collectives, as one rank of those that are measured together."""

    name: str
    """What the table calls it."""

    @abstractmethod
    def call(self, case: Case, tensor: Tensor | None) -> Call:
        """Returns a call of the operation on `tensor`, with all that it needs allocated.

        Raises:
            UnsupportedOp: this subject has no such operation for this dtype.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees what the subject opened."""


class EchelonSubject(Subject):
    """A group of ours."""

    def __init__(self, group: ProcessGroup, name: str | None = None) -> None:
        self.name = name or group.backend.name
        self._group = group

    def call(self, case: Case, tensor: Tensor | None) -> Call:  # noqa: D102
        group = self._group
        if tensor is None:
            return (lambda: group.scatter(None, case.root)) if case.operation == "scatter" else self._barrier
        lengths = {"all_gather": case.num_elements * case.num_ranks, "reduce_scatter": case.num_elements}
        out = tensor.new_empty(lengths.get(case.operation, tensor.numel() if case.operation == "all_to_all" else 0))
        calls: dict[str, Call] = {
            "all_reduce": lambda: group.all_reduce(tensor, case.op),
            "reduce": lambda: group.reduce(tensor, case.root, case.op),
            "broadcast": lambda: group.broadcast(tensor, case.root),
            "all_gather": lambda: group.all_gather(tensor, out),
            "reduce_scatter": lambda: group.reduce_scatter(tensor, case.op, out),
            "gather": lambda: group.gather(tensor, case.root),
            "scatter": lambda: group.scatter(tensor, case.root),
            "all_to_all": lambda: group.all_to_all(tensor, out),
            "send_recv": self._ping_pong(tensor),
        }
        return calls[case.operation]

    def _barrier(self) -> None:
        self._group.barrier()

    def _ping_pong(self, tensor: Tensor) -> Call:
        group, came = self._group, torch.empty_like(tensor)
        last = group.world_size - 1

        def call() -> Tensor | None:
            if group.rank == 0:
                group.send(tensor, last)
                return group.recv(last, out=came)
            if group.rank == last:
                group.recv(0, out=came)
                group.send(tensor, 0)
                return came
            return None

        return call

    def close(self) -> None:
        """Does nothing: the group belongs to whoever made it."""
