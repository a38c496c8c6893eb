"""What is measured: something that can do collectives, and Echelon's groups as one of these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

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


def ping_pong(
    rank: int, num_ranks: int, send: Callable[[int], object], receive: Callable[[int], object], came: Tensor
) -> Tensor | None:
    """Does a rank's part of a message from rank 0 to the last and one back; returns what came, if it is one of both.

    Args:
        rank, num_ranks: who this is.
        send, receive: send to and receive from a rank, the latter into `came`.
        came: what is received.
    """
    last = num_ranks - 1
    if rank == 0:
        send(last)
        receive(last)
    elif rank == last:
        receive(0)
        send(0)
    else:
        return None
    return came


def after(_: object, result: Tensor | None) -> Tensor | None:
    """Returns the result of a call that returns something else, or nothing."""
    return result


class EchelonSubject(Subject):
    """A group of ours."""

    def __init__(self, group: ProcessGroup, name: str | None = None) -> None:
        self.name = name or group.backend.name
        self._group = group

    def call(self, case: Case, tensor: Tensor | None) -> Call:  # noqa: D102
        group = self._group
        if case.operation == "barrier":
            return self._barrier
        out = torch.empty(_out_length(case, group.rank), dtype=getattr(torch, case.dtype))
        if tensor is None:
            return lambda: group.scatter(None, case.root, out)
        calls: dict[str, Call] = {
            "all_reduce": lambda: group.all_reduce(tensor, case.op),
            "reduce": lambda: group.reduce(tensor, case.root, case.op),
            "broadcast": lambda: group.broadcast(tensor, case.root),
            "all_gather": lambda: group.all_gather(tensor, out),
            "reduce_scatter": lambda: group.reduce_scatter(tensor, case.op, out),
            "gather": lambda: group.gather(tensor, case.root, out),
            "scatter": lambda: group.scatter(tensor, case.root, out),
            "all_to_all": lambda: group.all_to_all(tensor, out),
            "send_recv": self._ping_pong(tensor),
        }
        return calls[case.operation]

    def _barrier(self) -> None:
        self._group.barrier()

    def _ping_pong(self, tensor: Tensor) -> Call:
        group, came = self._group, torch.empty_like(tensor)
        send, receive = partial(group.send, tensor), partial(group.recv, out=came)
        return lambda: ping_pong(group.rank, group.world_size, send, receive, came)

    def close(self) -> None:
        """Does nothing: the group belongs to whoever made it."""


def _out_length(case: Case, rank: int) -> int:
    """Returns how many elements a rank's result has that is not written in place."""
    gathers = case.operation == "all_gather" or (case.operation == "gather" and rank == case.root)
    if gathers or case.operation == "all_to_all":
        return case.num_elements * case.num_ranks
    return case.num_elements if case.operation in ("scatter", "reduce_scatter") else 0
