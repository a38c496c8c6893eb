"""Where an asynchronous collective queues its work on a device: beside the stream of whoever called it.

Strategy. Streams belong to threads, and an asynchronous collective runs in the thread of its group's lane. So the
caller's place in its stream is kept when it calls; the lane queues into a stream of its group, behind that place; and
who takes the result has its own stream wait for the end. What the caller queues in between overlaps. Nobody waits on
the CPU. Groups do not share a stream: ranks may come to operations of two groups in different orders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Aside(ABC):
    """One asynchronous operation's place among the streams of a device. Made in the thread that calls it."""

    @abstractmethod
    def queued(self, function: Callable[[], T]) -> T:
        """Runs a function whose work on the device comes after all that the caller had queued before; in any thread."""

    @abstractmethod
    def join(self) -> None:
        """Has what the calling thread queues from now on come after the function's work."""


class StreamAside(Aside):
    """A place among the streams of torch's accelerator."""

    def __init__(self, stream: torch.Stream) -> None:
        """Takes the caller's place in its stream; `stream` is where asynchronous operations are queued."""
        self._stream = stream
        self._begun = torch.accelerator.current_stream(stream.device).record_event()
        self._ended: torch.Event | None = None
        self._result: object = None

    def queued(self, function: Callable[[], T]) -> T:  # noqa: D102
        with self._stream:
            self._stream.wait_event(self._begun)
            try:
                self._result = result = function()
                return result
            finally:
                self._ended = self._stream.record_event()

    def join(self) -> None:  # noqa: D102
        stream = torch.accelerator.current_stream(self._stream.device)
        if self._ended is not None:
            stream.wait_event(self._ended)
        if isinstance(self._result, torch.Tensor) and not self._result.is_cpu:
            self._result.record_stream(stream)  # its memory may not be used again before this stream is done with it
        self._result = None
