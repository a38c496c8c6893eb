"""MPI through mpi4py as a subject of benchmarks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from echelon.bench.figures import REDUCTIONS, Case
from echelon.bench.subject import Call, Subject, after, ping_pong
from echelon.errors import UnsupportedOp

_OPS = {
    "sum": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}
_NO_NUMPY = ("bfloat16", "float16")
"""Dtypes without a type in MPI or in numpy."""


class MpiSubject(Subject):
    """All ranks of an MPI program. `world` is mpi4py's COMM_WORLD."""

    name = "mpi"

    def __init__(self, world: Any, mpi: Any) -> None:
        self._world = world
        self._mpi = mpi

    def call(self, case: Case, tensor: Tensor | None) -> Call:  # noqa: D102
        if case.operation in REDUCTIONS and case.op not in _OPS:
            raise UnsupportedOp(f"mpi has no op {case.op!r}: measure another, or leave --vs mpi out")
        if case.dtype in _NO_NUMPY:
            raise UnsupportedOp(f"mpi moves no {case.dtype}: measure another --dtype, or leave --vs mpi out")
        world = self._world
        if case.operation == "barrier":
            return self._barrier
        num_out = {"scatter": case.num_elements, "reduce_scatter": case.num_elements}.get(case.operation, 0)
        if case.operation in ("all_gather", "gather"):
            num_out = case.num_elements * case.num_ranks
        result = torch.empty(num_out or (0 if tensor is None else tensor.numel()), dtype=getattr(torch, case.dtype))
        out = result.numpy()
        if tensor is None:  # a scatter on a rank that is not the root
            return lambda: after(world.Scatter(None, out, case.root), result)
        return self._calls(case, tensor, result, out)

    def _calls(self, case: Case, tensor: Tensor, result: Tensor, out: Any) -> Call:
        world, here = self._world, self._mpi.IN_PLACE
        mine = tensor.numpy()
        op = getattr(self._mpi, _OPS.get(case.op, "SUM"))
        is_root = world.rank == case.root
        at_root = out if is_root else None
        calls: dict[str, Call] = {
            "all_reduce": lambda: after(world.Allreduce(here, mine, op), tensor),
            "reduce": lambda: after(world.Reduce(mine, at_root, op, case.root), result),
            "broadcast": lambda: after(world.Bcast(mine, case.root), tensor),
            "all_gather": lambda: after(world.Allgather(mine, out), result),
            "reduce_scatter": lambda: after(world.Reduce_scatter_block(mine, out, op), result),
            "gather": lambda: after(world.Gather(mine, at_root, case.root), result),
            "scatter": lambda: after(world.Scatter(mine, out, case.root), result),
            "all_to_all": lambda: after(world.Alltoall(mine, out), result),
            "send_recv": lambda: ping_pong(
                world.rank, world.size, partial(world.Send, mine), partial(world.Recv, out), result
            ),
        }
        return calls[case.operation]

    def _barrier(self) -> None:
        self._world.Barrier()

    def close(self) -> None:
        """Does nothing, since MPI is finalized at the end of the process."""
