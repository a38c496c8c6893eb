"""What is measured besides any tensor: symmetric tensors, and what no all-reduce of these can do without."""

from __future__ import annotations

import os

import torch

from echelon import ProcessGroup
from echelon.bench.figures import Case
from echelon.bench.subject import Call, EchelonSubject, Subject

_PIECE = 64 << 10
"""Elements that are added up and written at a time, so that they stay in the cache."""


class SymmetricSubject(EchelonSubject):
    """Echelon, with tensors that `group.empty` made."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group, "symmetric")
        self._memory = group

    def call(self, case: Case, tensor: torch.Tensor | None) -> Call:
        assert tensor is not None
        return super().call(case, self._memory.empty(tensor.shape, tensor.dtype).copy_(tensor))


class LimitSubject(Subject):
    """The adds and copies of an all-reduce of symmetric tensors, by all ranks at once, where nobody waits.

    Each rank adds up its slice of all tensors and writes it to all. The tensors are in memory that all ranks map, as
    symmetric ones are. Nobody waits, so what comes out is not right, and not looked at.
    """

    name = "limit"

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def call(self, case: Case, _: torch.Tensor | None) -> Call:
        group, count = self._group, case.num_elements
        file = os.memfd_create("limit") if group.rank == 0 else -1
        path = group.broadcast_object(f"/proc/{os.getpid()}/fd/{file}", src=0)
        if group.rank == 0:
            os.posix_fallocate(file, 0, count * group.world_size * case.itemsize)
        group.barrier()
        memory = torch.from_file(str(path), shared=True, size=count * group.world_size, dtype=torch.float32)
        group.barrier()
        if group.rank == 0:
            os.close(file)
        everywhere = memory.chunk(group.world_size)
        everywhere[group.rank].zero_()
        slices = [each.tensor_split(group.world_size)[group.rank] for each in everywhere]

        def add_and_copy() -> None:
            for first, second, *others in zip(*(part.split(_PIECE) for part in slices), strict=True):
                torch.add(first, second, out=first)
                for other in others:
                    first.add_(other)
                for other in (second, *others):
                    other.copy_(first)

        return add_and_copy

    def close(self) -> None:
        """Does nothing: the memory goes with the calls."""
