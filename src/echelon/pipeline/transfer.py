"""Nested values on their way between stages of different ranks.

A value is one message per tensor. The note of the first is the structure, and shapes and dtypes travel along, so
nothing is agreed beforehand. The receiver expects what came the last time for the same microbatch: that many receives
are posted, each with memory for a tensor of that shape, unless the message comes in memory that this rank can keep.
What turns out otherwise comes all the same, in memory of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from echelon.backends.tag import Tag
from echelon.backends.wire import MAX_NOTE_BYTES
from echelon.backends.work import Work
from echelon.calls.patience import wait_for
from echelon.errors import PeerFailed, Timeout, UnsupportedOp
from echelon.group import ProcessGroup
from echelon.pipeline.buffers import Buffers
from echelon.pipeline.lowering import Transfer
from echelon.pipeline.nested import Value, map_tensors, num_tensors, structure_of, tensors_of, value_of

_APART = "+"
"""The note that says: this message is the structure, the tensors follow."""
_PARTS = 1 << 10
_STAGES = (1 << 19) - 1
TRANSFERS = 1 << 63
"""Sequence numbers from here on are those of transfers; below are the collectives of the same group."""


class _Spec(NamedTuple):
    """What a tensor looks like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Ports:
    """This rank's end of all transfers of one program."""

    def __init__(self, group: ProcessGroup, buffers: Buffers) -> None:
        """Makes the ends.

        Args:
            group: the ranks of the pipeline.
            buffers: for what arrives.
        """
        self._group = group
        self._buffers = buffers
        self._seen: dict[Transfer, list[_Spec]] = {}

    def post(self, step: int, transfer: Transfer, peer: int) -> Incoming:
        """Returns a value that will arrive from rank `peer` in step number `step`."""
        seen = self._seen.setdefault(transfer, [])
        return Incoming(self._group, self._group.ranks[peer], step, transfer, seen, self._buffers)

    def send(self, step: int, transfer: Transfer, peer: int, value: Value) -> list[Work[None]]:
        """Starts to send a value to rank `peer`; its tensors must not change until all Works are done.

        Raises:
            UnsupportedOp: it has more than 1023 tensors, or is no nested value.
        """
        backend, dst = self._group.backend, self._group.ranks[peer]
        return [
            backend.isend(tensor, dst, _tag(self._group, step, transfer, part), note=note)
            for part, (tensor, note) in enumerate(_messages(value))
        ]


class Incoming:
    """A value that is expected. Posted early, so that it can arrive while this rank computes."""

    def __init__(
        self, group: ProcessGroup, src: int, step: int, transfer: Transfer, seen: list[_Spec], buffers: Buffers
    ) -> None:
        self._group = group
        self._src = src
        self._step = step
        self._transfer = transfer
        self._seen = seen
        self._works = [self._post(part, self._place(spec, buffers)) for part, spec in enumerate(seen)]
        self._works = self._works or [self._post(0)]

    def wait(self) -> Value:
        """Returns the value; tensors that had required a gradient where they came from are leaves that require one.

        Raises:
            PeerFailed, Timeout: it will not come, or did not in time.
        """
        try:
            structure, arrived = self._arrived()
        except PeerFailed as error:
            raise error.noticed_by(self._operation()) from error
        except Timeout as error:
            raise Timeout(f"{self._operation()}: {error}") from error
        self._seen[:] = [_Spec(tensor.shape, tensor.dtype, tensor.device) for tensor in arrived]
        tensors = iter(arrived[self._works[0].note == _APART :])
        return value_of(structure, lambda requires_grad: _leaf(next(tensors), requires_grad))

    def _arrived(self) -> tuple[str, list[torch.Tensor]]:
        """Waits for the structure and for all messages."""
        works = self._works
        head = self._wait(works[0])
        apart = works[0].note == _APART
        structure = bytes(head.numpy()).decode() if apart else works[0].note
        count = num_tensors(structure) + apart
        for part in range(len(works), count):
            works.append(self._post(part))
        for work in works[count:]:
            self._group.backend.cancel(work)
        return structure, [head, *(self._wait(work) for work in works[1:count])]

    def _wait(self, work: Work[torch.Tensor]) -> torch.Tensor:
        group = self._group
        return wait_for(group.backend, work, [self._src], group.context, group.timeout)

    def _operation(self) -> str:
        """Says what this rank is doing, for errors."""
        return f"rank {self._group.backend.rank}, waiting for {_in_words(self._transfer)}"

    def _place(self, spec: _Spec, buffers: Buffers) -> torch.Tensor | None:
        """Returns memory for a tensor that is expected, if the message does not come in memory of its own."""
        num_bytes = spec.shape.numel() * spec.dtype.itemsize
        return None if self._group.backend.brings_memory(self._src, num_bytes) else buffers.take(*spec)

    def _post(self, part: int, place: torch.Tensor | None = None) -> Work[torch.Tensor]:
        tag = _tag(self._group, self._step, self._transfer, part)
        return self._group.backend.irecv(self._src, tag, out=place, note=None, must_fit=False)


def _messages(value: Value) -> list[tuple[torch.Tensor, str]]:
    """Returns the tensors that say all, and their notes."""
    structure = structure_of(value)
    tensors = [tensor.detach().contiguous() for tensor in tensors_of(value)]
    if len(tensors) >= _PARTS:
        raise UnsupportedOp(f"{len(tensors)} tensors pass between two stages: at most {_PARTS - 1} can; stack some")
    if tensors and (structure.isascii() and len(structure) <= MAX_NOTE_BYTES):
        return [(tensors[0], structure), *((tensor, "") for tensor in tensors[1:])]
    head = torch.frombuffer(bytearray(structure.encode()), dtype=torch.uint8)
    return [(head, _APART), *((tensor, "") for tensor in tensors)]


def detached(value: Value) -> Value:
    """Returns a value whose tensors share memory with the given ones, but are leaves of a graph of their own."""
    return map_tensors(lambda tensor: _leaf(tensor, tensor.requires_grad), value)


def _tag(group: ProcessGroup, step: int, transfer: Transfer, part: int) -> Tag:
    sequence = TRANSFERS | (step & 0xFFFFFFFFFF) << 20 | transfer.stage << 1 | transfer.backward
    return Tag(group.context, sequence, transfer.microbatch * _PARTS + part)


def what_passes(tag: Tag) -> str:
    """Says what a message with this tag carries between two stages; empty if it does not."""
    if tag.sequence < TRANSFERS:
        return ""
    return _in_words(Transfer(tag.sequence >> 1 & _STAGES, tag.step // _PARTS, bool(tag.sequence & 1)))


def _in_words(transfer: Transfer) -> str:
    value = "gradient" if transfer.backward else "input"
    return f"the {value} of microbatch {transfer.microbatch} for stage {transfer.stage}"


def _leaf(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if requires_grad else leaf
