"""Pairs arriving messages with the receives that were posted for them.

Not locked: a backend calls it under its own lock. A message that nobody asked for yet is kept; its receive, when
posted, gets it. How much is kept is counted for each source, so that a backend can set a limit. A receive that the
message does not fit fails alone, the bytes are dropped, and the stream stays in step.
"""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

import torch

from echelon.backends.delivery import ANY, IncomingMessage, Receive
from echelon.backends.formats.wire import Tag
from echelon.backends.memory import copy_from, new_tensor
from echelon.backends.work import Message, Work
from echelon.errors import EchelonError, Failure, PeerFailed

T = TypeVar("T")
Key: TypeAlias = tuple[int, Tag]
"""Source and tag."""


class Unclaimed:
    """Messages that nobody has asked for yet, by source and tag."""

    def __init__(self) -> None:
        self.num_bytes: Counter[int] = Counter()
        """Memory of each rank's messages in bytes, arriving ones included."""
        self.messages: dict[Key, deque[IncomingMessage]] = {}
        self._served: dict[Tag, int] = {}
        """Source of the latest receive from any rank, by tag, if messages of several ranks were waiting."""

    def __contains__(self, key: Key) -> bool:
        return key in self.messages

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self.messages))

    def keep(self, delivery: IncomingMessage) -> None:
        """Adds a message."""
        self.messages.setdefault((delivery.src, delivery.tag), deque()).append(delivery)
        self.num_bytes[delivery.src] += delivery.memory_bytes

    def take(self, key: Key) -> IncomingMessage | None:
        """Removes and returns the oldest message of a source with a tag. None if there is none."""
        if key not in self.messages:
            return None
        delivery = _take_first(self.messages, key)
        if delivery is not None:
            self.num_bytes[delivery.src] -= delivery.memory_bytes
        return delivery

    def take_whole(self, key: Key, out: torch.Tensor | None, note: str | None) -> Message | None:
        """Fast path: removes and returns the oldest message, if it has arrived whole and fits. None otherwise."""
        queue = self.messages.get(key)
        message = queue[0].take(out, note) if queue else None
        if message is not None:
            self.take(key)
        return message

    def next_source(self, receive: Receive) -> int:
        """Returns the source of the next message for a receive from any rank, in turns. ANY if no message is there."""
        waiting = sorted(src for src in receive.sources if (src, receive.tag) in self.messages)
        if not waiting:
            # Else each tag that was ever received from any rank would keep an entry.
            self._served.pop(receive.tag, None)
            return ANY
        last = self._served.get(receive.tag, ANY)
        src = next((src for src in waiting if src > last), waiting[0])
        self._served[receive.tag] = src
        return src

    def drop_context(self, context: int) -> None:
        """Drops the messages of a context's collectives."""
        for key in [key for key in self.messages if key[1].is_collective_of(context)]:
            while self.take(key) is not None:
                pass


class Failures:
    """Failed peers and revoked contexts, as far as a rank has heard. The first cause of each stays."""

    def __init__(self) -> None:
        self.peers: dict[int, PeerFailed] = {}
        self.contexts: dict[int, Failure] = {}
        self.has_withdrawn = False
        """Whether a receive was withdrawn."""
        self._told: set[tuple[int, int]] = set()
        """Deaths, as context and rank, that a receive from any rank has reported."""

    @property
    def has_any(self) -> bool:
        """Whether anything went wrong that a program may have dealt with: a peer or a context, or a withdrawn receive.

        A peer that has closed in good order does not count.
        """
        return self.has_withdrawn or bool(self.contexts) or any(not error.has_closed for error in self.peers.values())

    def revoked(self, context: int) -> Failure | None:
        """Returns the failure that revoked a context. None if there is none."""
        return self.contexts.get(context)

    def of(self, rank: int, tag: Tag) -> Failure | None:
        """Returns the failure that prevents messages of this tag to and from `rank`. None if there is none."""
        if tag.sequence > 0 and (error := self.contexts.get(tag.context)):
            return error
        return self.peers.get(rank)

    def of_receive(self, receive: Receive) -> EchelonError | None:
        """Returns the failure of a receive: none of its sources can send, or one has died, once for each death."""
        if receive.src != ANY or receive.tag.is_collective_of(receive.tag.context):
            return self.of(receive.src, receive.tag)
        gone = [src for src in receive.sources if src in self.peers]
        for src in gone:
            death = (receive.tag.context, src)
            if not self.peers[src].has_closed and death not in self._told:
                self._told.add(death)
                return self.peers[src]
        if len(gone) < len(receive.sources):
            return None
        last = self.peers[gone[-1]]
        return PeerFailed(last.rank, f"{last.reason}, and no rank is left that could send")


class Mailbox:
    """Posted receives and unclaimed messages of one rank."""

    def __init__(self) -> None:
        self.num_posted = 0
        """Number of receives that wait for the header of their message."""
        self.unclaimed = Unclaimed()
        self.failures = Failures()
        self.claimed: defaultdict[int, ctypes.c_uint64] = defaultdict(ctypes.c_uint64)
        """Number of messages of each rank that a receive has taken, without the messages of collectives. The native
        library counts, too."""
        self._num_from_any = 0
        """Number of posted receives that take a message from any rank."""
        self._num_receives = 0
        self.posted: dict[Key, deque[Receive]] = {}
        """Receives that wait for the header of their message, by source and tag."""

    def post(self, receive: Receive) -> None:
        """Adds a receive; gives it the oldest unclaimed message of its source and tag, if there is one."""
        self._num_receives += 1
        receive.number = self._num_receives
        src = receive.src if receive.src != ANY else self.unclaimed.next_source(receive)
        if delivery := self.unclaimed.take((src, receive.tag)):
            self.count_claimed(src, receive.tag)
            delivery.attach(receive)
        elif (self.failures.peers or self.failures.contexts) and (error := self.failures.of_receive(receive)):
            receive.work.complete(error=error)
        else:
            key = (receive.src, receive.tag)
            if (queue := self.posted.get(key)) is None:
                queue = self.posted[key] = deque()
            queue.append(receive)
            self.num_posted += 1
            self._num_from_any += receive.src == ANY

    def _claim(self, src: int, tag: Tag) -> Receive | None:
        """Removes and returns the oldest posted receive that matches a message. None if there is none."""
        key = (src, tag)
        if self._num_from_any:
            own = self.posted.get(key)
            for from_any in self.posted.get((ANY, tag), ()):
                # Receives get their messages in the order of their calls.
                if own and own[0].number < from_any.number:
                    break
                if src in from_any.sources:
                    self._remove(from_any)
                    self.count_claimed(src, tag)
                    return from_any
        receive = _take_first(self.posted, key)
        if receive is not None:
            self.num_posted -= 1
            self.count_claimed(src, tag)
        return receive

    def count_claimed(self, src: int, tag: Tag) -> None:
        """Counts a message that a receive has got, unless it is that of a collective."""
        if tag.sequence == 0:
            self.claimed[src].value += 1

    def num_come(self, src: int) -> int:
        """Returns the number of messages that have come from a rank. Messages of collectives do not count."""
        unclaimed = self.unclaimed.messages.items()
        kept = sum(len(queue) for (source, tag), queue in unclaimed if source == src and tag.sequence == 0)
        return self.claimed[src].value + kept

    def is_posted(self, work: Work[Any]) -> bool:
        """Whether the receive of a Work waits for the header of its message."""
        return any(receive.work is work for receives in self.posted.values() for receive in receives)

    def is_free(self, src: int, tag: Tag) -> bool:
        """Whether a receive made now would get the next message of a source with this tag."""
        # Fast path, as for most small messages: no key is hashed.
        failures = self.failures
        if not (self.posted or self.unclaimed.messages or failures.peers or failures.contexts):
            return True
        key = (src, tag)
        return not (key in self.posted or key in self.unclaimed or self._num_from_any or self.failures.of(src, tag))

    def arrive(
        self, src: int, tag: Tag, shape: tuple[int, ...], dtype: torch.dtype, note: str, comes_whole: bool = False
    ) -> IncomingMessage:
        """Opens the delivery of a message whose head has arrived; `comes_whole`: see `IncomingMessage`."""
        receive = self._claim(src, tag)
        delivery = IncomingMessage(src, tag, shape, dtype, note, receive, comes_whole=comes_whole)
        if tag.sequence > 0 and (error := self.failures.contexts.get(tag.context)):
            delivery.fail(error)
        elif receive is None:
            self.unclaimed.keep(delivery)
        return delivery

    def take(self, src: int, tag: Tag, tensor: torch.Tensor, note: str) -> None:
        """Delivers a complete message. The mailbox takes over the tensor.

        Args:
            src: rank of the sender.
            tag: address of the message.
            tensor: the message. No other rank may change it.
            note: the sender's operation, as by `as_sent`.
        """
        receive = self._claim(src, tag)
        delivery = IncomingMessage(src, tag, tuple(tensor.shape), tensor.dtype, note, receive, tensor)
        if receive is None:
            self.unclaimed.keep(delivery)
        delivery.finish()

    def take_bytes(
        self, src: int, tag: Tag, shape: tuple[int, ...], dtype: torch.dtype, note: str, address: int
    ) -> None:
        """Delivers a complete message by copying its bytes from an address."""
        receive = self._claim(src, tag)
        if tag.sequence > 0 and tag.context in self.failures.contexts:
            return  # its receives have ended
        if receive is not None and receive.out is not None and receive.combine is None:
            error = receive.refusal(src, shape, dtype, note)
            if error is not None:
                receive.work.complete(error=error)
                return
            # `refusal` gives up a place that need not fit.
            if receive.out is not None:
                copy_from(address, receive.out)
                receive.complete(receive.out, src, note)
                return
        tensor = new_tensor(shape, dtype)
        copy_from(address, tensor)
        delivery = IncomingMessage(src, tag, shape, dtype, note, receive, tensor)
        if receive is None:
            self.unclaimed.keep(delivery)
        delivery.finish()

    def withdraw(self, work: Work[Any], error: EchelonError, arriving: Iterable[IncomingMessage] = ()) -> None:
        """Ends the receive of `work` with `error`. Its message, perhaps in `arriving`, is kept for the next.

        A receive that has ended already stays as it is.

        Args:
            work: the Work of the receive.
            error: the error that `work` ends with.
            arriving: messages that are still arriving.
        """
        if work.has_ended:
            return
        self.failures.has_withdrawn = True
        for delivery in arriving:
            if delivery.detach(work):  # it is still arriving, so no message of its source and tag came after it
                receive = self._claim(delivery.src, delivery.tag)
                if receive is not None:
                    delivery.attach(receive)
                else:
                    self.unclaimed.keep(delivery)
        self._end(lambda receive: error if receive.work is work else None)
        work.complete(error=error)

    def awaits(self, src: int) -> bool:
        """Whether a posted receive could take a message of this rank."""
        posted = (receive for receives in self.posted.values() for receive in receives)
        return any(src == receive.src or src in receive.sources for receive in posted)

    def fail_peer(self, rank: int, error: PeerFailed) -> PeerFailed:
        """Ends every receive from `rank`, now and later, except of messages that have arrived.

        One receive from any rank reports a death. A rank that closed in good order is reported only if no rank is left
        that could send.

        Args:
            rank: the rank that failed or closed.
            error: the cause.

        Returns:
            The first cause.
        """
        first, why = self.failures.peers.setdefault(rank, error), self.failures.of_receive
        self._end(lambda receive: why(receive) if rank == receive.src or rank in receive.sources else None)
        return first

    def fail_context(self, context: int, error: Failure, arriving: Iterable[IncomingMessage] = ()) -> Failure:
        """Ends every receive of a collective of that context, now and later. Returns the first cause.

        Messages of such collectives are dropped: nothing is written to a tensor later.

        Args:
            context: number of the group.
            error: the cause.
            arriving: messages that are still arriving, which are dropped, too.
        """
        first = self.failures.contexts.setdefault(context, error)
        self._end(lambda receive: first if receive.tag.is_collective_of(context) else None)
        for delivery in arriving:
            if delivery.tag.is_collective_of(context):
                delivery.fail(first)
        self.unclaimed.drop_context(context)
        return first

    def fail_all(self, error: EchelonError) -> None:
        """Ends every posted receive with `error`."""
        self._end(lambda _: error)

    def _end(self, failure: Callable[[Receive], EchelonError | None]) -> None:
        """Ends every posted receive for which `failure` returns an error."""
        for receive in [receive for receives in self.posted.values() for receive in receives]:
            if error := failure(receive):
                self._remove(receive)
                receive.work.complete(error=error)

    def _remove(self, receive: Receive) -> None:
        """Removes a posted receive."""
        key = (receive.src, receive.tag)
        self.posted[key].remove(receive)
        if not self.posted[key]:
            del self.posted[key]
        self.num_posted -= 1
        self._num_from_any -= receive.src == ANY


def _take_first(queues: dict[Key, deque[T]], key: Key) -> T | None:
    """Removes and returns the first entry of a queue. Removes an empty queue."""
    queue = queues.get(key)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first
