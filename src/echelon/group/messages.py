"""Point-to-point messages between two ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from echelon._torch_private.autograd import forward_ad_level
from echelon._torch_private.tensors import dispatch_depth, transform_stack, wraps_new_tensors
from echelon.arguments import check_seconds, named
from echelon.backends.admission import ORDINARY_TYPES
from echelon.backends.memory import describe, is_ordinary, plain
from echelon.backends.messages import NativeMessage, PreparedReceive, PreparedSend
from echelon.backends.modes import announce_change
from echelon.backends.work import Received, Work, end_with
from echelon.errors import EchelonError, InvalidArgument, InvalidWorldSize
from echelon.group.base import GroupBase, Seconds
from echelon.group.message_wait import MessageLateness, receive, wait_for
from echelon.operation_records import KnownOperation, OperationRecord

T = TypeVar("T")
K = TypeVar("K")

_MAX_KNOWN = 256


class SendTo(NamedTuple):
    """Send of a batch, to rank `dst`.

    Args:
        tensor, dst, tag: as in `ProcessGroup.send`.
    """

    tensor: Tensor
    dst: int
    tag: int = 0


class RecvFrom(NamedTuple):
    """Receive of a batch, from rank `src`, into `out` or a new tensor (None).

    Args:
        src, tag, out: as in `ProcessGroup.recv`.
    """

    src: int
    tag: int = 0
    out: Tensor | None = None


class _Send(NamedTuple):
    """Send that was checked, for all sends like it."""

    handle: PreparedSend
    words: str
    """Text of the operation's record."""
    num_bytes: int


class _Receive(NamedTuple):
    """Receive that was checked, for all receives like it."""

    handle: PreparedReceive
    words: str
    """Text of the operation's record."""


class PointToPoint(GroupBase):
    """Point-to-point messages. Sender and receiver need not make any other calls in the same order."""

    # By peer, tag, shape and dtype.
    _sends: dict[tuple[int, int, torch.Size, torch.dtype], _Send]
    # By peer, tag and the dtype of `out`.
    _receives: dict[tuple[int, int, torch.dtype | None], _Receive]
    # The last of each peer and tag.
    _last_sends: dict[tuple[int, int], _Send]
    _last_receives: dict[tuple[int, int], _Receive]
    # Messages that the native library makes.
    _learnt: set[NativeMessage]

    def send(self, tensor: Tensor, dst: int, tag: int = 0, timeout: Seconds = None) -> None:
        """Sends a tensor to rank `dst`. Blocks until `tensor` may be changed again, not until it was received.

        A send of a GPU tensor over a c10d backend blocks until rank `dst` has called its receive.

        Args:
            tensor: Any shape, and any dtype that can be sent.
            dst: Rank of the receiver.
            tag: 0 to 2**32 - 1. A receive takes messages with its own tag only.
            timeout: Seconds.

        Raises:
            InvalidRank, SelfSend: `dst` is no other rank of the group.
            SizeMismatch: `tag` is outside its range.
            PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        if timeout is not None:
            check_seconds(timeout)
        # Fast path between ranks that share memory: one call of the native library.
        if self._send_known(dst, tag, tensor):
            return
        # Fast path: a message like the last one with this rank and tag, that can leave now, needs no check and no Work.
        last = self._last_sends.get((dst, tag)) if type(dst) is int and type(tag) is int else None
        if last is not None and not _is_in_mode() and not self._runner.is_closed:
            recorder = self.backend.flight_recorder
            started = recorder.clock()
            if last.handle.at_once(tensor):
                record = recorder.begin(self.name, self.context, 0, 0, last.words, last.num_bytes)
                record.started, record.ended = started, record.started
                self._learn(dst, tag, last.handle, last.words, last.num_bytes)
                return
        values, handle, record = self._sending(tensor, dst, tag)
        if handle.at_once(values):
            record.ended = self.backend.flight_recorder.clock()
            return
        with self.backend.messages.will_wait():
            self._wait(self._send(values, handle, record), [dst], timeout)

    def recv(self, src: int, tag: int = 0, out: Tensor | None = None, timeout: Seconds = None) -> Tensor:
        """Returns the next tensor that rank `src` sends with this tag. Shape and dtype come with the message.

        Args:
            src: Rank of the sender.
            tag: 0 to 2**32 - 1.
            out: Overwritten and returned. None: a new tensor.
            timeout: Seconds. After a Timeout `out` is not written any more.

        Raises:
            SizeMismatch: the tensor does not fit `out`. It is dropped, and the group stays usable.
            InvalidRank, SelfSend: `src` is no other rank of the group.
            PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        if timeout is not None:
            check_seconds(timeout)
        # Fast paths, as in `send`.
        if (got := self._receive_known(src, tag, out)) is not False:
            return cast("Tensor", got)
        last = self._last_receives.get((src, tag)) if type(src) is int and type(tag) is int else None
        if last is not None and not _is_in_mode() and not self._runner.is_closed:
            if type(out) in ORDINARY_TYPES:
                announce_change(cast("Tensor", out))
            recorder = self.backend.flight_recorder
            started = recorder.clock()
            if message := last.handle.at_once(out):
                record = recorder.begin(self.name, self.context, 0, 0, last.words)
                record.started, record.ended = started, record.started
                record.got(message.what or describe(message.tensor.shape, message.tensor.dtype), message.tensor.nbytes)
                self._learn(src, tag, last.handle, record.operation, record.num_bytes)
                return message.tensor
        handle, record = self._receiving(src, tag, out)
        message = handle.at_once(out)
        if message is not None:
            end_with(record, message.tensor)
            return message.tensor
        with self.backend.messages.will_wait():
            return self._receive(self._recv(handle, out, record), [src], timeout, is_blocking=timeout is None)

    def recv_any(self, tag: int = 0, timeout: Seconds = None) -> Received:
        """Returns the next tensor that any rank of the group sends with this tag, and the rank of its sender.

        Fair: of the ranks with pending tensors, the next one after the last sender is served first. A tensor that
        arrived is returned even if its sender has died since.

        Args:
            tag: 0 to 2**32 - 1.
            timeout: Seconds.

        Raises:
            PeerFailed: a rank of the group died or left with an exception. Each death raises in one call, after all
                tensors that had arrived were returned. Later calls wait for the remaining ranks. A rank that closed its
                group raises only when no other rank could send any more.
            InvalidWorldSize: the group has one rank.
            DeadlockError, Timeout, Closed: as for the class.
        """
        if timeout is not None:
            check_seconds(timeout)
        with self.backend.messages.will_wait():
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            return self._receive(self.irecv_any(tag), others, timeout, is_blocking=timeout is None)

    def sendrecv(
        self, tensor: Tensor, dst: int, src: int, tag: int = 0, out: Tensor | None = None, timeout: Seconds = None
    ) -> Tensor:
        """Sends a tensor to rank `dst` and returns the next tensor from rank `src`, both at the same time.

        Args:
            tensor, dst: As in `send`.
            src, out: As in `recv`. `src` may equal `dst`.
            tag: Tag of both messages.
            timeout: Seconds for both together.

        Raises:
            SizeMismatch: as in `recv`.
            InvalidRank, SelfSend: `dst` or `src` is no other rank of the group.
            PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        deadline = self.backend.now() + (self.timeout if timeout is None else check_seconds(timeout))
        with self.backend.messages.will_wait():
            receipt, sent = self.batch_isend_irecv([RecvFrom(src, tag, out), SendTo(tensor, dst, tag)])
            left = deadline - self.backend.now()
            came = self._receive(cast("Work[Tensor]", receipt), [src], left, is_blocking=timeout is None)
            self._wait(cast("Work[None]", sent), [dst], deadline - self.backend.now())
            return came

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work[None]:
        """Starts to send a tensor to rank `dst`. Does not block. Returns a Work, which raises errors of the message.

        Args:
            tensor: As in `send`. It must not change until the Work is done.
            dst, tag: As in `send`.

        Raises:
            InvalidRank, SelfSend, SizeMismatch: As in `send`.
            Closed: as for the class. Other errors come from the Work.
        """
        return self._send(*self._sending(tensor, dst, tag))

    def irecv(self, src: int, tag: int = 0, out: Tensor | None = None) -> Work[Tensor]:
        """Starts to receive a tensor from rank `src`. Does not block. Returns a Work with the tensor as its result.

        Args:
            src, tag: As in `recv`.
            out: Overwritten; contiguous. It must not be used until the Work is done. None: a new tensor.

        Raises:
            InvalidRank, SelfSend: `src` is no other rank of the group.
            UnsupportedOp: `out` is not contiguous.
            Closed: as for the class. Other errors come from the Work.
        """
        handle, record = self._receiving(src, tag, out)
        return self._recv(handle, out, record)

    def irecv_any(self, tag: int = 0) -> Work[Received]:
        """Starts to receive a tensor from any rank. Does not block. Returns a Work with the result of `recv_any`.

        Args:
            tag: As in `recv`.

        Raises:
            InvalidWorldSize: the group has one rank.
            Closed: as for the class. Other errors come from the Work.
        """
        self._runner.check_open()
        if self.world_size == 1:
            raise InvalidWorldSize("recv_any in a group of 1 rank: there is nobody who could send")
        others = {peer: rank for rank, peer in enumerate(self.ranks) if rank != self.rank}
        work = self.backend.messages.irecv_any(others, self._tag(tag))
        work.record(self._recorded(f"receive from any rank, tag {tag}"))
        work.lateness = MessageLateness(self.backend, tuple(others), self.ranks, self.context)
        return work

    def batch_isend_irecv(self, messages: Sequence[SendTo | RecvFrom]) -> list[Work[Tensor] | Work[None]]:
        """Starts to send and to receive several tensors, and returns their Works in the order of `messages`.

        All messages are checked before the first one starts. Messages of one peer and one tag keep their order.

        Args:
            messages: Arguments of `isend` and `irecv`, as SendTo and RecvFrom.

        Raises:
            InvalidArgument: `messages` is no list of SendTo and RecvFrom.
            InvalidRank, SelfSend, SizeMismatch, UnsupportedOp: As in `isend` and `irecv`, for any of the messages.
            Closed: as for the class. Other errors come from the Works.
        """
        works: dict[int, Work[Tensor] | Work[None]] = {}
        if not isinstance(messages, Sequence):
            raise InvalidArgument(f"messages is {named(messages)}: give a list of SendTo(...) and RecvFrom(...)")
        for message in messages:
            match message:
                case _ if not isinstance(message, SendTo | RecvFrom):
                    raise InvalidArgument(
                        f"batch_isend_irecv takes SendTo(tensor, dst) and RecvFrom(src), not {type(message).__name__}"
                    )
                case SendTo(tensor, dst, tag):
                    self._check_message(tensor)
                    self._peer(dst, "dst")
                case RecvFrom(src, tag, out):
                    self._check_out(out)
                    if out is not None:
                        announce_change(out)
                    self._peer(src, "src")
            self._tag(tag)
        with self.backend.messages.will_wait():
            # Receives first, in any order of `messages`: an arriving message then finds its buffer posted.
            for number, message in enumerate(messages):
                if isinstance(message, RecvFrom):
                    works[number] = self.irecv(*message)
            for number, message in enumerate(messages):
                if isinstance(message, SendTo):
                    works[number] = self.isend(*message)
        return [works[number] for number in range(len(messages))]

    def _sending(self, tensor: Tensor, dst: int, tag: int) -> tuple[Tensor, PreparedSend, OperationRecord]:
        """Checks a send. Returns its values, its handle and its record."""
        # Checks types before the look-up, since a wrong argument may not be hashable; `_prepare_send` then raises.
        if isinstance(dst, int) and isinstance(tag, int) and is_ordinary(tensor) and not self._runner.is_closed:
            kind = dst, tag, tensor.shape, tensor.dtype
            known = self._sends.get(kind)
            if known is None:
                known = self._prepare_send(tensor, dst, tag)
                _remember(self._sends, kind, known)
            _remember(self._last_sends, (dst, tag), known)
            values = tensor
        else:
            known, values = self._prepare_send(tensor, dst, tag), plain(tensor)
        return values, known.handle, self._recorded(known.words, known.num_bytes)

    def _prepare_send(self, tensor: Tensor, dst: int, tag: int) -> _Send:
        self._check_message(tensor)
        peer = self._peer(dst, "dst")
        words = f"send to rank {peer}, tag {tag} of {describe(tensor.shape, tensor.dtype)}"
        handle = self.backend.messages.prepare_send(peer, self._tag(tag), tensor.shape, tensor.dtype)
        return _Send(handle, words, tensor.nbytes)

    def _send(self, tensor: Tensor, handle: PreparedSend, record: OperationRecord) -> Work[None]:
        try:
            work = handle.start(tensor)
        except EchelonError as error:
            record.end(error)
            raise
        work.record(record)
        if not work.has_ended:
            work.lateness = MessageLateness(self.backend, (handle.dst,), self.ranks, self.context)
        return work

    def _learn(
        self, peer: int, tag: int, handle: PreparedSend | PreparedReceive, operation: str, num_bytes: int
    ) -> None:
        """Has the native library make the next messages like one, if it can."""
        known = self._runner.known
        if known is None:  # memory is shared for messages alone, as beside Gloo
            return
        native = handle.native()
        if native is None or native in self._learnt:
            return
        if len(self._learnt) >= _MAX_KNOWN:
            self._learnt.clear()
        self._learnt.add(native)
        call = KnownOperation(self.name, self.context, operation, num_bytes)
        known.learn_message(peer, tag, native, call)

    def _receiving(self, src: int, tag: int, out: Tensor | None) -> tuple[PreparedReceive, OperationRecord]:
        """Checks a receive. Returns its handle and its record."""
        is_out_ordinary = not wraps_new_tensors() if out is None else is_ordinary(out)
        if isinstance(src, int) and isinstance(tag, int) and is_out_ordinary and not self._runner.is_closed:
            kind = src, tag, None if out is None else out.dtype
            known = self._receives.get(kind)
            if known is None:
                known = self._prepare_receive(src, tag, out)
                _remember(self._receives, kind, known)
            _remember(self._last_receives, (src, tag), known)
        else:
            known = self._prepare_receive(src, tag, out)
        if out is not None:
            announce_change(out)
        return known.handle, self._recorded(known.words)

    def _prepare_receive(self, src: int, tag: int, out: Tensor | None) -> _Receive:
        self._check_out(out)
        peer = self._peer(src, "src")
        handle = self.backend.messages.prepare_receive(peer, self._tag(tag))
        return _Receive(handle, f"receive from rank {peer}, tag {tag}")

    def _recv(self, handle: PreparedReceive, out: Tensor | None, record: OperationRecord) -> Work[Tensor]:
        try:
            work = handle.start(out)
        except EchelonError as error:
            record.end(error)
            raise
        work.record(record)
        if out is not None:
            work.overwrites((out,))
        if not work.has_ended:
            work.lateness = MessageLateness(self.backend, (handle.src,), self.ranks, self.context, is_receive=True)
        return work

    def _recorded(self, operation: str, num_bytes: int = 0) -> OperationRecord:
        return self.backend.flight_recorder.begin(self.name, self.context, 0, 0, operation, num_bytes)

    def _wait(self, work: Work[T], peers: Sequence[int], timeout: Seconds) -> T:
        seconds = self.timeout if timeout is None else max(0.0, timeout)
        return wait_for(self.backend, work, [self.ranks[peer] for peer in peers], self.ranks, self.context, seconds)

    def _receive(self, work: Work[T], peers: Sequence[int], timeout: Seconds, *, is_blocking: bool) -> T:
        """Waits for a receive, and cancels it at the timeout."""
        seconds = self.timeout if timeout is None else max(0.0, timeout)
        sources = [self.ranks[peer] for peer in peers]
        return receive(self.backend, work, sources, self.ranks, self.context, seconds, is_blocking=is_blocking)


def _is_in_mode() -> bool:
    """Whether a mode of torch may change tensors of this thread, so that a call has to be checked."""
    return dispatch_depth() > 0 or transform_stack() is not None or forward_ad_level() >= 0


def _remember(known: dict[K, T], kind: K, call: T) -> None:
    # Bounded, since a program may use ever new shapes and tags.
    if len(known) >= _MAX_KNOWN:
        known.clear()
    known[kind] = call
