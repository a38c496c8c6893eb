"""Base class of groups: the members, and the argument checks that all calls share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from torch import Tensor

from echelon.arguments import check_seconds, shown
from echelon.backends.base import Backend
from echelon.backends.formats.wire import Tag
from echelon.backends.memory import check_dense, check_tensor, wrong_device
from echelon.errors import InvalidRank, SelfSend, SizeMismatch
from echelon.group.runner import CollectiveRunner, Seconds

__all__ = ["GroupBase", "No", "Seconds", "Yes"]

No: TypeAlias = Literal[False]
Yes: TypeAlias = Literal[True]

_MAX_TAG = 2**32 - 1


class GroupBase:
    """A rank's view of its group: the members, the backend, and the runner of collectives."""

    # Of the runner's `known`, without a frame of Python.
    _run_known: Callable[..., Any] = staticmethod(lambda *_: False)
    _send_known: Callable[..., Any] = staticmethod(lambda *_: False)
    _receive_known: Callable[..., Any] = staticmethod(lambda *_: False)

    backend: Backend
    """Transport of the group's messages."""
    ranks: tuple[int, ...]
    """The backend's rank of each member."""
    rank: int
    """This rank within the group."""
    name: str
    """Name in errors."""
    _runner: CollectiveRunner
    context: int
    """Number that separates this group's messages from those of other groups. The same on every member."""

    @property
    def world_size(self) -> int:
        """Number of ranks in this group."""
        return len(self.ranks)

    @property
    def timeout(self) -> float:
        """Default timeout of blocking calls, in seconds.

        Raises:
            InvalidArgument: set to anything but a number of seconds of at least 0.
        """
        return self._runner.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._runner.timeout = check_seconds(seconds)

    def _check_message(self, tensor: Tensor) -> None:
        self._runner.check_open()
        if not check_dense(tensor, self.backend.messages.devices, "send"):
            raise wrong_device(tensor, self.backend.messages.devices, "send")

    def _check_out(self, out: Tensor | None) -> None:
        self._runner.check_open()
        if out is not None:
            check_tensor(out, self.backend.messages.devices, "recv(out=)")

    def _check_rank(self, rank: int, what: str) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            is_of_torch = what == "src" and isinstance(rank, Tensor)  # recv(tensor, src)
            advice = ". recv(src) returns the tensor, and recv(src, out=tensor) overwrites it" if is_of_torch else ""
            raise InvalidRank(rank, self.world_size, what, advice)

    def _peer(self, rank: int, what: str) -> int:
        self._check_rank(rank, what)
        if rank == self.rank:
            raise SelfSend(rank)
        return self.ranks[rank]

    def _tag(self, tag: int) -> Tag:
        if not isinstance(tag, int) or not 0 <= tag <= _MAX_TAG:
            raise SizeMismatch(f"a tag from 0 to {_MAX_TAG}", shown(tag), advice="choose another")
        return Tag(self.context, 0, tag)
