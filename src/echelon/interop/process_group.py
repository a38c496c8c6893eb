"""The group that torch.distributed gets: its collectives, and messages between two ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from echelon.backends.memory import is_plain
from echelon.backends.work import Received, Work
from echelon.interop.collectives import Collectives
from echelon.interop.devices import by_device
from echelon.interop.messages import Message
from echelon.interop.tensors import deal, flat, only, writable


class EchelonProcessGroup(Collectives):
    """A `torch.distributed.ProcessGroup` over one of Echelon, `group`. torch makes it; see `torch_distributed`."""

    @by_device
    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Starts to send one tensor to a rank of the group."""
        tensor = only(tensors, "send")
        work = self.group.isend(flat(tensor), dst, tag)
        return self._counted(Message(self.group, work, [dst], lambda _: tensor, receives=False))

    @by_device
    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Starts to receive one tensor from a rank of the group."""
        tensor = only(writable(tensors, "recv"), "recv")
        in_place = is_plain(tensor)
        work = self.group.irecv(src, tag, flat(tensor) if in_place else None)

        def settle(values: Tensor) -> Tensor:
            return tensor if in_place else deal(values, [tensor], "recv")[0]

        return self._counted(Message(self.group, work, [src], settle, receives=True))

    @by_device
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        """Starts to receive one tensor from whichever rank sends first; `source_rank()` of the Work says which."""
        tensor = only(writable(tensors, "recv"), "recv")
        work: Work[Received] = self.group.irecv_any(tag)
        others = [rank for rank in range(self.group.world_size) if rank != self.group.rank]

        def settle(came: Received) -> Tensor:
            return deal(came.tensor, [tensor], "recv")[0]

        return self._counted(Message(self.group, work, others, settle, receives=True))
