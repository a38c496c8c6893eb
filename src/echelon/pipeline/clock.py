"""When a rank's steps began and ended: by the backend's clock, or, where they run on a device, by events in its stream.

On a device the CPU only queues a step; what it would measure is how long that takes. An event is passed when the device
comes to it, so nothing is synchronised until somebody asks for the times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

M = TypeVar("M")


class Clock(ABC, Generic[M]):
    """Marks moments, and tells later when they were."""

    @abstractmethod
    def mark(self) -> M:
        """Marks the moment at which everything is done that this thread has started so far."""

    @abstractmethod
    def seconds(self, spans: Sequence[tuple[M, M]]) -> list[tuple[float, float]]:
        """Returns when pairs of moments were, by the backend's clock, once all of them are past."""


class HostClock(Clock[float]):
    """What is started is done when the call returns."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def mark(self) -> float:  # noqa: D102
        return self._now()

    def seconds(self, spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:  # noqa: D102
        return list(spans)


class Event(Protocol):
    """What is needed of a torch.Event that can tell the time."""

    def record(self) -> None: ...  # noqa: D102
    def synchronize(self) -> None: ...  # noqa: D102
    def elapsed_time(self, end_event: Event, /) -> float: ...  # noqa: D102


class EventClock(Clock[Event]):
    """What is started is done when the device comes to an event behind it."""

    def __init__(self, now: Callable[[], float], make_event: Callable[[], Event]) -> None:
        """Reads both clocks at once, for which it waits for the device."""
        self._make_event = make_event
        self._first = self.mark()
        self._first.synchronize()
        self._begun = now()

    def mark(self) -> Event:  # noqa: D102
        event = self._make_event()
        event.record()
        return event

    def seconds(self, spans: Sequence[tuple[Event, Event]]) -> list[tuple[float, float]]:  # noqa: D102
        if spans:
            spans[-1][1].synchronize()
        return [(self._when(begin), self._when(end)) for begin, end in spans]

    def _when(self, event: Event) -> float:
        return self._begun + self._first.elapsed_time(event) / 1e3


def clock_for(tensors: Iterable[torch.Tensor], now: Callable[[], float]) -> Clock[object]:
    """Returns a clock for work on these tensors; `now` is the backend's."""
    device = next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), None)
    if device is None:
        return HostClock(now)  # type: ignore[return-value]
    return EventClock(now, partial(torch.Event, device, enable_timing=True))  # type: ignore[return-value, arg-type]
