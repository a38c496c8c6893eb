"""Transfers of nested values between stages of different ranks.

A value is one message per tensor. The note of the first message is the value's structure. Shapes and dtypes travel with
the messages, so nothing is agreed beforehand.

Strategy. The receiver expects as many tensors, of the same shapes, as the last time for this microbatch. It posts their
receives early, each with a buffer, unless the backend hands over the memory that the sender wrote to (`brings_memory`).
A message of another shape comes in memory of its own. If the backend keeps messages in memory until they are received
(`keeps_messages`), nothing is posted before the value is needed: an early receive gains nothing there.

The messages of a transfer have the same tags in every step. Messages with one tag keep their order, which tells the
steps apart. So state that both ends have prepared for a message serves the next step too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import NamedTuple, TypeAlias

import torch

from echelon._torch_private.autograd import forward_ad_level
from echelon._torch_private.tensors import storage_users, transform_stack
from echelon.backends.admission import check_values
from echelon.backends.formats.wire import MAX_NOTE_BYTES, TRANSFER_PARTS, Tag, transfer_tag
from echelon.backends.memory import plain
from echelon.backends.messages import PreparedReceive, PreparedSend
from echelon.backends.work import Message, Work
from echelon.call_site import with_line
from echelon.errors import PeerFailed, UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.group.message_wait import MessageLateness, wait_for
from echelon.pipeline.plan.action import Handover
from echelon.pipeline.stage.nested import BARE, Value, map_tensors, num_tensors, structure_of, tensors_of, value_of

_Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


class Pool:
    """Receive buffers of one kind, as many as were in use at once.

    A buffer is not given back. It is free once nothing refers to its memory: no graph of a microbatch, no output that
    the user kept, and no view of either.
    """

    __slots__ = ("_kind", "is_asked_for", "made")

    def __init__(self, kind: _Kind) -> None:
        self._kind = kind
        self.made: list[tuple[torch.Tensor, torch.UntypedStorage]] = []
        self.is_asked_for = False
        """Whether a buffer was taken since `Buffers.forget_unused`."""

    def take(self) -> torch.Tensor:
        """Returns a free buffer, or a new one: a contiguous tensor with any content."""
        self.is_asked_for = True
        for tensor, storage in self.made:
            # The pool itself is one user. Saved tensors and views own the storage without this tensor object, so its
            # reference count would not tell. The storage is kept, because in a step each call of torch takes 10 us.
            if storage_users(storage) == 1:
                return tensor.detach()
        shape, dtype, device = self._kind
        # A buffer made in inference mode could not be saved for backward when a training step uses it again.
        with torch.inference_mode(False):
            tensor = torch.empty(shape, dtype=dtype, device=device)
        self.made.append((tensor, tensor.untyped_storage()))
        return tensor.detach()


class Buffers:
    """Pools of receive buffers of one pipeline."""

    def __init__(self) -> None:
        # A pool stays when its buffers are freed: a receiver may refer to it.
        self._pools: dict[_Kind, Pool] = {}

    def __len__(self) -> int:
        """Returns the number of buffers."""
        return sum(len(pool.made) for pool in self._pools.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(storage.nbytes() for pool in self._pools.values() for _, storage in pool.made)

    def pool(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Pool:
        """Returns the pool of a kind."""
        kind = (shape, dtype, device)
        if kind not in self._pools:
            self._pools[kind] = Pool(kind)
        return self._pools[kind]

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a free buffer, or a new one: a contiguous tensor with any content."""
        return self.pool(shape, dtype, device).take()

    def forget_unused(self) -> None:
        """Frees the buffers of kinds that were not taken since the last call."""
        for pool in self._pools.values():
            if not pool.is_asked_for:
                pool.made.clear()
            pool.is_asked_for = False


class PendingSends:
    """Sends in flight. A context: inside, the calling thread drives its operations itself.

    Strategy. Most messages are with the operating system as soon as they are sent, and the thread that waits for a
    receive polls for it. So the thread promises to wait itself (`Backend.will_wait`), and no background thread is woken
    for it, which would take longer than a small message. A send that does not leave at once must not wait for this
    thread, which computes: until it has left, the promise is withdrawn and the background thread drives it.

    For the CPU, a tensor of a device has left when its send is queued. The device's own stream waits for the send only
    at the end of the step, since no computation of the step touches the tensor.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Begins without sends.

        Args:
            group: the group whose backend sends.
        """
        self._group = group
        self.in_flight: list[Work[None]] = []
        """Sends that had not left when `look` was last called. Call it again while there are some."""
        self._left: list[Work[None]] = []
        self._waits: AbstractContextManager[object] | None = None
        """Scope of the promise to wait; None while it is withdrawn."""

    def __enter__(self) -> PendingSends:
        self._promise(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._promise(False)

    def add(self, works: list[Work[None]]) -> None:
        """Adds sends that were started and did not leave at once."""
        self.in_flight += works
        self.look()

    def look(self) -> None:
        """Drops the sends that have left. Wakes the background thread if others have not. Does not wait.

        Raises:
            PeerFailed, Timeout: a send failed.
        """
        in_flight = []
        for work in self.in_flight:
            if not work.is_completed():
                in_flight.append(work)
            elif error := work.exception():
                raise error
            else:
                self._left.append(work)
        self.in_flight = in_flight
        self._promise(not in_flight)

    def flush(self) -> None:
        """Waits until all sends have left.

        Raises:
            PeerFailed, Timeout: a send failed, or did not leave in time.
        """
        # Finished Works too: on a device, `wait` has its stream wait for the send.
        for work in (*self._left, *self.in_flight):
            work.wait(self._group.timeout)
        self._left.clear()
        self.in_flight.clear()

    def _promise(self, waits: bool) -> None:
        if waits and self._waits is None:
            self._waits = self._group.backend.messages.will_wait()
            self._waits.__enter__()
        elif not waits and self._waits is not None:
            scope, self._waits = self._waits, None
            scope.__exit__(None, None, None)


_APART = "+"
"""Note of a message that carries the structure; the tensors follow in messages of their own."""


class _Expected(NamedTuple):
    """Tensor like the one that was received last."""

    shape: torch.Size
    dtype: torch.dtype
    pool: Pool | None
    """Buffers for it. None if it comes in memory that the sender wrote to."""


class Sender:
    """Sending end of a handover. It is prepared once, and used in every step."""

    __slots__ = ("_alone", "_backend", "_dst", "_group", "_handles", "_tag")

    def __init__(self, group: ProcessGroup, handover: Handover, peer: int) -> None:
        """Prepares to send to rank `peer` of the pipeline."""
        self._group, self._backend = group, group.backend
        self._dst = group.ranks[peer]
        self._tag = _tag(group, handover)
        # By number of the tensor in the value: its shape, dtype and note, and what sends it.
        self._handles: dict[int, tuple[tuple[torch.Size, torch.dtype, str], PreparedSend]] = {}
        # Of the last value, if that was one bare tensor: whether it required a gradient, and its handle.
        self._alone: tuple[bool, PreparedSend] | None = None

    def send(self, value: Value) -> list[Work[None]]:
        """Starts to send a value. Its tensors must not change before all returned Works are done.

        Raises:
            UnsupportedOp: the value has more than 1023 tensors or one without memory of its own, or is no nested value.
        """
        # Fast path: a bare tensor like the last one, which can leave now. Between two stages this code is cold, so it
        # calls little.
        if (
            (alone := self._alone) is not None
            and isinstance(value, torch.Tensor)
            and value.requires_grad is alone[0]
            and transform_stack() is None
            and forward_ad_level() < 0
            and alone[1].at_once(value)
        ):
            return []
        self._alone = None
        works: list[Work[None]] = []
        if isinstance(value, torch.Tensor):  # most stages pass one tensor
            messages = [(_sendable(value), "[true]" if value.requires_grad else "[false]")]
        else:
            messages = _messages(value)
        for part, (tensor, note) in enumerate(messages):
            handle = self._handle(part, tensor, note)
            # A message that can leave now needs no Work.
            if not handle.at_once(tensor):
                work = handle.start(tensor)
                work.lateness = MessageLateness(self._backend, (self._dst,), self._group.ranks, self._group.context)
                works.append(work)
        if isinstance(value, torch.Tensor):
            self._alone = value.requires_grad, self._handles[0][1]
        return works

    def _handle(self, part: int, tensor: torch.Tensor, note: str) -> PreparedSend:
        """Returns the handle that sends a tensor. Prepared again only if its shape, dtype or note is another."""
        kind = tensor.shape, tensor.dtype, note
        known = self._handles.get(part)
        if known is None or known[0] != kind:
            tag = self._tag._replace(step=self._tag.step + part)
            handle = self._backend.messages.prepare_send(self._dst, tag, tensor.shape, tensor.dtype, note=note)
            known = self._handles[part] = kind, handle
        return known[1]


class Receiver:
    """Receiving end of a handover. It is prepared once, and used in every step: `post`, then `wait`."""

    __slots__ = (
        "_backend",
        "_buffers",
        "_expected",
        "_group",
        "_handles",
        "_handover",
        "_src",
        "_tag",
        "_works",
        "is_kept",
    )

    def __init__(self, group: ProcessGroup, handover: Handover, peer: int, buffers: Buffers) -> None:
        """Prepares to receive from rank `peer` of the pipeline.

        Args:
            group: the ranks of the pipeline.
            handover: the value.
            peer: the rank that sends it.
            buffers: memory for received tensors.
        """
        self._group, self._backend = group, group.backend
        self._handover = handover
        self._src = group.ranks[peer]
        self._tag = _tag(group, handover)
        self._buffers = buffers
        self.is_kept = self._backend.messages.keeps_messages(self._src)
        """Whether its messages stay in memory until they are received. An early receive gains nothing then."""
        self._expected: list[_Expected] = []
        self._works: list[Work[torch.Tensor]] = []
        self._handles: list[PreparedReceive] = []

    def post(self) -> None:
        """Posts the receive, so that the value can arrive while this rank computes. Needless if `is_kept`."""
        self._works = [self._post(part) for part in range(max(1, len(self._expected)))]

    def wait(self) -> Value:
        """Waits for the value. Its tensors are leaves, and require a gradient if the sender's tensors did.

        Raises:
            PeerFailed, Timeout: the value will not come, or did not come in time.
        """
        try:
            place = None if self._works else self._place(0)
            first, note, _ = self._take(0, place)
            # Fast path: one bare tensor like the last one. A bare value has no structure to parse.
            is_alone = note in BARE and len(self._works) < 2 and len(self._expected) == 1
            if not is_alone or (first is not place and self._expected[0][:2] != (first.shape, first.dtype)):
                return self._put_together(first, note)
        except PeerFailed as error:
            receive = with_line(f"receive from rank {self._src}, {self._tag}")
            raise error.noticed_by(f"rank {self._backend.rank} in {receive}") from error
        self._works = []
        # Made for this value, so it is the leaf itself.
        return first.requires_grad_() if BARE[note] else first

    def withdraw(self) -> None:
        """Cancels a posted receive, so that the next value with the same tags does not arrive here."""
        for work in self._works:
            self._backend.messages.cancel(work)
        self._works = []

    def _put_together(self, first: torch.Tensor, note: str) -> Value:
        """Waits for the messages after the first one, and returns their value."""
        structure = bytes(first.numpy()).decode() if note == _APART else note
        count = num_tensors(structure) + (note == _APART)
        # Fewer or more tensors than the last time: receives without a message are cancelled, missing ones are posted.
        for work in self._works[count:]:
            self._backend.messages.cancel(work)
        if self._works:
            self._works += [self._post(part) for part in range(len(self._works), count)]
        arrived = [first, *(self._take(part, self._place(part)).tensor for part in range(1, count))]
        self._works = []
        self._expected = [_Expected(each.shape, each.dtype, self._pool(each)) for each in arrived]
        tensors = iter(arrived[note == _APART :])
        return value_of(structure, lambda requires_grad: _leaf(next(tensors), requires_grad))

    def _pool(self, arrived: torch.Tensor) -> Pool | None:
        """Returns the buffers for tensors like one. None if they need none."""
        if self._backend.messages.brings_memory(self._src, arrived.nbytes):
            return None
        return self._buffers.pool(arrived.shape, arrived.dtype, arrived.device)

    def _take(self, part: int, place: torch.Tensor | None) -> Message:
        """Waits for a tensor of the value. It goes into `place` if its receive was not posted before."""
        if self._works:
            work = self._works[part]
        else:
            # Fast path: a message that has arrived needs no Work.
            if message := self._handle(part).at_once(place):
                return message
            work = self._post(part, place)
        group = self._group
        ranks, context, timeout = group.ranks, group.context, group.timeout
        tensor = wait_for(self._backend, work, [self._src], ranks, context, timeout, is_blocking=True)
        return Message(tensor, work.note)

    def _place(self, part: int) -> torch.Tensor | None:
        """Returns a buffer for a tensor like the last one. None if there was none, or if it needs no buffer."""
        pool = self._expected[part].pool if part < len(self._expected) else None
        return None if pool is None else pool.take()

    def _post(self, part: int, place: torch.Tensor | None = None) -> Work[torch.Tensor]:
        place = self._place(part) if place is None else place
        return self._handle(part).start(place)

    def _handle(self, part: int) -> PreparedReceive:
        if part == len(self._handles):
            tag = self._tag._replace(step=self._tag.step + part)
            # must_fit=False: shapes may change from step to step, and are known only when the message is there.
            receive = self._backend.messages.prepare_receive(self._src, tag, note=None, must_fit=False)
            self._handles.append(receive)
        return self._handles[part]


def _tag(group: ProcessGroup, handover: Handover) -> Tag:
    return transfer_tag(group.context, handover.stage, handover.microbatch, is_gradient=handover.backward)


def _messages(value: Value) -> list[tuple[torch.Tensor, str]]:
    """Returns the messages of a value: tensors and their notes."""
    structure = structure_of(value)
    tensors = [_sendable(tensor) for tensor in tensors_of(value)]
    if len(tensors) >= TRANSFER_PARTS:
        most = TRANSFER_PARTS - 1
        raise UnsupportedOp(f"{len(tensors)} tensors pass between two stages: at most {most} can; stack some")
    if tensors and (structure.isascii() and len(structure) <= MAX_NOTE_BYTES):
        return [(tensors[0], structure), *((tensor, "") for tensor in tensors[1:])]
    # A structure that does not fit into a note, or has no tensor to go with, is a message of bytes.
    head = torch.frombuffer(bytearray(structure.encode()), dtype=torch.uint8)
    return [(head, _APART), *((tensor, "") for tensor in tensors)]


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    check_values(tensor, "a transfer between two stages")
    return plain(tensor)


def detached(value: Value) -> Value:
    """Returns the value with its tensors detached: leaves of a new graph, with the same memory."""
    return map_tensors(lambda tensor: _leaf(tensor, tensor.requires_grad), value)


def _leaf(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if requires_grad else leaf
