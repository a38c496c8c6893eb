"""Pairs arriving messages with the receives that were posted for them.

Not locked: a backend calls it under its own lock. A message that nobody asked for yet is kept; its receive, when
posted, gets it. A receive that the message does not fit fails alone, the bytes are dropped, and the stream stays in
step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch

from echelon.backends.base import Received, Tag, Work
from echelon.backends.memory import bytes_of, describe, new_tensor
from echelon.backends.wire import as_sent
from echelon.errors import CollectiveMismatch, EchelonError, PeerFailed, SizeMismatch, UnsupportedOp

T = TypeVar("T")
Key: TypeAlias = tuple[int, Tag]
"""Source and tag."""
ANY = -1
"""The source of a receive that takes a message from whoever sends first."""


class Receive:
    """A receive that was posted."""

    __slots__ = ("must_fit", "note", "number", "out", "sources", "src", "tag", "work")

    def __init__(
        self,
        work: Work[Any],
        src: int,
        tag: Tag,
        out: torch.Tensor | None,
        note: str | None,
        sources: Mapping[int, int] | None = None,
        must_fit: bool = True,
    ) -> None:
        """Describes a receive from rank `src`, or from ANY of `sources`, each with its number in the result."""
        self.work = work
        self.src = src
        self.tag = tag
        self.out = out
        self.note = None if note is None else as_sent(note)
        self.must_fit = must_fit
        self.sources = sources or {}
        self.number = 0
        """Which of all receives it was."""

    def complete(self, tensor: torch.Tensor, src: int, note: str) -> None:
        """Ends the receive with what came."""
        self.work.note = note
        self.work.complete(tensor if self.src != ANY else Received(tensor, self.sources[src], self.tag.step))

    def refusal(self, src: int, shape: tuple[int, ...], dtype: torch.dtype, note: str) -> EchelonError | None:
        """Returns why a message with this head cannot be the one waited for; None if it can.

        A place that it does not fit is given up, unless it must.
        """
        if self.note is not None and note != self.note:
            return CollectiveMismatch(
                f"rank {src} is in {note or 'send'}, this rank in {self.note or 'recv'}: "
                "every rank must call the same operations in the same order with the same arguments"
            )
        if self.out is not None and (tuple(self.out.shape) != tuple(shape) or self.out.dtype != dtype):
            if not self.must_fit:
                self.out = None
                return None
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

    def detach(self, work: Work[Any]) -> bool:
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
        src, _, _, note = self._head
        receive.complete(self.tensor, src, note)


class Mailbox:
    """Posted receives and unclaimed messages of one rank."""

    def __init__(self) -> None:
        self.num_posted = 0
        """The number of receives that wait for the head of their message."""
        self._num_from_any = 0
        """How many of them take a message from whoever sends first."""
        self._num_receives = 0
        self._posted: dict[Key, deque[Receive]] = {}
        self._unclaimed: dict[Key, deque[Delivery]] = {}
        self._served: dict[Tag, int] = {}
        """The source that a receive from any was served from last, where several had sent."""
        self._failed_peers: dict[int, PeerFailed] = {}
        self._left: set[int] = set()
        """Those of the failed peers that left in good order."""
        self._failed_contexts: dict[int, PeerFailed] = {}
        self._told: set[tuple[int, int]] = set()
        """Of which deaths receives from any were told: context and rank."""

    def post(self, receive: Receive) -> None:
        """Adds a receive; gives it the oldest unclaimed message of its source and tag, if there is one."""
        self._num_receives += 1
        receive.number = self._num_receives
        src = receive.src if receive.src != ANY else self._next_source(receive)
        if delivery := _take_first(self._unclaimed, (src, receive.tag)):
            delivery.attach(receive)
        elif error := self._failure_of(receive):
            receive.work.complete(error=error)
        else:
            self._posted.setdefault((receive.src, receive.tag), deque()).append(receive)
            self.num_posted += 1
            self._num_from_any += receive.src == ANY

    def _next_source(self, receive: Receive) -> int:
        """Returns whose message a receive from any is to get: the next after the one served last; ANY if none came."""
        waiting = sorted(src for src in receive.sources if (src, receive.tag) in self._unclaimed)
        if not waiting:
            self._served.pop(receive.tag, None)
            return ANY
        last = self._served.get(receive.tag, ANY)
        src = next((src for src in waiting if src > last), waiting[0])
        self._served[receive.tag] = src
        return src

    def _claim(self, src: int, tag: Tag) -> Receive | None:
        """Removes and returns the receive that a message is for: of those that can take it, the one posted first."""
        key = (src, tag)
        if self._num_from_any:
            own = self._posted.get(key)
            for from_any in self._posted.get((ANY, tag), ()):
                if own and own[0].number < from_any.number:
                    break
                if src in from_any.sources:
                    self._remove(from_any)
                    return from_any
        receive = _take_first(self._posted, key)
        self.num_posted -= receive is not None
        return receive

    def arrive(self, src: int, tag: Tag, shape: tuple[int, ...], dtype: torch.dtype, note: str) -> Delivery:
        """Opens the delivery of a message whose head has arrived."""
        receive = self._claim(src, tag)
        delivery = Delivery(src, tag, shape, dtype, note, receive)
        if tag.sequence > 0 and (error := self._failed_contexts.get(tag.context)):
            delivery.fail(error)
        elif receive is None:
            self._unclaimed.setdefault((src, tag), deque()).append(delivery)
        return delivery

    def take(self, src: int, tag: Tag, tensor: torch.Tensor, note: str) -> None:
        """Takes in a message that is there whole; the tensor must be nobody else's."""
        receive = self._claim(src, tag)
        delivery = Delivery(src, tag, tuple(tensor.shape), tensor.dtype, note, receive, tensor)
        if receive is None:
            self._unclaimed.setdefault((src, tag), deque()).append(delivery)
        delivery.finish()

    def withdraw(self, work: Work[Any], error: EchelonError, arriving: Iterable[Delivery] = ()) -> None:
        """Ends the receive of `work` with `error`. Its message, among those `arriving` perhaps, stays for the next."""
        for delivery in arriving:
            if delivery.detach(work):
                self._return(delivery)
        self._end(lambda receive: error if receive.work is work else None)
        work.complete(error=error)

    def _return(self, delivery: Delivery) -> None:
        """Gives a message back that is still arriving, so none of its source and tag can have come after it."""
        receive = self._claim(delivery.src, delivery.tag)
        if receive is not None:
            delivery.attach(receive)
        else:
            self._unclaimed.setdefault((delivery.src, delivery.tag), deque()).append(delivery)

    def fail_peer(self, rank: int, error: PeerFailed, in_good_order: bool = False) -> PeerFailed:
        """Ends every receive from `rank`, now and later, except of messages that have arrived.

        Of receives from any rank one is told of a death, and none of a rank that left in good order, unless nobody is
        left who could send.

        Returns:
            The first cause.
        """
        first = self._failed_peers.setdefault(rank, error)
        if in_good_order and first is error:
            self._left.add(rank)
        self._end(lambda receive: self._failure_of(receive) if rank == receive.src or rank in receive.sources else None)
        return first

    def fail_context(self, context: int, error: PeerFailed, arriving: Iterable[Delivery] = ()) -> PeerFailed:
        """Ends every receive of a collective of that context, now and later; returns the first cause ever given.

        Messages of such collectives are dropped, those `arriving` included: nothing is written to a tensor later.
        """
        first = self._failed_contexts.setdefault(context, error)
        self._end(lambda receive: first if receive.tag.is_collective_of(context) else None)
        for delivery in arriving:
            if delivery.tag.is_collective_of(context):
                delivery.fail(first)
        for key in [key for key in self._unclaimed if key[1].is_collective_of(context)]:
            del self._unclaimed[key]
        return first

    def fail_all(self, error: EchelonError) -> None:
        """Ends every posted receive."""
        self._end(lambda _: error)

    def failure(self, rank: int, tag: Tag) -> EchelonError | None:
        """Returns why nothing with this tag can be exchanged with `rank` any more."""
        if tag.sequence > 0 and (error := self._failed_contexts.get(tag.context)):
            return error
        return self._failed_peers.get(rank)

    def _failure_of(self, receive: Receive) -> EchelonError | None:
        """Returns why nothing more can come for a receive, or, once for each death, that a source of it has died."""
        if receive.src != ANY or receive.tag.is_collective_of(receive.tag.context):
            return self.failure(receive.src, receive.tag)
        gone = [src for src in receive.sources if src in self._failed_peers]
        for src in gone:
            death = (receive.tag.context, src)
            if src not in self._left and death not in self._told:
                self._told.add(death)
                return self._failed_peers[src]
        if len(gone) < len(receive.sources):
            return None
        last = self._failed_peers[gone[-1]]
        return PeerFailed(last.rank, f"{last.reason}, and nobody is left who could send")

    def _end(self, failure: Callable[[Receive], EchelonError | None]) -> None:
        """Ends those of the posted receives for which `failure` gives an error."""
        for receive in [receive for receives in self._posted.values() for receive in receives]:
            if error := failure(receive):
                self._remove(receive)
                receive.work.complete(error=error)

    def _remove(self, receive: Receive) -> None:
        """Takes back `post`."""
        key = (receive.src, receive.tag)
        self._posted[key].remove(receive)
        if not self._posted[key]:
            del self._posted[key]
        self.num_posted -= 1
        self._num_from_any -= receive.src == ANY


def _take_first(queues: dict[Key, deque[T]], key: Key) -> T | None:
    """Removes and returns the first of a queue, and the queue with the last."""
    queue = queues.get(key)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first
