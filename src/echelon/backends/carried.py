"""Backend whose messages go over the connections of a `TcpBackend`, and whose collectives go another way.

The connections find and authenticate the ranks, carry messages, and detect ranks that died, left or gave up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from echelon.backends.base import Backend
from echelon.backends.formats.wire import Tag
from echelon.backends.operators import Combine
from echelon.backends.status import Question, Status
from echelon.backends.tcp.backend import TcpBackend
from echelon.backends.work import Message, Received, Work
from echelon.errors import CollectiveMismatch, Failure

T = TypeVar("T")


class Carried(Backend):
    """Forwards every call that is not a collective to a TcpBackend."""

    def __init__(self, tcp: TcpBackend) -> None:
        """Takes over a backend that is connected."""
        super().__init__(tcp.rank, tcp.world_size, tcp.timeout)
        self._tcp = tcp
        self.flight_recorder = tcp.flight_recorder

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each rank, by number: ranks share one that can see each other's processes."""
        return self._tcp.hosts

    def isend(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:  # noqa: D102
        return self._tcp.isend(tensor, dst, tag, note=note)

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
        return self._tcp.irecv(src, tag, out=out, note=note, must_fit=must_fit, combine=combine)

    def irecv_any(  # noqa: D102
        self, sources: Mapping[int, int], tag: int | Tag = 0, *, note: str | None = ""
    ) -> Work[Received]:
        return self._tcp.irecv_any(sources, tag, note=note)

    def send_at_once(self, tensor: torch.Tensor, dst: int, tag: Tag, *, note: str = "") -> bool:  # noqa: D102
        return self._tcp.send_at_once(tensor, dst, tag, note=note)

    def recv_at_once(  # noqa: D102
        self, src: int, tag: Tag, *, out: torch.Tensor | None = None, note: str | None = ""
    ) -> Message | None:
        return self._tcp.recv_at_once(src, tag, out=out, note=note)

    def cancel(self, work: Work[torch.Tensor] | Work[Received]) -> None:  # noqa: D102
        self._tcp.cancel(work)

    def start(self, function: Callable[[], T], description: str, lane: int = 0) -> Work[T]:  # noqa: D102
        return self._tcp.start(function, description, lane)

    def will_wait(self) -> AbstractContextManager[object]:  # noqa: D102
        return self._tcp.will_wait()

    def join(self, context: int, ranks: Sequence[int]) -> None:  # noqa: D102
        self._tcp.join(context, ranks)

    def keep_silent(self) -> None:  # noqa: D102
        self._tcp.keep_silent()

    def difference(self) -> CollectiveMismatch | None:  # noqa: D102
        return self._tcp.difference()

    def ask(self, ranks: Iterable[int], question: Question, timeout: float) -> dict[int, Status]:  # noqa: D102
        return self._tcp.ask(ranks, question, timeout)

    def last_heard(self, rank: int) -> str:  # noqa: D102
        return self._tcp.last_heard(rank)

    def revoke(self, context: int, ranks: Iterable[int], failure: Failure) -> Failure:  # noqa: D102
        return self._tcp.revoke(context, ranks, failure)

    def abort(self, reason: str, origin: int | None = None) -> None:  # noqa: D102
        self._tcp.abort(reason, origin)

    def close(self, timeout: float | None = None) -> None:  # noqa: D102
        self._tcp.close(timeout)
