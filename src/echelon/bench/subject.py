"""Subjects of benchmarks: the interface, Echelon's groups, Gloo through torch.distributed, and MPI through mpi4py."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, by its docs

from echelon.bench.request import REDUCTIONS, Case
from echelon.errors import UnsupportedOp
from echelon.group.group import ProcessGroup

Call = Callable[[], Tensor | None]
"""Runs an operation once and returns its result. None on a rank that gets no result."""


class Subject(ABC):
    """Library under measurement: this rank's access to its collectives."""

    name: str
    """Title in the table."""

    @abstractmethod
    def call(self, case: Case, tensor: Tensor | None, out: Tensor) -> Call:
        """Returns a call of the operation.

        Args:
            case: the call to measure.
            tensor: this rank's input. None for a barrier, and for a scatter on a rank that is not the root.
            out: memory for this rank's result. Operations in place leave it alone.

        Raises:
            UnsupportedOp: the subject does not support the operation or the dtype.
        """

    def close(self) -> None:  # noqa: B027 # most subjects own nothing
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


def _after(_: object, result: Tensor) -> Tensor:
    """Returns `result`: gives a lambda the result of a call that returns something else."""
    return result


class EchelonSubject(Subject):
    """Subject over a group of Echelon."""

    def __init__(self, group: ProcessGroup, name: str | None = None) -> None:
        self.name = name or group.backend.name
        self._group = group

    def call(self, case: Case, tensor: Tensor | None, out: Tensor) -> Call:  # noqa: D102
        group = self._group
        # A table and not a chain of tests: the choice is made before the timing starts.
        if tensor is None:
            return group.barrier if case.operation == "barrier" else lambda: group.scatter(None, case.root, out)
        send, receive = partial(group.send, tensor), partial(group.recv, out=out)
        calls: dict[str, Call] = {
            "all_reduce": lambda: group.all_reduce(tensor, case.op),
            "reduce": lambda: group.reduce(tensor, case.root, case.op),
            "broadcast": lambda: group.broadcast(tensor, case.root),
            "all_gather": lambda: group.all_gather(tensor, out),
            "reduce_scatter": lambda: group.reduce_scatter(tensor, case.op, out),
            "gather": lambda: group.gather(tensor, case.root, out if group.rank == case.root else None),
            "scatter": lambda: group.scatter(tensor, case.root, out),
            "all_to_all": lambda: group.all_to_all(tensor, out),
            "send_recv": lambda: ping_pong(group.rank, group.world_size, send, receive, out),
        }
        return calls[case.operation]


def _op_of(subject: Subject, case: Case, ops: object, product: str) -> Any:
    """Returns the reduction of a peer, an attribute of `ops`. The sum for operations that reduce nothing."""
    names = {"product": product, **{name: name.upper() for name in ("sum", "min", "max", "band", "bor", "bxor")}}
    if case.operation in REDUCTIONS and case.op not in names:
        raise UnsupportedOp(f"{subject.name} has no op {case.op!r}: measure another, or leave --vs {subject.name} out")
    return getattr(ops, names.get(case.op, "SUM"))


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
        # A store of its own, since a launcher may have none.
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_SECONDS) if is_first else None
        port = group.broadcast_object(store.port if store is not None else 0, src=0)
        store = store or TCPStore(host, cast("int", port), is_master=False, timeout=_SECONDS)
        dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.world_size)
        self._rank = group.rank
        self._num_ranks = group.world_size

    def call(self, case: Case, tensor: Tensor | None, out: Tensor) -> Call:  # noqa: D102
        op = _op_of(self, case, dist.ReduceOp, "PRODUCT")
        if tensor is None:
            if case.operation == "barrier":
                return lambda: _after(dist.barrier(), out)
            return lambda: _after(dist.scatter(out, None, case.root), out)
        # Chunks are views, so lists of them cost no copy.
        parts, places = list(tensor.chunk(self._num_ranks)), list(out.chunk(self._num_ranks))
        # Gloo refuses a list of results on other ranks.
        at_root = places if self._rank == case.root else None
        send, receive = partial(dist.send, tensor), partial(dist.recv, out)
        calls: dict[str, Call] = {
            "all_reduce": lambda: _after(dist.all_reduce(tensor, op), tensor),
            "reduce": lambda: _after(dist.reduce(tensor, case.root, op), tensor),
            "broadcast": lambda: _after(dist.broadcast(tensor, case.root), tensor),
            "all_gather": lambda: _after(dist.all_gather(places, tensor), out),
            "reduce_scatter": lambda: _after(dist.reduce_scatter(out, parts, op), out),
            "gather": lambda: _after(dist.gather(tensor, at_root, case.root), out),
            "scatter": lambda: _after(dist.scatter(out, parts, case.root), out),
            "all_to_all": lambda: _after(dist.all_to_all_single(out, tensor), out),
            "send_recv": lambda: ping_pong(self._rank, self._num_ranks, send, receive, out),
        }
        return calls[case.operation]

    def close(self) -> None:  # noqa: D102
        dist.destroy_process_group()


class MpiSubject(Subject):
    """All ranks of an MPI program. `world` is mpi4py's COMM_WORLD. MPI is finalized at the end of the process."""

    name = "mpi"

    def __init__(self, world: Any, mpi: Any) -> None:
        self._world = world
        self._mpi = mpi

    def call(self, case: Case, tensor: Tensor | None, out: Tensor) -> Call:  # noqa: D102
        op = _op_of(self, case, self._mpi, "PROD")
        if case.dtype in ("bfloat16", "float16"):  # MPI or numpy has no such type
            raise UnsupportedOp(f"mpi moves no {case.dtype}: measure another --dtype, or leave --vs mpi out")
        world, result = self._world, out.numpy()
        if tensor is None:
            if case.operation == "barrier":
                return lambda: _after(world.Barrier(), out)
            return lambda: _after(world.Scatter(None, result, case.root), out)
        mine = tensor.numpy()
        # mpi4py takes no buffer for a result on other ranks.
        at_root = result if world.rank == case.root else None
        send, receive = partial(world.Send, mine), partial(world.Recv, result)
        calls: dict[str, Call] = {
            "all_reduce": lambda: _after(world.Allreduce(self._mpi.IN_PLACE, mine, op), tensor),
            "reduce": lambda: _after(world.Reduce(mine, at_root, op, case.root), out),
            "broadcast": lambda: _after(world.Bcast(mine, case.root), tensor),
            "all_gather": lambda: _after(world.Allgather(mine, result), out),
            "reduce_scatter": lambda: _after(world.Reduce_scatter_block(mine, result, op), out),
            "gather": lambda: _after(world.Gather(mine, at_root, case.root), out),
            "scatter": lambda: _after(world.Scatter(mine, result, case.root), out),
            "all_to_all": lambda: _after(world.Alltoall(mine, result), out),
            "send_recv": lambda: ping_pong(world.rank, world.size, send, receive, out),
        }
        return calls[case.operation]
