"""torch's Work for point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Generic, TypeVar

from torch import Tensor
from torch.distributed import Work as TorchWork
from torch.futures import Future

from echelon.backends.work import Received, Work
from echelon.group.group import ProcessGroup
from echelon.group.message_wait import receive, wait_for
from echelon.interop.works import UNSET, Outcome, seconds

T = TypeVar("T")


class Message(TorchWork, Generic[T]):
    """Work of a message in flight. The waiting thread drives it."""

    def __init__(
        self, group: ProcessGroup, work: Work[T], peers: Sequence[int], settle: Callable[[T], Tensor], *, receives: bool
    ) -> None:
        """Wraps a message.

        Args:
            group: group of the message.
            work: Echelon's Work of the message.
            peers: group ranks that it goes to or may come from.
            settle: turns the received value into the user's tensor; called once, when the end is first seen.
            receives: whether it is a receive, which a timeout withdraws.
        """
        super().__init__()
        self._group = group
        self._work: Work[T] = work
        self._peers = [group.ranks[peer] for peer in peers]
        self._settle = settle
        self._receives = receives
        self._tensor: Tensor | None = None

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Blocks until the received tensor is written, or the sent tensor may be changed again.

        Raises:
            Timeout: not within `timeout`. A receive is withdrawn: its tensor will not be written later.
            EchelonError: the message failed.
        """
        limit = seconds(timeout)
        group = self._group
        wait = receive if self._receives else wait_for
        timeout_seconds = group.timeout if limit is None else limit
        wait(group.backend, self._work, self._peers, group.ranks, group.context, timeout_seconds)
        self.result()
        return True

    def is_completed(self) -> bool:
        """Whether the message has ended, also by a failure. After a success the tensor is written."""
        if not self._work.is_completed():
            return False
        if self._work.exception() is None:
            self.result()
        return True

    def is_success(self) -> bool:  # noqa: D102
        return self.is_completed() and self._work.exception() is None

    def exception(self) -> BaseException | None:  # noqa: D102
        return self._work.exception()

    def result(self) -> list[Tensor]:  # noqa: D102
        if self._tensor is None:
            self._tensor = self._settle(self._work.result())
        return [self._tensor]

    def source_rank(self) -> int:
        """Returns the group rank of the sender."""
        came = self._work.result()
        return came.src if isinstance(came, Received) else self._group.ranks.index(self._peers[0])

    def _source_rank(self) -> int:
        return self.source_rank()

    def synchronize(self) -> None:  # noqa: D102
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future of the tensor. Futures of one group complete in the order of these calls."""
        outcome: Outcome[list[Tensor]] = Outcome()
        # Not the lane of the group's collectives (its context), so that neither queue waits for the other.
        backend, lane = self._group.backend, ~self._group.context
        outcome.is_driven_by(backend.lanes.start(lambda: outcome.settle(self._come), "the future of a message", lane))
        return outcome

    def _come(self) -> list[Tensor]:
        self.wait()
        return self.result()
