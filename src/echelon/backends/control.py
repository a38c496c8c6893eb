"""Control plane of one rank: where the other ranks are, whether they live, and how a rank leaves."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from echelon.backends.status import Question, Status
from echelon.backends.work import Work
from echelon.errors import Closed, CollectiveMismatch, Failure, PeerFailed, fails, inherited_error, reason_of
from echelon.operation_records import FlightRecorder


class ControlPlane(ABC):
    """Knowledge of one rank about the others: hosts, status, failures; and the end of this rank."""

    def __init__(
        self, rank: int, world_size: int, recorder: FlightRecorder | None = None, hosts: Sequence[int] | None = None
    ) -> None:
        """Describes the rank.

        Args:
            rank: this rank.
            world_size: number of ranks.
            recorder: records the operations of this rank; None: a new one.
            hosts: the host of each rank, by number; None: all share one.
        """
        self.rank = rank
        self.world_size = world_size
        self.recorder = FlightRecorder() if recorder is None else recorder
        """Records the last operations of this rank."""
        self.hosts = (0,) * world_size if hosts is None else tuple(hosts)
        """The host of each rank, by number: ranks with equal numbers share one. The same on every rank."""
        self._process = os.getpid()

    @abstractmethod
    def close(self, timeout: float) -> None:
        """Drains the sends, tells the peers and frees all connections. A second call does nothing.

        Args:
            timeout: seconds for the sends.

        Raises:
            Timeout: a rank did not take all messages in `timeout` seconds. Everything is freed.
        """

    @abstractmethod
    def abort(self, reason: str, origin: int | None = None) -> None:
        """Tells every peer that this rank gives up, then closes without waiting. Peers get PeerFailed with `reason`.

        Args:
            reason: the cause, in one line.
            origin: the rank that it began with; None: this one.
        """

    @abstractmethod
    def revoke(self, context: int, ranks: Iterable[int], failure: Failure) -> Failure:
        """Revokes a context: its pending and future collectives fail with `failure` on all `ranks`.

        Returns the first failure that this rank knows of for the context: `failure`, or an earlier one.

        A collective that fails on one rank leaves others waiting for this rank, not for the one that is gone. They
        raise the first cause instead of waiting for their timeout.

        Args:
            context: number of the group, unique in the world.
            ranks: the members of the group, by their ranks in the world.
            failure: the cause.
        """

    # Optional: more to say in errors

    def ask(
        self,
        ranks: Iterable[int],  # noqa: ARG002
        question: Question,  # noqa: ARG002
        timeout: float,  # noqa: ARG002
        until: Work[Any] | None = None,  # noqa: ARG002
    ) -> dict[int, Status]:
        """Asks other ranks for their status.

        Returns the answers that come within `timeout` seconds, and before `until` has ended.

        Args:
            ranks: the ranks to ask.
            question: the question, with the number of the group.
            timeout: most seconds to wait.
            until: a Work that ends the wait early. None: nothing does.
        """
        return {}

    def message_wait(self, receiver: int) -> Status | None:  # noqa: ARG002
        """Returns the answer of this rank to `wait_behind(receiver)`. None if it may go on, or if it is not known."""
        return None

    def num_sent(self, rank: int) -> int:  # noqa: ARG002
        """Returns the number of messages sent to a rank, -1 if unknown. Messages of collectives do not count."""
        return -1

    def last_heard(self, rank: int) -> str:  # noqa: ARG002
        """Returns the call of the last collective message of a rank, as text. Empty if there was none."""
        return ""

    def separation(self, ranks: Collection[int]) -> str:  # noqa: ARG002
        """Returns the known cause for which messages between some of these ranks are lost now. Empty if there is none.

        This rank is one of `ranks`. Only simulated ranks know one: an injected fault.
        """
        return ""

    def lines_left(self, rank: int, context: int) -> Mapping[int, str]:  # noqa: ARG002
        """Returns the lines of the last calls of a rank that has closed, by their numbers. Empty if none are known.

        Args:
            rank: the rank that has closed.
            context: number of the group.
        """
        return {}

    # Optional: comparison of calls in `close`

    def join(self, context: int, ranks: Sequence[int]) -> None:  # noqa: B027
        """Adds a group to the groups whose calls `close` compares.

        Args:
            context: number of the group.
            ranks: the members, by their ranks in the world, this one included.
        """

    def keep_silent(self) -> None:  # noqa: B027
        """Switches off the comparison of calls in `close`: ranks may end with different numbers of calls."""

    def difference(self) -> CollectiveMismatch | None:
        """Returns, after `close`, the first difference to the calls of ranks that closed before.

        None if there is none, or if it cannot be known.
        """
        return None

    # For implementations

    def close_reason(self) -> PeerFailed:
        """Returns the failure that peers see when this rank closes: closed in good order, or because of an error."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            reason = reason_of(error) if fails(error) else "it has closed its group"
        else:
            during = "" if error is None else f" while it handled {type(error).__name__}: {error}"
            reason = f"it has closed its group{during}"
        return PeerFailed(self.rank, f"{reason}, {self.recorder.activity()}", has_closed=not fails(error))

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the rank's process, and so has no part in its world."""
        return os.getpid() != self._process

    def closed_error(self) -> Closed:
        """Returns the error for a call after `close`, or in a forked child."""
        if self.is_inherited:
            return inherited_error(f"the backend of rank {self.rank}", self._process)
        return Closed(f"the backend of rank {self.rank} is closed: make a new one")
