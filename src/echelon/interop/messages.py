"""What torch gets for a message under way."""

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
    """A message under way; whoever waits for it drives it."""

    def __init__(
        self, group: ProcessGroup, work: Work[T], peers: Sequence[int], settle: Callable[[T], Tensor], *, receives: bool
    ) -> None:
        """Takes over a message.

        Args:
            group: whose message it is.
            work: the message.
            peers: the ranks of the group that it is to or from.
            settle: makes the user's tensor of what came; called once, by whoever sees first that it came.
            receives: whether the message is withdrawn when a wait for it has run out of time.
        """
        super().__init__()
        self._group = group
        self._work: Work[T] = work
        self._peers = [group.ranks[peer] for peer in peers]
        self._settle = settle
        self._receives = receives
        self._tensor: Tensor | None = None

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Returns when a received tensor is there, or when a tensor that is sent may be changed again.

        Raises:
            Timeout: not within `timeout`; a receive is withdrawn: its tensor will not be written any more.
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
        """Says whether the message has ended, well or not; if well, the tensor is there."""
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
        """Returns the rank of the group that sent a message which was received from any rank."""
        came = self._work.result()
        return came.src if isinstance(came, Received) else self._group.ranks.index(self._peers[0])

    def _source_rank(self) -> int:
        return self.source_rank()

    def synchronize(self) -> None:  # noqa: D102
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future of the tensor; those of one group are completed in the order they were asked for."""
        outcome: Outcome[list[Tensor]] = Outcome()
        backend, lane = self._group.backend, ~self._group.context
        outcome.is_driven_by(backend.start(lambda: outcome.settle(self._come), "the future of a message", lane))
        return outcome

    def _come(self) -> list[Tensor]:
        self.wait()
        return self.result()
