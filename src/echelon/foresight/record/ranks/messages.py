"""Messages of a recorded rank: entries of its log for fake tensors, and values that are delivered.

Strategy. Shape, dtype and note of a message are kept by sender, receiver and tag, so that ranks may run one after the
other. A receive waits for the sender, whose rank is started if it does not run. Its entry stands where it was posted if
it has a buffer, else where it was waited for, since its size is known only then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon._torch_private.tensors import FakeTensor, real_tensors
from echelon.backends.delivery import ANY
from echelon.backends.formats.wire import Tag
from echelon.backends.memory import describe, new_tensor
from echelon.backends.messages import Messages
from echelon.backends.modes import overwrite
from echelon.backends.operators import Combine
from echelon.backends.work import Received, Work
from echelon.errors import CollectiveMismatch, SizeMismatch, Timeout
from echelon.foresight.record.here import name_of, recording_here
from echelon.foresight.record.log.calls import Call, invent
from echelon.foresight.trace import Group, Message, Wait
from echelon.simulation.boundary import Activity, Boundary, VirtualWork
from echelon.simulation.values import snapshot

_STEP_BITS, _SEQUENCE_BITS = 32, 62
"""Bits that are kept of a tag's step, which is the user's tag of a plain message, and of its sequence."""


class _Sent(NamedTuple):
    """A message under way."""

    src: int
    shape: torch.Size
    dtype: torch.dtype
    values: Tensor | None
    """None for a fake tensor."""
    note: str


class _Expected(NamedTuple):
    """A receive, as the program has posted it; see `Messages.irecv`."""

    tag: Tag
    number: int = -1
    """Number of its entry. -1: it has none yet."""
    out: Tensor | None = None
    note: str | None = ""
    must_fit: bool = True


_UNKNOWN = _Sent(-1, torch.Size(), torch.float32, None, "")
"""Message to a rank that runs alone, until the rank takes it."""


def _call(kind: str) -> AbstractContextManager[Call | None]:
    """Begins a call of the calling thread's rank."""
    recording = recording_here()
    return nullcontext() if recording is None else recording.log.call(kind)


class _Channel:
    """Messages from one rank to another with one tag, in order."""

    def __init__(self) -> None:
        self.sent: deque[_Sent] = deque()
        self.receipts: deque[_Receipt] = deque()


class Undelivered:
    """Messages of all ranks that wait to be received, and receives that wait for a message."""

    def __init__(self, start: Callable[[int], object]) -> None:
        """Takes the function that starts a rank."""
        self.start = start
        self._channels: dict[tuple[int, int, Tag], _Channel] = {}

    @property
    def is_used(self) -> bool:
        """Whether a rank has sent or received anything."""
        return bool(self._channels)

    def send(self, dst: int, tag: Tag, message: _Sent) -> None:
        """Hands a message to the first receive that waits for it, or keeps it."""
        channel = self._channel(message.src, dst, tag)
        while channel.receipts:
            receipt = channel.receipts.popleft()
            # One that was withdrawn takes no message.
            if not receipt.has_ended:
                receipt.arrive(message)
                return
        channel.sent.append(message)

    def receive(self, receipt: _Receipt) -> None:
        """Hands the first message to a receive, or keeps the receive."""
        channels = [self._channel(src, receipt.rank, receipt.address) for src in receipt.sources]
        for channel in channels:
            if channel.sent:
                receipt.arrive(channel.sent.popleft())
                return
        for channel in channels:
            channel.receipts.append(receipt)

    def _channel(self, src: int, dst: int, tag: Tag) -> _Channel:
        return self._channels.setdefault((src, dst, tag), _Channel())


class _Receipt(VirtualWork[Any]):
    """A receive. Its tensor is made by the thread that takes the result, since that has the modes of its rank."""

    __slots__ = ("_has_result", "_make", "_taken", "_undelivered", "address", "rank", "sources")

    def __init__(
        self,
        boundary: Boundary,
        timeout: float,
        rank: int,
        sources: Mapping[int, int],
        tag: Tag,
        make: Callable[[_Sent], tuple[object, _Sent]],
        undelivered: Undelivered,
    ) -> None:
        peer = next(iter(sources)) if len(sources) == 1 else ANY
        super().__init__(boundary, Activity("receive from", peer, tag), timeout, peer, "", None)
        self.rank = rank
        self.sources = sources
        self.address = tag
        self._make = make
        self._undelivered = undelivered
        self._has_result = False
        self._taken: object = None

    def arrive(self, message: _Sent) -> None:
        """Completes the receive; in any thread."""
        self.note = message.note
        self.complete(message)

    def ends_within(self, seconds: float) -> bool:
        """Blocks until the message is there; see `Work.ends_within`. Starts its sender."""
        if not self.has_ended:
            for src in self.sources:
                self._undelivered.start(src)
        return super().ends_within(seconds)

    def result(self) -> Any:
        """Returns the tensor; see `Work.result`."""
        message = super().result()
        # The result may be taken twice, but its entry is written once.
        if not self._has_result:
            # Other ranks have run meanwhile, each with its own state of the process.
            self.boundary.resume()
            self._taken, message = self._make(message)
            self.note, self._has_result = message.note, True
        return self._taken


class RecordingMessages(Messages):
    """Sends and receives of one recorded rank."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout: float,
        boundary: Boundary,
        undelivered: Undelivered,
        group_of: Callable[[int], Group],
    ) -> None:
        """Connects a rank to the messages of all ranks.

        Args:
            rank, world_size, timeout: as in `Messages`.
            boundary: of the rank.
            undelivered: messages of all ranks.
            group_of: returns the group of a context.
        """
        super().__init__(rank, world_size, timeout)
        self._boundary = boundary
        self._undelivered = undelivered
        self._group_of = group_of

    def will_wait(self) -> AbstractContextManager[object]:  # noqa: D102
        return self._boundary.will_wait()

    def isend(self, tensor: Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:  # noqa: D102
        self.check_send(tensor, dst)
        with _call("send") as made:
            return self._send(made, tensor, dst, Tag.of(tag), note)

    def _send(self, made: Call | None, tensor: Tensor, dst: int, tag: Tag, note: str) -> Work[None]:
        work: VirtualWork[None] = VirtualWork(
            self._boundary, Activity("send to", dst, tag), self.timeout, dst, note, None
        )
        if made is not None and made.is_answered:
            work.complete()
            return work
        values = None
        if isinstance(tensor, FakeTensor):
            work.when_taken(self._waiting(self._record(True, dst, tag, tensor)))
        else:
            with real_tensors():
                values = snapshot(tensor)
        self._undelivered.send(dst, tag, _Sent(self.rank, tensor.shape, tensor.dtype, values, note))
        work.complete()
        return work

    def irecv(  # noqa: D102
        self,
        src: int,
        tag: int | Tag = 0,
        *,
        out: Tensor | None = None,
        note: str | None = "",
        must_fit: bool = True,
        combine: Combine | None = None,
    ) -> Work[Tensor]:
        assert combine is None, "collectives of recorded ranks are no messages"
        self.check_receive((src,), out)
        tag, number = Tag.of(tag), -1
        with _call("receive") as made:
            if isinstance(out, FakeTensor):
                number = self._record(False, src, tag, out)
            expected = _Expected(tag, number, out, note, must_fit)
            return self._begin(made, {src: src}, tag, partial(self._take, expected))

    def irecv_any(  # noqa: D102
        self, sources: Mapping[int, int], tag: int | Tag = 0, *, note: str | None = ""
    ) -> Work[Received]:
        self.check_receive(sources)
        tag = Tag.of(tag)

        def make(message: _Sent) -> tuple[object, _Sent]:
            tensor, message = self._take(_Expected(tag, note=note), message)
            return Received(tensor, sources[message.src], tag.step), message

        with _call("receive") as made:
            return self._begin(made, sources, tag, make)

    def cancel(self, work: Work[Tensor] | Work[Received]) -> None:  # noqa: D102
        work.complete(error=Timeout(f"{work.description}: withdrawn after its timeout"))

    def _begin(
        self, made: Call | None, sources: Mapping[int, int], tag: Tag, make: Callable[[_Sent], tuple[object, _Sent]]
    ) -> Work[Any]:
        receipt = _Receipt(self._boundary, self.timeout, self.rank, sources, tag, make, self._undelivered)
        if made is not None and made.is_answered:
            receipt.arrive(_UNKNOWN)
        else:
            self._undelivered.receive(receipt)
        return receipt

    def _take(self, expected: _Expected, message: _Sent) -> tuple[Tensor, _Sent]:
        """Returns the tensor of a message, and the message; see `_taken`."""
        with _call("taken") as made:
            if made is not None and made.is_answered:
                message = made.values
            elif made is not None:
                made.values = message
            return self._taken(expected, message), message

    def _taken(self, expected: _Expected, message: _Sent) -> Tensor:
        """Returns a message's tensor, in the receiver's thread."""
        tag, number, out, note, must_fit = expected
        theirs = describe(message.shape, message.dtype)
        if note is not None and note != message.note:
            raise CollectiveMismatch(f"rank {message.src} is in {message.note or theirs}, rank {self.rank} in {note}")
        fits = out is not None and (out.shape, out.dtype) == (message.shape, message.dtype)
        if out is not None and must_fit and not fits:
            raise SizeMismatch(theirs, describe(out.shape, out.dtype), "recv(out=)")
        if message.values is not None and not isinstance(out, FakeTensor):
            with real_tensors():
                if out is None or not fits:
                    return message.values.clone()
                overwrite(out, message.values)
                return out
        result = out if out is not None and fits else new_tensor(tuple(message.shape), message.dtype)
        if (recording := recording_here()) is not None and recording.log.calls.are_answered:
            invent(result)
            return result
        if number < 0:
            number = self._record(False, message.src, tag, result)
        elif not fits:
            self._correct(number, result)
        self._waiting(number)()
        return result

    def _record(self, is_send: bool, peer: int, tag: Tag, tensor: Tensor) -> int:
        """Writes a message into the log. Returns its number."""
        recording = recording_here()
        assert recording is not None, "only recorded ranks have fake tensors"
        group = self._group_of(tag.context)
        recording.memory.number(tensor)
        # Equal in the groups of other ranks, unlike a context, which differs between pipelines that do the same.
        address = group.number << _SEQUENCE_BITS | tag.sequence & ((1 << _SEQUENCE_BITS) - 1)
        number = tag.step | address << _STEP_BITS
        return recording.message(is_send, peer, group, number, tensor, batch=-1, is_ordered=False)

    def _correct(self, number: int, tensor: Tensor) -> None:
        """Corrects the size of a message that did not fit its buffer."""
        recording = recording_here()
        assert recording is not None
        entries = recording.log.entries
        for index in range(len(entries) - 1, -1, -1):
            entry = entries[index]
            if isinstance(entry, Message) and entry.number == number:
                entries[index] = entry._replace(num_bytes=tensor.nbytes, dtype=name_of(tensor.dtype))
                return

    def _waiting(self, number: int) -> Callable[[], None]:
        """Returns a function whose first call makes the current stream wait for a message."""
        left = [number]

        def wait() -> None:
            recording = recording_here()
            if left and recording is not None:
                log = recording.log
                log.entries.append(Wait(log.stream, left.pop(), log.place()))

        return wait
