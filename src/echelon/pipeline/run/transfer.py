"""Nested values on their way between stages of different ranks.

A value is one message per tensor. The note of the first is the structure, and shapes and dtypes travel along, so
nothing is agreed beforehand. The receiver expects what came the last time for the same microbatch: that many receives
are posted, each with memory for a tensor of that shape, unless the message comes in memory that this rank can keep.
What turns out otherwise comes all the same, in memory of its own. Where messages stand in memory until they are
received, no receive is posted before the value is needed.

Messages have the same tag in every step: their order tells the steps apart, and what was worked out for a message, on
both ends, is there for the next one like it.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple, TypeAlias

import torch

from echelon._torch_private import storage_users
from echelon.backends.admission import check_values
from echelon.backends.formats.wire import MAX_NOTE_BYTES, Tag
from echelon.backends.memory import plain
from echelon.backends.work import Message, Work
from echelon.errors import PeerFailed, Timeout, UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.group.message_wait import MessageLateness, wait_for
from echelon.pipeline.plan.program import Transfer
from echelon.pipeline.stage.nested import Value, is_bare, map_tensors, num_tensors, structure_of, tensors_of, value_of

# Memory that received tensors are written into, used again as soon as nothing refers to it any more.

_Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


class Buffers:
    """Hands out tensors. There are as many as were in use at once, however many are asked for.

    Nobody gives a buffer back: whether a microbatch's graph, an output that the user kept or a view of either still
    refers to it, its memory knows.
    """

    def __init__(self) -> None:
        self._made: dict[_Kind, list[torch.Tensor]] = {}
        self._asked_for: set[_Kind] = set()

    def __len__(self) -> int:
        """Returns how many buffers there are."""
        return sum(map(len, self._made.values()))

    @property
    def num_bytes(self) -> int:
        """What they hold."""
        return sum(tensor.untyped_storage().nbytes() for made in self._made.values() for tensor in made)

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a contiguous tensor with any content."""
        kind = (shape, dtype, device)
        self._asked_for.add(kind)
        made = self._made.setdefault(kind, [])
        for tensor in made:
            if storage_users(tensor) == 1:
                return tensor.detach()
        with torch.inference_mode(False):
            made.append(torch.empty(shape, dtype=dtype, device=device))
        return made[-1].detach()

    def forget_unused(self) -> None:
        """Frees the kinds that were not asked for since this was called last."""
        for kind in [kind for kind in self._made if kind not in self._asked_for]:
            del self._made[kind]
        self._asked_for.clear()


# What was sent and has not left yet.
#
# Strategy. Most messages are with the operating system as soon as they are sent, and what was posted is looked at by
# the thread that waits for it; so that thread attends to all it starts, and none in the background is woken for it,
# which takes longer than a small message. A message that does not leave at once must not wait for this thread, which
# computes: until it has left, the background is called.
#
# A tensor of a device has left, for the CPU, when it is queued. The device's own stream waits for it at the end of the
# step only: what is computed meanwhile does not touch it.


class PendingSends:
    """Watches over sends. A context: inside, the calling thread attends to what it starts."""

    def __init__(self, group: ProcessGroup) -> None:
        """Makes an empty one.

        Args:
            group: whose backend sends.
        """
        self._group = group
        self._under_way: list[Work[None]] = []
        self._left: list[Work[None]] = []
        self._attendance: ExitStack | None = None

    def __enter__(self) -> PendingSends:
        self._attend()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._leave()

    def add(self, works: list[Work[None]]) -> None:
        """Takes sends that were started."""
        self._under_way += works
        self.look()

    def look(self) -> None:
        """Lets go of what has left.

        Raises:
            PeerFailed, Timeout: a send that failed.
        """
        under_way = []
        for work in self._under_way:
            if not work.is_completed():
                under_way.append(work)
            elif error := work.exception():
                raise error
            else:
                self._left.append(work)
        self._under_way = under_way
        if under_way:
            self._leave()
        else:
            self._attend()

    def flush(self) -> None:
        """Waits until all has left.

        Raises:
            PeerFailed, Timeout: a send that failed, or does not leave.
        """
        for work in (*self._left, *self._under_way):
            work.wait(self._group.timeout)
        self._left.clear()
        self._under_way.clear()

    def _attend(self) -> None:
        if self._attendance is None:
            self._attendance = ExitStack()
            self._attendance.enter_context(self._group.backend.will_wait())

    def _leave(self) -> None:
        if self._attendance is not None:
            self._attendance.close()
            self._attendance = None


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


class Transfers:
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
        self._tags: dict[Transfer, Tag] = {}

    def post(self, transfer: Transfer, peer: int) -> PendingReceive:
        """Returns a value that will arrive from rank `peer`."""
        seen = self._seen.setdefault(transfer, [])
        return PendingReceive(self._group, self._group.ranks[peer], transfer, self._tag(transfer), seen, self._buffers)

    def send(self, transfer: Transfer, peer: int, value: Value) -> list[Work[None]]:
        """Starts to send a value to rank `peer`; its tensors must not change before all Works are done.

        Raises:
            UnsupportedOp: it has more than 1023 tensors, or one without memory of its own, or is no nested value.
        """
        backend, dst, tag = self._group.backend, self._group.ranks[peer], self._tag(transfer)
        works = []
        for tensor, note in _messages(value):
            if not backend.send_at_once(tensor, dst, tag, note=note):
                work = backend.isend(tensor, dst, tag, note=note)
                work.lateness = MessageLateness(backend, (dst,), self._group.ranks, self._group.context)
                works.append(work)
            tag = tag._replace(step=tag.step + 1)
        return works

    def _tag(self, transfer: Transfer) -> Tag:
        """Returns the tag of the first message of a transfer; each of the others has the next step."""
        tag = self._tags.get(transfer)
        if tag is None:
            sequence = TRANSFERS | transfer.stage << 1 | transfer.backward
            tag = self._tags[transfer] = Tag(self._group.context, sequence, transfer.microbatch * _PARTS)
        return tag


class PendingReceive:
    """A value that is expected. Posted early, so that it can arrive while this rank computes."""

    __slots__ = ("_buffers", "_group", "_seen", "_src", "_tag", "_transfer", "_works")

    def __init__(
        self, group: ProcessGroup, src: int, transfer: Transfer, tag: Tag, seen: list[_Spec], buffers: Buffers
    ) -> None:
        self._group = group
        self._src = src
        self._transfer = transfer
        self._tag = tag
        self._seen = seen
        self._buffers = buffers
        self._works: list[Work[torch.Tensor]] = []
        if not group.backend.keeps_messages(src):
            self._works += [self._post(part) for part in range(max(1, len(seen)))]

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
            raise Timeout(f"{self._operation()}: {error}", error.ranks) from error
        tensors = iter(arrived)
        return value_of(structure, lambda requires_grad: _leaf(next(tensors), requires_grad))

    def withdraw(self) -> None:
        """Says that the value will not come: what comes with its tags is another."""
        for work in self._works:
            self._group.backend.cancel(work)

    def _arrived(self) -> tuple[str, list[torch.Tensor]]:
        """Waits for all messages; returns the structure, and the tensors."""
        first, note = self._take(0)
        if is_bare(note) and len(self._works) < 2 and self._looks_as_before(first):
            return note, [first]  # as mostly
        structure = bytes(first.numpy()).decode() if note == _APART else note
        count = num_tensors(structure) + (note == _APART)
        for work in self._works[count:]:
            self._group.backend.cancel(work)
        if self._works:
            self._works += [self._post(part) for part in range(len(self._works), count)]
        arrived = [first, *(self._take(part).tensor for part in range(1, count))]
        self._seen[:] = [_Spec(tensor.shape, tensor.dtype, tensor.device) for tensor in arrived]
        return structure, arrived[note == _APART :]

    def _looks_as_before(self, tensor: torch.Tensor) -> bool:
        return len(self._seen) == 1 and self._seen[0][:2] == (tensor.shape, tensor.dtype)

    def _take(self, part: int) -> Message:
        """Waits for a message."""
        group = self._group
        if self._works:
            work = self._works[part]
        else:
            tag, place = self._tag_of(part), self._place(part)
            if message := group.backend.recv_at_once(self._src, tag, out=place, note=None):
                return message
            work = self._post(part, place)
        return Message(wait_for(group.backend, work, [self._src], group.ranks, group.context, group.timeout), work.note)

    def _operation(self) -> str:
        """Says what this rank is doing, for errors."""
        return f"rank {self._group.backend.rank}, waiting for {_in_words(self._transfer)}"

    def _tag_of(self, part: int) -> Tag:
        return self._tag._replace(step=self._tag.step + part) if part else self._tag

    def _place(self, part: int) -> torch.Tensor | None:
        """Returns memory for a tensor like the last one, if the message does not come in memory of its own."""
        if part >= len(self._seen):
            return None
        spec = self._seen[part]
        num_bytes = spec.shape.numel() * spec.dtype.itemsize
        return None if self._group.backend.brings_memory(self._src, num_bytes) else self._buffers.take(*spec)

    def _post(self, part: int, place: torch.Tensor | None = None) -> Work[torch.Tensor]:
        place = self._place(part) if place is None else place
        return self._group.backend.irecv(self._src, self._tag_of(part), out=place, note=None, must_fit=False)


def _messages(value: Value) -> list[tuple[torch.Tensor, str]]:
    """Returns the tensors that say all, and their notes."""
    structure = structure_of(value)
    if isinstance(value, torch.Tensor):  # as mostly
        return [(_sendable(value), structure)]
    tensors = [_sendable(tensor) for tensor in tensors_of(value)]
    if len(tensors) >= _PARTS:
        raise UnsupportedOp(f"{len(tensors)} tensors pass between two stages: at most {_PARTS - 1} can; stack some")
    if tensors and (structure.isascii() and len(structure) <= MAX_NOTE_BYTES):
        return [(tensors[0], structure), *((tensor, "") for tensor in tensors[1:])]
    head = torch.frombuffer(bytearray(structure.encode()), dtype=torch.uint8)
    return [(head, _APART), *((tensor, "") for tensor in tensors)]


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    check_values(tensor, "a transfer between two stages")
    return plain(tensor)


def detached(value: Value) -> Value:
    """Returns a value whose tensors share memory with the given ones, but are leaves of a graph of their own."""
    return map_tensors(lambda tensor: _leaf(tensor, tensor.requires_grad), value)


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
