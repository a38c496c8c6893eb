"""Channels: an engine for each ordered pair of ranks of a group, which carries messages in one direction.

Strategy. A channel is used by one lane's thread on either side, message after message. It is opened by the first one,
when both ranks have come to it. One that fails stays failed: nobody knows what the other side still has in hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar

import torch

from echelon.backends.host_copies import StreamScope
from echelon.backends.torch_distributed.engine import Engine, EngineFailed, Look
from echelon.errors import EchelonError

T = TypeVar("T")


class Route(NamedTuple):
    """Direction of messages in one group: from rank `src` of the world to rank `dst`."""

    context: int
    src: int
    dst: int


class Opener(Protocol):
    """Part of the backend that channels and messages use."""

    @property
    def device(self) -> torch.device:
        """Device of received tensors without `out`."""
        ...

    def open_channel(self, route: Route, look: Look) -> Engine:
        """Returns a new engine for two ranks, the sender first; both call it."""
        ...

    def aside(self, context: int) -> StreamScope | None:
        """Returns the caller's place among the streams of a device; None: there are none."""
        ...

    def check_liveness(self, deadline: float, context: int, ranks: Sequence[int]) -> None:
        """Raises the reason to stop waiting, if there is one: revocation, a rank's death, or Timeout."""
        ...

    def fail_channel(self, failure: EngineFailed, look: Look, route: Route) -> EchelonError:
        """Returns the error to raise for an engine's failure: a rank's failure if that was the cause."""
        ...


class Channel:
    """The engine of one route, on one of its two ranks."""

    def __init__(self, opener: Opener, route: Route, lane: int) -> None:
        """Opens nothing yet.

        Args:
            opener: see there.
            route: this rank is one of its ends.
            lane: of the backend, for this channel alone.
        """
        self.lane = lane
        self._opener = opener
        self._route = route
        self._engine: Engine | None = None
        self._failure: BaseException | None = None
        self._num_numbered = 0
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

    def aside(self) -> StreamScope | None:
        """Returns the caller's place among the streams of a device."""
        return self._opener.aside(self.lane)

    def send(self, tensor: torch.Tensor, seconds: float, look: Look) -> None:
        """Sends a contiguous tensor of at least one byte; a device has then queued it."""
        self._use(lambda engine: engine.send(tensor, 1), seconds, look)

    def receive(self, tensor: torch.Tensor, seconds: float, look: Look) -> None:
        """Overwrites a contiguous tensor with the next that is sent, of the same bytes."""
        self._use(lambda engine: engine.receive(tensor, 0), seconds, look)

    def close(self) -> None:
        """Takes the engine apart, if there is one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _use(self, act: Callable[[Engine], None], seconds: float, look: Look) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            engine = self._engine = self._engine or self._opener.open_channel(self._route, look)
            with engine.limited(seconds, look):
                act(engine)
        except BaseException as error:
            self._failure = error
            with suppress(Exception):  # the first failure is the one to report
                self.close()
            if isinstance(error, EngineFailed):
                self._failure = self._opener.fail_channel(error, look, self._route)
                raise self._failure from error
            raise
