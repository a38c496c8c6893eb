"""Messages between two ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from echelon.arguments import check_seconds, named
from echelon.backends.formats.wire import Tag
from echelon.backends.memory import describe, is_ordinary, plain
from echelon.backends.modes import announce_change
from echelon.backends.work import Received, Work, end_with
from echelon.errors import EchelonError, InvalidArgument, InvalidWorldSize
from echelon.group.base import GroupBase, Seconds
from echelon.group.message_wait import MessageLateness, receive, wait_for
from echelon.operation_records import OperationRecord

T = TypeVar("T")
K = TypeVar("K")

_MAX_KNOWN = 256


class SendTo(NamedTuple):
    """One message of a batch, to rank `dst`."""

    tensor: Tensor
    dst: int
    tag: int = 0


class RecvFrom(NamedTuple):
    """One message of a batch, from rank `src`; `out` is written, None: a new tensor."""

    src: int
    tag: int = 0
    out: Tensor | None = None


class _Known(NamedTuple):
    """What a call like one before begins with, which was checked then."""

    peer: int
    tag: Tag
    words: str
    """For its record."""
    num_bytes: int = 0


Sends: TypeAlias = dict[tuple[int, int, torch.Size, torch.dtype], _Known]
Receives: TypeAlias = dict[tuple[int, int, torch.dtype | None], _Known]


class PointToPoint(GroupBase):
    """What one rank says to another; the two need call nothing else in the same order."""

    _known_sends: Sends
    """By peer, tag, shape and dtype."""
    _known_receives: Receives
    """By peer, tag and the dtype of `out`."""

    def send(self, tensor: Tensor, dst: int, tag: int = 0, timeout: Seconds = None) -> None:
        """Sends a tensor to rank `dst`; returns when `tensor` may be changed again, not when it was received.

        A tensor on a GPU, which an engine carries, may be changed once its receive has come.
        """
        if timeout is not None:
            check_seconds(timeout)
        values, peer, own_tag, flight = self._sending(tensor, dst, tag)
        if self.backend.send_at_once(values, peer, own_tag):
            flight.end()
            return
        with self.backend.will_wait():
            self._wait(self._send(values, peer, own_tag, flight), [dst], timeout)

    def recv(self, src: int, tag: int = 0, out: Tensor | None = None, timeout: Seconds = None) -> Tensor:
        """Returns the next tensor that rank `src` sends with this tag; its shape and dtype travel along.

        Args:
            src: the sender.
            tag: 0 to 2**32 - 1.
            out: written and returned; None: a new tensor.
            timeout: seconds. After a Timeout `out` will not be written any more.

        Raises:
            SizeMismatch: the tensor does not fit `out`; it is dropped, and the group stays usable.
        """
        if timeout is not None:
            check_seconds(timeout)
        peer, own_tag, flight = self._receiving(src, tag, out)
        message = self.backend.recv_at_once(peer, own_tag, out=out)
        if message is not None:
            end_with(flight, message.tensor)
            return message.tensor
        with self.backend.will_wait():
            return self._receive(self._recv(peer, own_tag, out, flight), [src], timeout)

    def recv_any(self, tag: int = 0, timeout: Seconds = None) -> Received:
        """Returns the next tensor that any rank of the group sends with this tag, and which rank it was.

        Fair: of ranks whose tensors wait, the next after the one served last is served first. A tensor that arrived is
        returned even if its sender has died since.

        Args:
            tag: 0 to 2**32 - 1.
            timeout: seconds.

        Raises:
            PeerFailed: a rank of the group died or left with an exception. Each death is told to one call, by which
                time everything else that had arrived was returned; the calls after it wait for those that are left. A
                rank that has closed its group is only missed when nobody is left who could send.
            InvalidWorldSize: the group has one rank.
        """
        if timeout is not None:
            check_seconds(timeout)
        with self.backend.will_wait():
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            return self._receive(self.irecv_any(tag), others, timeout)

    def sendrecv(
        self, tensor: Tensor, dst: int, src: int, tag: int = 0, out: Tensor | None = None, timeout: Seconds = None
    ) -> Tensor:
        """Sends a tensor to rank `dst` and returns the next one that rank `src` sends, both at once.

        Args:
            tensor, dst: as in `send`.
            src, out: as in `recv`; `src` may be `dst`.
            tag: of both.
            timeout: seconds for both.

        Raises:
            SizeMismatch: as in `recv`.
        """
        deadline = self.backend.now() + (self.timeout if timeout is None else check_seconds(timeout))
        with self.backend.will_wait():
            receipt, sent = self.batch_isend_irecv([RecvFrom(src, tag, out), SendTo(tensor, dst, tag)])
            came = self._receive(cast("Work[Tensor]", receipt), [src], deadline - self.backend.now())
            self._wait(cast("Work[None]", sent), [dst], deadline - self.backend.now())
            return came

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work[None]:
        """Starts to send a tensor to rank `dst`; it must not change until the Work is done."""
        return self._send(*self._sending(tensor, dst, tag))

    def irecv(self, src: int, tag: int = 0, out: Tensor | None = None) -> Work[Tensor]:
        """Starts to receive a tensor from rank `src`; the Work's result is the tensor. `out` must be contiguous."""
        peer, own_tag, flight = self._receiving(src, tag, out)
        return self._recv(peer, own_tag, out, flight)

    def irecv_any(self, tag: int = 0) -> Work[Received]:
        """Starts to receive a tensor from any rank; the Work's result is what `recv_any` returns."""
        self._check_open()
        if self.world_size == 1:
            raise InvalidWorldSize("recv_any in a group of 1 rank: there is nobody who could send")
        others = {peer: rank for rank, peer in enumerate(self.ranks) if rank != self.rank}
        work = self.backend.irecv_any(others, self._tag(tag))
        work.record(self._recorded(f"receive from any rank, tag {tag}"))
        work.lateness = MessageLateness(self.backend, tuple(others), self.ranks, self.context)
        return work

    def batch_isend_irecv(self, messages: Sequence[SendTo | RecvFrom]) -> list[Work[Tensor] | Work[None]]:
        """Starts to send and to receive several tensors; returns their Works in the order of `messages`.

        Nothing is started unless all of it can be. Receives are started before sends, whatever their order, so that
        what is received need not be kept elsewhere first.

        Args:
            messages: what `isend` and `irecv` would be given; those with one peer and one tag keep their order.
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
        with self.backend.will_wait():
            for number, message in enumerate(messages):
                if isinstance(message, RecvFrom):
                    works[number] = self.irecv(*message)
            for number, message in enumerate(messages):
                if isinstance(message, SendTo):
                    works[number] = self.isend(*message)
        return [works[number] for number in range(len(messages))]

    def _sending(self, tensor: Tensor, dst: int, tag: int) -> tuple[Tensor, int, Tag, OperationRecord]:
        """Returns a message's values, where it goes, and its record, when it was checked; a tuple costs the least."""
        self._check_open()
        if isinstance(tensor, Tensor) and isinstance(dst, int) and isinstance(tag, int) and is_ordinary(tensor):
            kind = dst, tag, tensor.shape, tensor.dtype
            known = self._known_sends.get(kind)
            if known is None:
                known = self._known_send(tensor, dst, tag)
                _remember(self._known_sends, kind, known)
            values = tensor
        else:
            known, values = self._known_send(tensor, dst, tag), plain(tensor)
        peer, own_tag, words, num_bytes = known
        return values, peer, own_tag, self._recorded(words, num_bytes)

    def _known_send(self, tensor: Tensor, dst: int, tag: int) -> _Known:
        self._check_message(tensor)
        peer = self._peer(dst, "dst")
        words = f"send to rank {peer}, tag {tag} of {describe(tensor.shape, tensor.dtype)}"
        return _Known(peer, self._tag(tag), words, tensor.nbytes)

    def _send(self, tensor: Tensor, peer: int, tag: Tag, flight: OperationRecord) -> Work[None]:
        try:
            work = self.backend.isend(tensor, peer, tag)
        except EchelonError as error:
            flight.end(error)
            raise
        work.record(flight)
        if not work.has_ended:
            work.lateness = MessageLateness(self.backend, (peer,), self.ranks, self.context)
        return work

    def _receiving(self, src: int, tag: int, out: Tensor | None) -> tuple[int, Tag, OperationRecord]:
        self._check_open()
        is_out_ordinary = out is None or (isinstance(out, Tensor) and is_ordinary(out))
        if isinstance(src, int) and isinstance(tag, int) and is_out_ordinary:
            kind = src, tag, None if out is None else out.dtype
            known = self._known_receives.get(kind)
            if known is None:
                known = self._known_receive(src, tag, out)
                _remember(self._known_receives, kind, known)
        else:
            known = self._known_receive(src, tag, out)
        if out is not None:
            announce_change(out)
        peer, own_tag, words, _ = known
        return peer, own_tag, self._recorded(words)

    def _known_receive(self, src: int, tag: int, out: Tensor | None) -> _Known:
        self._check_out(out)
        peer = self._peer(src, "src")
        return _Known(peer, self._tag(tag), f"receive from rank {peer}, tag {tag}")

    def _recv(self, peer: int, tag: Tag, out: Tensor | None, flight: OperationRecord) -> Work[Tensor]:
        try:
            work = self.backend.irecv(peer, tag, out=out)
        except EchelonError as error:
            flight.end(error)
            raise
        work.record(flight)
        if out is not None:
            work.overwrites((out,))
        if not work.has_ended:
            work.lateness = MessageLateness(self.backend, (peer,), self.ranks, self.context)
        return work

    def _recorded(self, operation: str, num_bytes: int = 0) -> OperationRecord:
        return self.backend.flight_recorder.begin(self.name, self.context, 0, 0, operation, num_bytes)

    def _wait(self, work: Work[T], peers: Sequence[int], timeout: Seconds) -> T:
        seconds = self.timeout if timeout is None else max(0.0, timeout)
        return wait_for(self.backend, work, [self.ranks[peer] for peer in peers], self.ranks, self.context, seconds)

    def _receive(self, work: Work[T], peers: Sequence[int], timeout: Seconds) -> T:
        """Waits for a receive, and withdraws it when its time is up."""
        seconds = self.timeout if timeout is None else max(0.0, timeout)
        return cast(
            "T",
            receive(self.backend, work, [self.ranks[peer] for peer in peers], self.ranks, self.context, seconds),
        )


def _remember(known: dict[K, _Known], kind: K, call: _Known) -> None:
    if len(known) >= _MAX_KNOWN:
        known.clear()
    known[kind] = call
