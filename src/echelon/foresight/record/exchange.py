"""Collectives of real values among ranks of which only some run: absent ranks are represented.

Strategy. Contributions are kept by group and sequence, so that a rank that runs later finds them. A rank that has not
come is represented by the nearest one that has, else by the caller itself. Only a root cannot be represented: the
caller waits for it, and its rank is started if it does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from echelon.backends.collective import Collective, CollectiveExecutor, Run
from echelon.backends.formats.wire import Tag, readable, signed
from echelon.backends.memory import new_tensor
from echelon.backends.work import Work
from echelon.call_site import calling_place, source_of
from echelon.collectives.calls.plan_executor import PlannedExecutor
from echelon.errors import CollectiveMismatch
from echelon.foresight.record.mail import Mail
from echelon.operation_records import OperationRecord
from echelon.simulation.backend import Passage, VirtualBackend, VirtualWork
from echelon.simulation.meeting import FROM_ROOT
from echelon.simulation.values import Calls, result_of, snapshot
from echelon.simulation.world import World


@dataclass
class _Contribution:
    collective: Collective
    tensor: Tensor | None
    note: str
    place: str


@dataclass
class _Call:
    """One collective of one group: the contributions of the ranks that have come."""

    contributions: dict[int, _Contribution] = field(default_factory=dict)
    """By rank of the group."""
    waiting: list[Work[None]] = field(default_factory=list)


class Exchange:
    """Contributions of all ranks, and the function that starts a rank."""

    def __init__(self, start: Callable[[int], object], has_begun: Callable[[int], bool]) -> None:
        self.start = start
        self.mail = Mail(start, has_begun)
        self._calls: dict[tuple[int, tuple[int, ...], int], _Call] = {}

    def call(self, context: int, ranks: tuple[int, ...], sequence: int) -> _Call:
        """Returns a collective of a group."""
        return self._calls.setdefault((context, ranks, sequence), _Call())


class ExchangeExecutor(PlannedExecutor):
    """Collectives of one group on one recorded rank."""

    def __init__(self, backend: RecordingBackend, ranks: tuple[int, ...], context: int) -> None:
        self._backend = backend
        self._ranks = ranks
        self._context = context
        self._rank = ranks.index(backend.rank)

    def prepare(self, collective: Collective) -> Run:  # noqa: D102
        if collective.op:
            _ = collective.reduction  # raises now, before the collective has a number
        if collective.kind == "empty":
            return partial(_empty, collective)
        return partial(self._run, collective)

    def _run(self, collective: Collective, record: OperationRecord, tensor: Tensor | None, out: Tensor | None) -> Any:
        call = self._backend.exchange.call(self._context, self._ranks, record.sequence)
        note = signed(record.operation, record.sequence, record.signature)
        with torch.no_grad():
            own = _Contribution(
                collective, None if tensor is None else snapshot(tensor), note, source_of(calling_place())
            )
            self._check(call, own)
            call.contributions[self._rank] = own
            for work in call.waiting:
                work.complete()
            call.waiting.clear()
            if collective.kind in FROM_ROOT and collective.root not in call.contributions:
                self._wait_for_root(call, collective.root, record)
            parts = [self._part_of(call, rank, own) for rank in range(len(self._ranks))]
            calls = Calls(
                [part.collective for part in parts], [part.tensor for part in parts], [None] * len(parts), plan=None
            )
            return result_of(calls)(self._rank, tensor, out, record)

    def _check(self, call: _Call, own: _Contribution) -> None:
        for rank, other in call.contributions.items():
            if other.note != own.note:
                raise CollectiveMismatch(
                    f"rank {self._ranks[rank]} calls {readable(other.note)} at {other.place}, but rank "
                    f"{self._backend.rank} {readable(own.note)} at {own.place}"
                )

    def _part_of(self, call: _Call, rank: int, own: _Contribution) -> _Contribution:
        found = call.contributions.get(rank)
        if found is not None:
            return found
        nearest = min(call.contributions, key=lambda other: (abs(other - rank), other))
        return call.contributions[nearest] if len(call.contributions) > 1 else own

    def _wait_for_root(self, call: _Call, root: int, record: OperationRecord) -> None:
        backend, peer = self._backend, self._ranks[root]
        work: VirtualWork[None] = VirtualWork(
            backend.boundary,
            Passage("collective with", peer, Tag(self._context, record.sequence)),
            backend.timeout,
            peer,
            record.operation,
            None,
        )
        call.waiting.append(work)
        backend.exchange.start(peer)
        work.wait()


class RecordingBackend(VirtualBackend):
    """Simulated rank of which only real values are exchanged."""

    def __init__(self, rank: int, world_size: int, world: World, timeout: float, exchange: Exchange) -> None:
        super().__init__(rank, world_size, world, timeout)
        self.exchange = exchange

    def executor(self, context: int, ranks: Sequence[int]) -> CollectiveExecutor:  # noqa: D102
        return ExchangeExecutor(self, tuple(ranks), context)


def _empty(collective: Collective, *_: object) -> Tensor:
    assert collective.shape is not None
    assert collective.dtype is not None
    return new_tensor(tuple(collective.shape), collective.dtype)
