"""Pairs arriving messages with the receives that were posted for them.

Not locked: a backend calls it under its own lock. A message that nobody asked for yet is kept; its receive, when
posted, gets it. A receive that the message does not fit fails alone, the bytes are dropped, and the stream stays in
step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

import torch

from echelon.backends.base import Tag, Work
from echelon.backends.memory import bytes_of, describe, new_tensor
from echelon.backends.wire import as_sent
from echelon.errors import CollectiveMismatch, EchelonError, PeerFailed, SizeMismatch, UnsupportedOp

T = TypeVar("T")
Key: TypeAlias = tuple[int, Tag]
"""Source and tag."""


class Receive:
    """A receive that was posted."""

    __slots__ = ("note", "out", "src", "tag", "work")

    def __init__(
        self, work: Work[torch.Tensor], src: int, tag: Tag, out: torch.Tensor | None, note: str | None
    ) -> None:
        self.work = work
        self.src = src
        self.tag = tag
        self.out = out
        self.note = None if note is None else as_sent(note)

    def refusal(self, src: int, shape: tuple[int, ...], dtype: torch.dtype, note: str) -> EchelonError | None:
        """Returns why a message with this head cannot be the one waited for; None if it can."""
        if self.note is not None and note != self.note:
            return CollectiveMismatch(
                f"rank {src} is in {note or 'send'}, this rank in {self.note or 'recv'}: "
                "every rank must call the same operations in the same order with the same arguments"
            )
        if self.out is not None and (tuple(self.out.shape) != tuple(shape) or self.out.dtype != dtype):
            return SizeMismatch(
                describe(self.out.shape, self.out.dtype),
                describe(shape, dtype),
                f"receive from rank {src}, {self.tag}",
            )
        return None


class Delivery:
    """A message on its way: where its bytes go, and what happens when they are there."""

    __slots__ = ("_arrived", "_error", "_head", "_receive", "memory", "tag", "tensor")

    def __init__(
        self,
        src: int,
        tag: Tag,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        note: str,
        receive: Receive | None,
        whole: torch.Tensor | None = None,
    ) -> None:
        """Finds a place for the bytes, or takes the tensor that is there already, if it is given."""
        self._head = (src, shape, dtype, note)
        self._arrived = False
        self._error: EchelonError | None = None
        self._receive: Receive | None = None
        self.tag = tag
        self.tensor: torch.Tensor | None = None
        self.memory: memoryview | None = None
        """Where the bytes are to be written; None: drop them."""
        if receive is not None and (error := receive.refusal(*self._head)):
            receive.work.complete(error=error)
            return
        self._receive = receive
        if whole is not None:
            self.tensor = whole
            return
        try:
            self.tensor = new_tensor(shape, dtype) if receive is None or receive.out is None else receive.out
            self.memory = bytes_of(self.tensor)
        except UnsupportedOp as error:
            self.fail(error)

    @property
    def src(self) -> int:
        """The rank that sent it."""
        return self._head[0]

    def finish(self) -> None:
        """Says that every byte has arrived."""
        self._arrived = True
        if self._receive is not None:
            self._hand_over(self._receive)

    def attach(self, receive: Receive) -> None:
        """Gives a message that came unasked to the receive that now asks for it."""
        if error := receive.refusal(*self._head) or self._error:
            receive.work.complete(error=error)
            return
        self._receive = receive
        if self._arrived:
            self._hand_over(receive)

    def detach(self, work: Work[torch.Tensor]) -> bool:
        """Takes the message away from the receive of `work`, which is cancelled; returns False if it is not its own.

        What has arrived is kept elsewhere, and so will be the rest: nothing is written to the receive's tensor later.
        """
        if self._receive is None or self._receive.work is not work:
            return False
        if self._receive.out is not None and self.tensor is not None:
            self.tensor = self.tensor.detach().clone()
            self.memory = bytes_of(self.tensor)
        self._receive = None
        return True

    def fail(self, error: EchelonError) -> None:
        """Ends a delivery for the receive that it has or will get; bytes that still come are dropped."""
        self._error = error
        self.tensor = self.memory = None
        if self._receive is not None:
            self._receive.work.complete(error=error)
            self._receive = None

    def _hand_over(self, receive: Receive) -> None:
        assert self.tensor is not None
        if receive.out is not None and receive.out is not self.tensor:
            receive.out.detach().copy_(self.tensor)
            self.tensor = receive.out
        receive.work.note = self._head[3]
        receive.work.complete(self.tensor)


class Mailbox:
    """Posted receives and unclaimed messages of one rank."""

    def __init__(self) -> None:
        self.num_posted = 0
        """The number of receives that wait for the head of their message."""
        self._posted: dict[Key, deque[Receive]] = {}
        self._unclaimed: dict[Key, deque[Delivery]] = {}
        self._failed_peers: dict[int, EchelonError] = {}
        self._failed_contexts: dict[int, PeerFailed] = {}

    def post(self, receive: Receive) -> None:
        """Adds a receive; gives it the oldest unclaimed message of its source and tag, if there is one."""
        key = (receive.src, receive.tag)
        if delivery := _take_first(self._unclaimed, key):
            delivery.attach(receive)
        elif error := self.failure(receive.src, receive.tag):
            receive.work.complete(error=error)
        else:
            self._posted.setdefault(key, deque()).append(receive)
            self.num_posted += 1

    def arrive(self, src: int, tag: Tag, shape: tuple[int, ...], dtype: torch.dtype, note: str) -> Delivery:
        """Opens the delivery of a message whose head has arrived."""
        receive = _take_first(self._posted, (src, tag))
        self.num_posted -= receive is not None
        delivery = Delivery(src, tag, shape, dtype, note, receive)
        if tag.sequence > 0 and (error := self._failed_contexts.get(tag.context)):
            delivery.fail(error)
        elif receive is None:
            self._unclaimed.setdefault((src, tag), deque()).append(delivery)
        return delivery

    def take(self, src: int, tag: Tag, tensor: torch.Tensor, note: str) -> None:
        """Takes in a message that is there whole; the tensor must be nobody else's."""
        receive = _take_first(self._posted, (src, tag))
        self.num_posted -= receive is not None
        delivery = Delivery(src, tag, tuple(tensor.shape), tensor.dtype, note, receive, tensor)
        if receive is None:
            self._unclaimed.setdefault((src, tag), deque()).append(delivery)
        delivery.finish()

    def withdraw(self, work: Work[torch.Tensor], error: EchelonError, arriving: Iterable[Delivery] = ()) -> None:
        """Ends the receive of `work` with `error`. Its message, among those `arriving` perhaps, stays for the next."""
        for delivery in arriving:
            if delivery.detach(work):
                self._return(delivery)
        self._end(error, lambda receive: receive.work is work)
        work.complete(error=error)

    def _return(self, delivery: Delivery) -> None:
        """Gives a message back that is still arriving, so none of its source and tag can have come after it."""
        key = (delivery.src, delivery.tag)
        receive = _take_first(self._posted, key)
        self.num_posted -= receive is not None
        if receive is not None:
            delivery.attach(receive)
        else:
            self._unclaimed.setdefault(key, deque()).append(delivery)

    def fail_peer(self, rank: int, error: EchelonError) -> EchelonError:
        """Ends every receive from `rank`, now and later, except of messages that have arrived; returns the first
        cause."""
        first = self._failed_peers.setdefault(rank, error)
        self._end(first, lambda receive: receive.src == rank)
        return first

    def fail_context(self, context: int, error: PeerFailed, arriving: Iterable[Delivery] = ()) -> PeerFailed:
        """Ends every receive of a collective of that context, now and later; returns the first cause ever given.

        Messages of such collectives are dropped, those `arriving` included: nothing is written to a tensor later.
        """
        first = self._failed_contexts.setdefault(context, error)
        self._end(first, lambda receive: receive.tag.is_collective_of(context))
        for delivery in arriving:
            if delivery.tag.is_collective_of(context):
                delivery.fail(first)
        for key in [key for key in self._unclaimed if key[1].is_collective_of(context)]:
            del self._unclaimed[key]
        return first

    def fail_all(self, error: EchelonError) -> None:
        """Ends every posted receive."""
        self._end(error, lambda _: True)

    def failure(self, rank: int, tag: Tag) -> EchelonError | None:
        """Returns why nothing with this tag can be exchanged with `rank` any more."""
        if tag.sequence > 0 and (error := self._failed_contexts.get(tag.context)):
            return error
        return self._failed_peers.get(rank)

    def _end(self, error: EchelonError, concerns: Callable[[Receive], bool]) -> None:
        """Ends the posted receives that `concerns` picks."""
        ended = [receive for receives in self._posted.values() for receive in receives if concerns(receive)]
        for receive in ended:
            key = (receive.src, receive.tag)
            self._posted[key].remove(receive)
            if not self._posted[key]:
                del self._posted[key]
            receive.work.complete(error=error)
        self.num_posted -= len(ended)


def _take_first(queues: dict[Key, deque[T]], key: Key) -> T | None:
    """Removes and returns the first of a queue, and the queue with the last."""
    queue = queues.get(key)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first
