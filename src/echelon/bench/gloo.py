"""Gloo, through torch.distributed, as something to measure."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, by its docs

from echelon.bench.figures import REDUCTIONS, Case
from echelon.bench.subject import Call, Subject, after, ping_pong
from echelon.errors import UnsupportedOp
from echelon.group import ProcessGroup

_OPS = {"sum": "SUM", "product": "PRODUCT", "min": "MIN", "max": "MAX", "band": "BAND", "bor": "BOR", "bxor": "BXOR"}
_SECONDS = timedelta(seconds=60)


class GlooSubject(Subject):
    """torch.distributed's default group over Gloo, with the ranks of `group`, whose processes it shares."""

    name = "gloo"

    def __init__(self, group: ProcessGroup) -> None:
        if max(group.hosts) == 0:
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
        if tensor is None:
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
