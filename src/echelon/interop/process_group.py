"""Process group of torch.distributed over one of Echelon: collectives and point-to-point messages."""

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
    """`torch.distributed.ProcessGroup` over a group of Echelon, `group`. Made by torch, see `torch_distributed`."""

    @by_device
    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Starts a send of one tensor to a group rank."""
        tensor = only(tensors, "send")
        work = self.group.isend(flat(tensor), dst, tag)
        return self._counted(Message(self.group, work, [dst], lambda _: tensor, receives=False))

    @by_device
    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Starts a receive of one tensor from a group rank."""
        tensor = only(writable(tensors, "recv"), "recv")
        # Other tensors, such as strided ones, get a copy of the message at the end.
        in_place = is_plain(tensor)
        work = self.group.irecv(src, tag, flat(tensor) if in_place else None)

        def settle(values: Tensor) -> Tensor:
            return tensor if in_place else deal(values, [tensor], "recv")[0]

        return self._counted(Message(self.group, work, [src], settle, receives=True))

    @by_device
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        """Starts a receive of one tensor from any rank. `source_rank()` of the Work returns the sender."""
        tensor = only(writable(tensors, "recv"), "recv")
        work: Work[Received] = self.group.irecv_any(tag)
        others = [rank for rank in range(self.group.world_size) if rank != self.group.rank]

        def settle(came: Received) -> Tensor:
            return deal(came.tensor, [tensor], "recv")[0]

        return self._counted(Message(self.group, work, others, settle, receives=True))
