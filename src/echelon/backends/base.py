"""Interface of all backends: a control plane, messages, and collectives that need no messages.

A backend of your own is a `Messages`, a `ControlPlane` and a `Backend` that holds both. Everything else has a default.
`echelon.testing.check_backend` says whether it keeps the contract.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from echelon.arguments import check_world_size
from echelon.backends.collective import CollectiveExecutor
from echelon.backends.control import ControlPlane
from echelon.backends.host_copies import AcceleratorCopies, HostCopies, StreamScope
from echelon.backends.lanes import Lanes, ThreadLanes
from echelon.backends.messages import Messages
from echelon.errors import InvalidRank, PeerFailed, fails, reason_of


class Backend(ABC):
    """One rank of a world: its messages, its control plane, and the lanes of its asynchronous operations."""

    devices: frozenset[str] = frozenset({"cpu"})
    """The device types whose tensors the collectives of this backend can move."""
    host_copies: HostCopies = AcceleratorCopies()
    """How a group copies tensors of a device that this backend has no path for, where the user allows that."""
    query_peers_after = 1.0
    """Seconds that a collective waits for a rank before it asks whether that one makes the same calls."""
    now: Callable[[], float] = staticmethod(time.monotonic)
    """Returns the time, in seconds, that timeouts of this backend run on."""

    def __init__(self, messages: Messages, control: ControlPlane, lanes: Lanes | None = None) -> None:
        """Composes a backend.

        Args:
            messages: moves tensors between two ranks.
            control: knows the other ranks.
            lanes: run asynchronous operations; None: a thread for each lane.

        Raises:
            InvalidWorldSize, InvalidRank: the numbers are wrong.
        """
        check_rank(control.rank, control.world_size)
        self.messages = messages
        self.control = control
        self.lanes = ThreadLanes(f"rank {control.rank}", messages.timeout) if lanes is None else lanes
        self.rank = control.rank
        self.world_size = control.world_size
        self.timeout = messages.timeout
        self.flight_recorder = control.recorder
        """Records the last operations of this rank."""
        self.device = torch.device("cpu")
        """Device of this rank's tensors."""
        self.dealt: Counter[tuple[int, ...]] = Counter()
        """Number of times that this rank's samplers delivered, by the ranks to which they deal out their samples."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that users select this backend by, such as "tcp"."""

    def executor(self, context: int, ranks: Sequence[int]) -> CollectiveExecutor | None:  # noqa: ARG002
        """Returns the executor of a group's collectives, if they need no messages. None if plans over messages do them.

        The answer is the same on every member.

        Args:
            context: number of the group, unique in the world.
            ranks: the members, this rank included.
        """
        return None

    def crosses_network(self, ranks: Sequence[int]) -> bool:  # noqa: ARG002
        """Whether messages between this rank and these cross a network, so that processors wait for it.

        False: they stay in this machine, and all their time is processor time. Ranks may have different answers.

        Args:
            ranks: the members of a group, this rank included.
        """
        return True

    def aside(self, context: int) -> StreamScope | None:  # noqa: ARG002
        """Returns the place of a group's asynchronous operation among the streams of a device; None: there are none.

        Args:
            context: number of the group.
        """
        return None

    def compute(self, step: object) -> AbstractContextManager[object]:  # noqa: ARG002
        """Returns a context in which this rank computes `step`. A simulated rank takes from that how long it lasts.

        Args:
            step: the step, as a timeline shows it.
        """
        return nullcontext()

    def close(self, timeout: float | None = None) -> None:
        """Drains the sends, tells the peers and frees all resources. May be called twice.

        Args:
            timeout: seconds for the sends. None: the backend's.

        Raises:
            Timeout: a rank did not take all messages in `timeout` seconds (None: the backend's). Everything is freed.
        """
        seconds = self.timeout if timeout is None else timeout
        try:
            self.control.close(seconds)
        finally:
            self._end_lanes(seconds)

    def abort(self, reason: str, origin: int | None = None) -> None:
        """Tells every peer that this rank gives up, and frees all resources.

        Args:
            reason, origin: as of `ControlPlane.abort`.
        """
        try:
            self.control.abort(reason, origin)
        finally:
            self._end_lanes(_ABORT_SECONDS)

    def _end_lanes(self, seconds: float) -> None:
        # A forked child: a thread of its parent may have held the lock of the lanes at the fork.
        if not self.control.is_inherited:
            self.lanes.close(seconds)

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or not fails(error):
            self.close()
        elif isinstance(error, PeerFailed):
            self.abort(error.reason, error.rank)
        else:
            self.abort(reason_of(error))


_ABORT_SECONDS = 0.5
"""Seconds that `abort` waits at most for the operation of each lane."""


def check_rank(rank: int, world_size: int) -> None:
    """Raises InvalidWorldSize or InvalidRank for wrong numbers."""
    check_world_size(world_size)
    if not 0 <= rank < world_size:
        raise InvalidRank(rank, world_size)
