"""Subjects of benchmarks: the interface, Echelon's groups, and Gloo through torch.distributed."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, by its docs

from echelon.bench.figures import REDUCTIONS, Case
from echelon.errors import UnsupportedOp
from echelon.group.group import ProcessGroup

Call = Callable[[], Tensor | None]
"""Runs an operation once and returns its result. None on a rank that gets no result."""


class Subject(ABC):
    """Library under measurement: this rank's access to its collectives."""

    name: str
    """Title in the table."""

    @abstractmethod
    def call(self, case: Case, tensor: Tensor | None) -> Call:
        """Returns a call of the operation on `tensor`, with its result memory allocated.

        Raises:
            UnsupportedOp: the subject does not support the operation or the dtype.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees groups and connections that the subject opened."""


def ping_pong(
    rank: int, num_ranks: int, send: Callable[[int], object], receive: Callable[[int], object], came: Tensor
) -> Tensor | None:
    """One ping-pong between rank 0 and the last. Returns the received tensor; None on other ranks.

    Args:
        rank, num_ranks: this rank and the number of all.
        send, receive: send to and receive from a rank; `receive` writes into `came`.
        came: receive buffer.
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
    """Returns `result`: gives a lambda the result of a call that returns something else."""
    return result


class EchelonSubject(Subject):
    """Subject over a group of Echelon."""

    def __init__(self, group: ProcessGroup, name: str | None = None) -> None:
        self.name = name or group.backend.name
        self._group = group

    def call(self, case: Case, tensor: Tensor | None) -> Call:  # noqa: D102
        group = self._group
        if case.operation == "barrier":
            return self._barrier
        # Allocated before the timing starts, as peers do. The kernel takes longer to map a new result than to move it:
        # a 64 MiB all-gather took five times as long as Open MPI's.
        out = torch.empty(_out_length(case, group.rank), dtype=getattr(torch, case.dtype))
        if tensor is None:  # a scatter on a rank that is not the root
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
        """Does nothing, since the caller owns the group."""


def _out_length(case: Case, rank: int) -> int:
    """Returns the number of elements of this rank's `out`. 0 if the operation works in place or has no result."""
    gathers = case.operation == "all_gather" or (case.operation == "gather" and rank == case.root)
    if gathers or case.operation == "all_to_all":
        return case.num_elements * case.num_ranks
    return case.num_elements if case.operation in ("scatter", "reduce_scatter") else 0


_OPS = {"sum": "SUM", "product": "PRODUCT", "min": "MIN", "max": "MAX", "band": "BAND", "bor": "BOR", "bxor": "BXOR"}
_SECONDS = timedelta(seconds=60)


class GlooSubject(Subject):
    """torch.distributed's default group over Gloo, on the processes of `group`."""

    name = "gloo"

    def __init__(self, group: ProcessGroup) -> None:
        if max(group.hosts) == 0:
            # All ranks are on one host: messages stay on the loopback interface.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        is_first = group.rank == 0
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_SECONDS) if is_first else None
        port = group.broadcast_object(store.port if store is not None else 0, src=0)
        store = store or TCPStore(host, cast("int", port), is_master=False, timeout=_SECONDS)
        dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.world_size)
        self._rank = group.rank
        self._num_ranks = group.world_size

    def call(self, case: Case, tensor: Tensor | None) -> Call:  # noqa: D102
        if case.operation in REDUCTIONS and case.op not in _OPS:
            raise UnsupportedOp(f"gloo has no op {case.op!r}: measure another, or leave --vs gloo out")
        if case.operation == "barrier":
            return self._barrier
        dtype = getattr(torch, case.dtype)
        out = torch.empty(case.num_elements if case.operation in ("scatter", "reduce_scatter") else 0, dtype=dtype)
        if tensor is None:  # a scatter on a rank that is not the root
            return lambda: after(dist.scatter(out, None, case.root), out)
        return self._calls(case, tensor, out)

    def _calls(self, case: Case, tensor: Tensor, out: Tensor) -> Call:
        is_root = self._rank == case.root
        op = getattr(dist.ReduceOp, _OPS.get(case.op, "SUM"))
        parts = list(tensor.chunk(self._num_ranks)) if case.operation in ("scatter", "reduce_scatter") else None
        gathers = case.operation == "all_gather" or (case.operation == "gather" and is_root)
        whole = tensor.new_empty(tensor.numel() * self._num_ranks) if gathers else None
        places = None if whole is None else list(whole.chunk(self._num_ranks))
        other = torch.empty_like(tensor) if case.operation in ("all_to_all", "send_recv") else out
        calls: dict[str, Call] = {
            "all_reduce": lambda: after(dist.all_reduce(tensor, op), tensor),
            "reduce": lambda: after(dist.reduce(tensor, case.root, op), tensor),
            "broadcast": lambda: after(dist.broadcast(tensor, case.root), tensor),
            "all_gather": lambda: after(dist.all_gather(places, tensor), whole),
            "reduce_scatter": lambda: after(dist.reduce_scatter(out, parts, op), out),
            "gather": lambda: after(dist.gather(tensor, places, case.root), whole),
            "scatter": lambda: after(dist.scatter(out, parts, case.root), out),
            "all_to_all": lambda: after(dist.all_to_all_single(other, tensor), other),
            "send_recv": lambda: ping_pong(
                self._rank, self._num_ranks, partial(dist.send, tensor), partial(dist.recv, other), other
            ),
        }
        return calls[case.operation]

    def _barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:  # noqa: D102
        dist.destroy_process_group()
