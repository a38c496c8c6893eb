"""Messages between two ranks that an engine carries, because their tensors are on a GPU.

Strategy. An engine pairs what two ranks send and receive by its order alone. So every message is announced over TCP
first, under its own tag: shape, dtype and note. The receive that takes the announcement answers it and begins to
receive. The sender begins to send when the answer has come. Each ordered pair of ranks has a channel of its own, with
one lane on either side. Both lanes go by the order of the answers. So the engine waits for the same message on both
sides, and no order of calls can block it.

The CPU never waits for a device. A message is queued behind the caller's earlier work, and taking the Work's result
has the caller's stream wait for it. CPU tensors go over TCP as a whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from echelon.backends.delivery import ANY, IncomingMessage, Receive
from echelon.backends.formats import wire
from echelon.backends.formats.wire import Tag
from echelon.backends.host_copies import StreamScope
from echelon.backends.memory import as_bytes, bytes_of, dtype_of, new_tensor
from echelon.backends.operators import Combine
from echelon.backends.tcp.backend import Passage, TcpBackend, message_head
from echelon.backends.torch_distributed.channels import Channel, Opener, Route
from echelon.backends.torch_distributed.engine import Look
from echelon.backends.work import Received, Work
from echelon.errors import EchelonError, Timeout, UnsupportedOp

T = TypeVar("T")

_ANNOUNCED = "a tensor that the engine carries"
"""The note of an announcement."""
_NOTHING = 0
"""Answer of a receive that the message does not fit, or that needs no bytes. Other answers number the messages."""
_ANSWERS = 1 << 62
"""Bit of an answer's sequence number; for messages of users, of its context."""
_ANY_LANE = -(1 << 65)
"""Lane of the stream for receives from any rank, whose sender is unknown when they are called. Channels have the lanes
below it. Lanes of groups are numbered by 64 bits."""


class EngineMessages:
    """The messages of one rank."""

    def __init__(self, tcp: TcpBackend, opener: Opener, types: frozenset[str]) -> None:
        """Opens no channel yet.

        Args:
            tcp: connects all ranks.
            opener: opens channels.
            types: the device types whose tensors the engine is to carry.
        """
        self._tcp = tcp
        self._opener = opener
        self._types = types
        self._channels: dict[Route, Channel] = {}
        self._expected: dict[Work[Any], Work[Any]] = {}
        """For each receive that waits for a message: the receive of its announcement."""
        self._leaving: dict[Work[None], None] = {}
        """Sends that have not been queued on the device yet."""
        self._lock = threading.Lock()
        self._announcing = threading.Lock()

    def isend(self, tensor: torch.Tensor, dst: int, tag: Tag, note: str) -> Work[None]:
        """Starts to send a tensor; see `Backend.isend`."""
        if tensor.device.type not in self._types:
            return self._tcp.isend(tensor, dst, tag, note=note)
        work: Work[None] = Work(self._tcp, Passage("send to", dst, tag), self._tcp.timeout)
        channel = self._channel(Route(tag.context, self._tcp.rank, dst))
        aside = channel.aside()
        if aside is not None:
            work.when_taken(aside.join)
        frame = message_head(tag, tensor.dtype, tensor.shape, note)
        head = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        self._leaving[work] = None
        with self._announcing:  # answers come in the order of announcements with one tag
            self._tcp.isend(head, dst, tag, note=_ANNOUNCED)
            answer = self._tcp.irecv(dst, _answer_tag(tag))

        def send() -> None:
            channel.send(as_bytes(tensor), self._tcp.timeout, self._look(dst, tag))
            _keep_until_done(tensor)

        def answered() -> None:
            error = answer.exception()
            number = _NOTHING if error is not None else int(answer.result().item())
            if number == _NOTHING:
                self._left(work, error)
            else:
                act = partial(_queue, aside, send)
                channel.in_order(number, lambda: self._in_lane(channel, act, partial(self._left, work), work))

        self._tcp.when_ended(answer, answered)
        return work

    def irecv(
        self, src: int, tag: Tag, out: torch.Tensor | None, note: str | None, must_fit: bool, combine: Combine | None
    ) -> Work[torch.Tensor]:
        """Starts to receive a tensor; see `Backend.irecv`."""
        work: Work[torch.Tensor] = Work(self._tcp, Passage("receive from", src, tag), self._tcp.timeout)
        receive = Receive(work, src, tag, out, note, must_fit=must_fit, combine=combine)
        aside = self._channel(Route(tag.context, src, self._tcp.rank)).aside()
        self._expect(receive, self._tcp.irecv(src, tag, note=None), aside)
        return work

    def irecv_any(self, sources: Mapping[int, int], tag: Tag, note: str | None) -> Work[Received]:
        """Starts to receive a tensor from the first rank that sends; see `Backend.irecv_any`."""
        work: Work[Received] = Work(self._tcp, f"receive from any rank, {tag}", self._tcp.timeout)
        receive = Receive(work, ANY, tag, None, note, sources)
        coming = self._tcp.irecv_any({src: src for src in sources}, tag, note=None)
        self._expect(receive, coming, self._opener.aside(_ANY_LANE))
        return work

    def cancel(self, work: Work[Any]) -> None:
        """Withdraws a receive. Of one whose message is being carried the tensor may still be written."""
        coming = self._expected.get(work)
        if coming is not None:
            self._tcp.cancel(coming)
        error = Timeout(f"{work.description}: withdrawn after its timeout")
        self._tcp.end(lambda: work.complete(error=error))

    def finish(self, timeout: float) -> bool:
        """Waits until all sends have left or failed. False if the time is up first."""
        deadline = time.monotonic() + timeout
        return all(
            self._tcp.drive(work, max(0.0, deadline - time.monotonic()))  # type: ignore[arg-type]
            for work in list(self._leaving)
        )

    def close(self) -> None:
        """Takes all channels apart."""
        for channel in list(self._channels.values()):
            channel.close()

    # Inside

    def _channel(self, route: Route) -> Channel:
        with self._lock:  # the first messages of a route may come in several threads
            if route not in self._channels:
                self._channels[route] = Channel(self._opener, route, _ANY_LANE - 1 - len(self._channels))
            return self._channels[route]

    def _expect(self, receive: Receive, coming: Work[Any], aside: StreamScope | None) -> None:
        if aside is not None:
            receive.work.when_taken(aside.join)
        self._expected[receive.work] = coming
        self._tcp.when_ended(coming, lambda: self._came(receive, coming, aside))

    def _came(self, receive: Receive, coming: Work[Any], aside: StreamScope | None) -> None:
        """Takes in a message that came over TCP, or the announcement of one."""
        del self._expected[receive.work]
        if error := coming.exception():
            receive.work.complete(error=error)
            return
        found = coming.result()
        src, tensor = (found.src, found.tensor) if isinstance(found, Received) else (receive.src, found)
        if coming.note != _ANNOUNCED:
            error = _elsewhere(receive, tensor.device)
            if error is None:
                IncomingMessage(
                    src, receive.tag, tuple(tensor.shape), tensor.dtype, coming.note, receive, tensor
                ).finish()
            else:
                receive.work.complete(error=error)
            return
        channel = self._channel(Route(receive.tag.context, src, self._tcp.rank))

        def end(error: BaseException | None) -> None:
            if error is not None:
                receive.work.complete(error=error)

        self._in_lane(channel, partial(self._take, receive, src, tensor, channel, aside), end, receive.work)

    def _take(
        self, receive: Receive, src: int, head: torch.Tensor, channel: Channel, aside: StreamScope | None
    ) -> None:
        """Answers an announcement, and receives; in the lane of the channel."""
        data = bytes_of(head)
        frame = wire.decode(data[: wire.HEADER_BYTES], data[wire.HEADER_BYTES :], self._tcp.max_message_bytes)
        shape, dtype, device = frame.shape, dtype_of(frame.dtype), self._opener.device
        error = receive.refusal(src, shape, dtype, frame.note) or _elsewhere(receive, device)
        number = _NOTHING if error is not None or not frame.payload_bytes else channel.next_number()
        answer = torch.tensor([number], dtype=torch.int64, device="cpu")
        self._tcp.isend(answer, src, _answer_tag(receive.tag))
        if error is not None:
            raise error

        def fetch() -> torch.Tensor:
            out, combine = receive.out, receive.combine
            place = new_tensor(shape, dtype, device) if out is None or combine is not None else out.detach()
            if number != _NOTHING:
                channel.receive(as_bytes(place), self._tcp.timeout, self._look(src, receive.tag))
                _keep_until_done(place)
            if out is not None and combine is not None:
                combine(out.detach(), place)
            return place if out is None else out

        tensor = _queue(aside, fetch)
        self._tcp.end(lambda: receive.complete(tensor, src, frame.note))

    def _in_lane(
        self,
        channel: Channel,
        act: Callable[[], object],
        end: Callable[[BaseException | None], object],
        work: Work[Any],
    ) -> None:
        """Has the lane of a channel do something, and then ends a Work. With the lock of the connections held."""

        def run() -> None:
            failure: BaseException | None = None
            try:
                act()
            except BaseException as error:  # it belongs to whoever waits for the Work
                failure = error
            self._tcp.end(lambda: end(failure))

        try:
            self._tcp.start(run, str(work.description), channel.lane)
        except EchelonError as error:  # closed: no lane will run it
            end(error)

    def _left(self, work: Work[None], error: BaseException | None) -> None:
        self._leaving.pop(work, None)
        work.complete(error=error)

    def _look(self, peer: int, tag: Tag) -> Look:
        """Returns a function that raises the reason to stop waiting for a message, if there is one."""
        context = tag.context if tag.sequence else 0  # messages of users outlive the collectives of their group
        deadline = self._tcp.now() + self._tcp.timeout
        return lambda: self._opener.check_liveness(deadline, context, [peer])


def _queue(aside: StreamScope | None, act: Callable[[], T]) -> T:
    return act() if aside is None else aside.queued(act)


def _keep_until_done(tensor: torch.Tensor) -> None:
    """Has the memory of a tensor not used again before the stream that is current here is done with it."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def _elsewhere(receive: Receive, device: torch.device) -> EchelonError | None:
    """Returns the error of a message that came to a device on which its place is not, if that must be."""
    out = receive.out
    if out is None or out.device.type == device.type:
        return None
    if not receive.must_fit:
        receive.out = None
        return None
    return UnsupportedOp(
        f"receive from rank {receive.src}, {receive.tag}: the message came to {device}, but out= is on {out.device}: "
        "give a tensor there, or leave out= out"
    )


def _answer_tag(tag: Tag) -> Tag:
    """Returns the tag of the answer to a message; it is revoked with its group's collectives if the message is."""
    if tag.sequence:
        return tag._replace(sequence=tag.sequence | _ANSWERS)
    return tag._replace(context=tag.context ^ _ANSWERS)
