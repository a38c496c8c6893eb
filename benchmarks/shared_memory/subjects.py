"""Subjects besides any tensor: symmetric tensors, and the adds and copies that no operation on these can avoid."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon import ProcessGroup
from echelon.backends.memory import copy_contiguous
from echelon.bench.request import Case
from echelon.bench.subject import Call, EchelonSubject, Subject
from echelon.bench.workload import Workload

_PIECE = 64 << 10
"""Elements that are added up and written at a time, so that they stay in the cache."""


class SymmetricSubject(EchelonSubject):
    """Echelon, with tensors that `group.empty` made. In a group of its own, as others may have no such tensors."""

    def __init__(self, group: ProcessGroup) -> None:
        self._memory = group.subgroup(range(group.world_size))
        super().__init__(self._memory, "symmetric")
        self._kept: Tensor | None = None

    def call(self, case: Case, tensor: Tensor | None, out: Tensor) -> Call:
        if case.operation == "barrier":
            return super().call(case, tensor, out)
        shared = self._memory.empty(_length(case), getattr(torch, case.dtype))  # by all ranks, whoever has values
        self._kept = shared  # on ranks that give none as well, or they would not have its block any more
        return super().call(case, None if tensor is None else shared.copy_(tensor), out)


class Task(NamedTuple):
    """Values of several tensors that are added up, or of one that are copied, and where the result is written."""

    sources: Sequence[Tensor]
    targets: Sequence[Tensor]

    def act(self) -> None:
        if len(self.sources) == 1:
            for target in self.targets:
                copy_contiguous(self.sources[0], target)
            return
        for numbers in zip(*(part.split(_PIECE) for part in (*self.sources, *self.targets)), strict=True):
            sources, (first, *others) = numbers[: len(self.sources)], numbers[len(self.sources) :]
            torch.add(sources[0], sources[1], out=first)
            for source in sources[2:]:
                first.add_(source)
            for other in others:
                copy_contiguous(first, other)


def map_together(group: ProcessGroup, length: int) -> list[Tensor]:
    """Returns a tensor of each rank, of as many float32, in memory that all map; all ranks call it."""
    file = os.memfd_create("limit") if group.rank == 0 else -1
    path = group.broadcast_object(f"/proc/{os.getpid()}/fd/{file}", src=0)
    if group.rank == 0:
        os.posix_fallocate(file, 0, length * group.world_size * 4)
    group.barrier()
    memory = torch.from_file(str(path), shared=True, size=length * group.world_size, dtype=torch.float32)
    group.barrier()
    if group.rank == 0:
        os.close(file)
    everywhere = list(memory.chunk(group.world_size))
    everywhere[group.rank].zero_()
    return everywhere


class LimitSubject(Subject):
    """The adds and copies of an operation on symmetric tensors, by all ranks at once, where nobody waits.

    In an all-reduce each rank adds up its slice of all tensors and writes it to all, in a reduce to one; in every other
    operation it copies or adds up what its result consists of. The tensors are in memory that all ranks map, as
    symmetric ones are. Nobody waits, so what comes out is not right, and not looked at.
    """

    name = "limit"

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def call(self, case: Case, _: Tensor | None, __: Tensor) -> Call:
        if case.operation == "barrier":
            return lambda: None
        tasks = _tasks(case, self._group.rank, map_together(self._group, _length(case)))

        def act() -> None:
            for task in tasks:
                task.act()

        return act


def _length(case: Case) -> int:
    """Returns how many elements a rank's tensor has."""
    return case.num_elements * (case.num_ranks if case.operation in ("scatter", "reduce_scatter", "all_to_all") else 1)


def _tasks(case: Case, rank: int, everywhere: Sequence[Tensor]) -> list[Task]:
    if case.operation in ("all_reduce", "reduce"):
        own = [tensor.tensor_split(len(everywhere))[rank] for tensor in everywhere]
        return [Task(own, own if case.operation == "all_reduce" else [own[case.root]])]
    if case.operation == "broadcast":
        return [Task([everywhere[case.root]], [everywhere[rank]])] if rank != case.root else []
    found = []
    for ranks, first, length in Workload(case, rank).segments():
        sources = [everywhere[source][first : first + length] for source in ranks]
        found.append(Task(sources, [torch.zeros_like(sources[0])]))
    return found
