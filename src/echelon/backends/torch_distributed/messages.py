"""Messages between two ranks by an engine, because their tensors are on a GPU.

Strategy. An engine pairs the sends and receives of two ranks by their order alone: it has no tags. So each message is
announced over TCP first, under its own tag, with shape, dtype and note. A receive takes the announcement as it would
take a message. It answers with a number and begins to receive; the sender begins to send when the answer has come. Each
ordered pair of ranks has a channel of its own, an engine of two ranks, with one lane on either side. Both lanes go by
the numbers. So both engines always work on the same message, and no order of calls can block them.

No thread waits for a device. A message is queued there behind the work that the caller had queued before. Whoever takes
the result of the Work has its own stream wait for the end. Messages of CPU tensors go over TCP as a whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from echelon.backends.delivery import ANY, IncomingMessage, Receive
from echelon.backends.formats import wire
from echelon.backends.formats.wire import Tag
from echelon.backends.host_copies import StreamScope
from echelon.backends.memory import as_bytes, bytes_of, dtype_of, new_tensor
from echelon.backends.messages import Messages
from echelon.backends.operators import Combine
from echelon.backends.tcp.backend import TcpBackend
from echelon.backends.tcp.messages import MessageDescription, message_head
from echelon.backends.torch_distributed.engine import Engine, EngineFailed, Engines, Look
from echelon.backends.work import Received, Work
from echelon.errors import EchelonError, Timeout, UnsupportedOp

T = TypeVar("T")

# Note of an announcement.
_ANNOUNCED = "a tensor that the engine carries"
# Answer to a message that does not fit, or that has no bytes. Other answers number the messages of a channel from 1 on.
_NOTHING = 0
# Bit of an answer's sequence number; for messages of users, of its context.
_ANSWERS = 1 << 62
# Bit of the context in the tag of the message with which a channel opens. A revoked group's messages still go.
_PORTS = 1 << 61
# Lane for the stream of receives from any rank: their sender, and so their channel, is not known when they are called.
# Channels have the lanes below. Groups have their 64-bit contexts, inverted or not.
_ANY_LANE = -(1 << 65)


class Route(NamedTuple):
    """Direction of messages in one group: from rank `src` of the world to rank `dst`."""

    context: int
    src: int
    dst: int


class EngineChannel:
    """Engine of one route, on one of its two ranks.

    Strategy. One lane's thread uses it on either side, message after message. The first message opens the engine, when
    both ranks have come to it. After a failure nobody knows which bytes the other side still has in hand, so a channel
    that has failed stays failed.
    """

    def __init__(self, engines: Engines, types: frozenset[str], route: Route, lane: int) -> None:
        """Opens no engine yet.

        Args:
            engines: opens the engine.
            types: device types of the tensors.
            route: this rank is one of its ends.
            lane: lane of the backend, used by this channel alone.
        """
        self.lane = lane
        self._engines = engines
        self._types = types
        self._route = route
        self._engine: Engine | None = None
        self._failure: BaseException | None = None
        self._num_numbered = 0
        # Answers of different tags may overtake each other: sends whose turn has not come wait here, by number.
        self._num_begun = 0
        self._early: dict[int, Callable[[], None]] = {}

    def next_number(self) -> int:
        """Returns the number of this channel's next message, from 1 on; for the receiving rank."""
        self._num_numbered += 1
        return self._num_numbered

    def in_order(self, number: int, begin: Callable[[], None]) -> None:
        """Calls `begin` once all messages with lower numbers have begun: now, or in a later call."""
        self._early[number] = begin
        while act := self._early.pop(self._num_begun + 1, None):
            self._num_begun += 1
            act()

    def send(self, tensor: torch.Tensor, seconds: float, look: Look) -> None:
        """Sends a contiguous tensor of at least one byte. Returns when a device has queued it."""
        self._use(lambda engine: engine.send(tensor, 1), seconds, look)

    def receive(self, tensor: torch.Tensor, seconds: float, look: Look) -> None:
        """Overwrites a contiguous tensor with the next message, which has its size."""
        self._use(lambda engine: engine.receive(tensor, 0), seconds, look)

    def _use(self, act: Callable[[Engine], None], seconds: float, look: Look) -> None:
        if self._failure is not None:
            raise self._failure
        ends = self._route[1:]
        try:
            if self._engine is None:
                prefix, deadline = "{:x}/{}to{}".format(*self._route), self._engines.now() + seconds
                tag = Tag(self._route.context ^ _PORTS)
                self._engine = self._engines.open(prefix, ends, self._types, deadline, look, tag, greet)
            with self._engine.limited(seconds, look):
                act(self._engine)
        except BaseException as error:
            self._failure = error
            # First of all: the peer's engine fails when the connections end.
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()
            if isinstance(error, EngineFailed):
                peers = [rank for rank in ends if rank != self._engines.rank]
                self._failure = self._engines.cause_of(error, look, 0, peers)
                raise self._failure from error
            raise


def greet(group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
    """Moves one byte from rank 0 to rank 1, since NCCL connects two ranks at their first message."""
    token = torch.zeros(1, dtype=torch.uint8, device=device)
    work = dist.isend(token, group=group, group_dst=1) if rank == 0 else dist.irecv(token, group=group, group_src=0)
    if work is not None:
        work.wait()
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


class EngineMessages(Messages):
    """Messages of one rank, over its links or by an engine."""

    def __init__(self, tcp: TcpBackend, engines: Engines, types: frozenset[str]) -> None:
        """Opens no channel yet.

        Args:
            tcp: connects all ranks.
            engines: opens the engines of channels.
            types: device types whose tensors go by an engine.
        """
        messages = tcp.messages
        super().__init__(messages.rank, messages.world_size, messages.timeout, types | {"cpu"})
        self._tcp = tcp
        self._messages = messages
        self._engines = engines
        self._types = types
        self._channels: dict[Route, EngineChannel] = {}
        # By receive that waits for a message: the receive of its announcement.
        self._expected: dict[Work[Any], Work[Any]] = {}
        # Sends that the device has not queued yet, for `finish`.
        self._leaving: dict[Work[None], None] = {}
        self._lock = threading.Lock()
        self._announcing = threading.Lock()

    def isend(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:  # noqa: D102
        self.check_send(tensor, dst)
        tag = Tag.of(tag)
        if tensor.device.type not in self._types:
            return self._messages.isend(tensor, dst, tag, note=note)
        work: Work[None] = Work(self._messages.progress, MessageDescription("send to", dst, tag), self.timeout)
        channel = self._channel(Route(tag.context, self.rank, dst))
        scope = self._engines.scope(channel.lane)
        if scope is not None:
            work.when_taken(scope.join)
        head = torch.frombuffer(bytearray(message_head(tag, tensor.dtype, tensor.shape, note)), dtype=torch.uint8)
        self._leaving[work] = None
        self._messages.when_ended(work, lambda: self._leaving.pop(work, None))
        # Answers to announcements with one tag come in the order of the announcements.
        with self._announcing:
            self._messages.isend(head, dst, tag, note=_ANNOUNCED)
            answer = self._messages.irecv(dst, _answer_tag(tag))

        def send() -> None:
            channel.send(as_bytes(tensor), self.timeout, self._look(dst, tag))
            _keep_until_done(tensor)

        def act() -> None:
            _queue(scope, send)
            self._messages.end(work.complete)

        def answered() -> None:
            error = answer.exception()
            number = _NOTHING if error is not None else int(answer.result().item())
            if number == _NOTHING:
                work.complete(error=error)
            else:
                channel.in_order(number, lambda: self._in_lane(channel, act, work))

        self._messages.when_ended(answer, answered)
        return work

    def irecv(  # noqa: D102
        self,
        src: int,
        tag: int | Tag = 0,
        *,
        out: torch.Tensor | None = None,
        note: str | None = "",
        must_fit: bool = True,
        combine: Combine | None = None,
    ) -> Work[torch.Tensor]:
        self.check_receive((src,), out)
        tag = Tag.of(tag)
        work: Work[torch.Tensor] = Work(
            self._messages.progress, MessageDescription("receive from", src, tag), self.timeout
        )
        receive = Receive(work, src, tag, out, note, must_fit=must_fit, combine=combine)
        lane = self._channel(Route(tag.context, src, self.rank)).lane
        self._expect(receive, self._messages.irecv(src, tag, note=None), self._engines.scope(lane))
        return work

    def irecv_any(  # noqa: D102
        self, sources: Mapping[int, int], tag: int | Tag = 0, *, note: str | None = ""
    ) -> Work[Received]:
        self.check_receive(sources)
        tag = Tag.of(tag)
        work: Work[Received] = Work(self._messages.progress, f"receive from any rank, {tag}", self.timeout)
        receive = Receive(work, ANY, tag, None, note, sources)
        coming = self._messages.irecv_any({src: src for src in sources}, tag, note=None)
        self._expect(receive, coming, self._engines.scope(_ANY_LANE))
        return work

    def cancel(self, work: Work[Any]) -> None:
        """Withdraws a receive. If its message is under way by the engine, the tensor may still be written."""
        coming = self._expected.get(work)
        if coming is not None:
            self._messages.cancel(coming)
        error = Timeout(f"{work.description}: withdrawn after its timeout")
        self._messages.end(lambda: work.complete(error=error))

    def finish(self, timeout: float) -> bool:
        """Waits until all sends have left or failed. False if the time is up first."""
        deadline = time.monotonic() + timeout
        return all(
            self._messages.progress.drive(work, max(0.0, deadline - time.monotonic()))  # type: ignore[arg-type]
            for work in list(self._leaving)
        )

    def will_wait(self) -> AbstractContextManager[object]:  # noqa: D102
        return self._messages.will_wait()

    def _channel(self, route: Route) -> EngineChannel:
        with self._lock:
            if route not in self._channels:
                lane = _ANY_LANE - 1 - len(self._channels)
                self._channels[route] = EngineChannel(self._engines, self._types, route, lane)
            return self._channels[route]

    def _expect(self, receive: Receive, coming: Work[Any], scope: StreamScope | None) -> None:
        if scope is not None:
            receive.work.when_taken(scope.join)
        self._expected[receive.work] = coming
        self._messages.when_ended(coming, lambda: self._came(receive, coming, scope))

    def _came(self, receive: Receive, coming: Work[Any], scope: StreamScope | None) -> None:
        """Processes a message that came over TCP, or the announcement of a message by the engine."""
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
        channel = self._channel(Route(receive.tag.context, src, self.rank))
        self._in_lane(channel, partial(self._take, receive, src, tensor, channel, scope), receive.work)

    def _take(
        self, receive: Receive, src: int, head: torch.Tensor, channel: EngineChannel, scope: StreamScope | None
    ) -> None:
        """Answers an announcement and receives the message, in the lane of the channel."""
        data = bytes_of(head)
        frame = wire.decode(data[: wire.HEADER_BYTES], data[wire.HEADER_BYTES :], self._tcp.max_message_bytes)
        shape, dtype, device = frame.shape, dtype_of(frame.dtype), self._engines.device
        error = receive.refusal(src, shape, dtype, frame.note) or _elsewhere(receive, device)
        # The number is taken in the lane, so both lanes move the messages in the order of the answers.
        number = _NOTHING if error is not None or not frame.payload_bytes else channel.next_number()
        answer = torch.tensor([number], dtype=torch.int64, device="cpu")
        self._messages.isend(answer, src, _answer_tag(receive.tag))
        if error is not None:
            raise error

        def fetch() -> torch.Tensor:
            out, combine = receive.out, receive.combine
            place = new_tensor(shape, dtype, device) if out is None or combine is not None else out.detach()
            if number != _NOTHING:
                channel.receive(as_bytes(place), self.timeout, self._look(src, receive.tag))
                _keep_until_done(place)
            if out is not None and combine is not None:
                combine(out.detach(), place)
            return place if out is None else out

        tensor = _queue(scope, fetch)
        self._messages.end(lambda: receive.complete(tensor, src, frame.note))

    def _in_lane(self, channel: EngineChannel, act: Callable[[], None], work: Work[Any]) -> None:
        """Queues the rest of an operation in the lane of a channel. The caller holds the connections' lock."""

        def run() -> None:
            try:
                act()
            except BaseException as error:  # whoever waits for the Work raises it
                failure = error
                self._messages.end(lambda: work.complete(error=failure))

        try:
            self._tcp.lanes.start(run, str(work.description), channel.lane)
        except EchelonError as error:
            work.complete(error=error)

    def _look(self, peer: int, tag: Tag) -> Look:
        """Returns a function that raises the reason to stop waiting for a message, if there is one."""
        # Context 0 is never revoked: messages of users outlive the collectives of their group.
        context = tag.context if tag.sequence else 0
        deadline = self._tcp.now() + self.timeout
        return lambda: self._engines.check_liveness(deadline, context, [peer])


def _queue(scope: StreamScope | None, act: Callable[[], T]) -> T:
    return act() if scope is None else scope.queued(act)


def _keep_until_done(tensor: torch.Tensor) -> None:
    """Keeps the memory of a tensor from being reused before the current stream is done with it."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def _elsewhere(receive: Receive, device: torch.device) -> EchelonError | None:
    """Returns the error of a message on another device than `out`. None, and no `out`, if the message need not fit."""
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
    """Returns the tag of the answer to a message. A revocation that ends the message ends the answer as well."""
    if tag.sequence:
        return tag._replace(sequence=tag.sequence | _ANSWERS)
    return tag._replace(context=tag.context ^ _ANSWERS)
