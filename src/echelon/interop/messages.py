"""Point-to-point messages of torch's process group interface. Ranks are group ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor
from torch.distributed import Work as TorchWork
from torch.futures import Future

from echelon.backends.memory import is_plain
from echelon.backends.work import Received, Work
from echelon.group.group import ProcessGroup
from echelon.group.message_wait import receive, wait_for
from echelon.interop.tensors import Tensors, deal, flat, only, writable
from echelon.interop.works import UNSET, EchelonWork, Outcome, Runner, seconds

T = TypeVar("T")


class Message(EchelonWork, Generic[T]):
    """Work of a message in flight. The waiting thread drives it."""

    def __init__(
        self, group: ProcessGroup, work: Work[T], peers: Sequence[int], settle: Callable[[T], Tensors], receives: bool
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
        self._tensors: list[Tensor] = []

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Blocks until the received tensor is written, or the sent tensor may be changed again.

        Raises:
            Timeout: not within `timeout`. A receive is withdrawn: its tensor will not be written later.
            EchelonError: the message failed.
        """
        limit = seconds(timeout)
        group = self._group
        timeout_seconds = group.timeout if limit is None else limit
        wait = partial(receive, is_blocking=limit is None) if self._receives else wait_for
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

    def exception(self) -> BaseException | None:  # noqa: D102
        return self._work.exception()

    def result(self) -> list[Tensor]:  # noqa: D102
        # Once: a receive that is not in place copies its values here.
        if not self._tensors:
            self._tensors = list(self._settle(self._work.result()))
        return self._tensors

    def source_rank(self) -> int:
        """Returns the group rank of the sender."""
        came = self._work.result()
        return came.src if isinstance(came, Received) else self._group.ranks.index(self._peers[0])

    # torch's Python calls this one, its C++ the other.
    _source_rank = source_rank

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


def send(runner: Runner, tensors: Tensors, dst: int, tag: int = 0) -> TorchWork:
    """Starts a send of one tensor to a group rank."""
    work = runner.group.isend(flat(only(tensors, "send")), dst, tag)
    return Message(runner.group, work, [dst], lambda _: tensors, receives=False)


def recv(runner: Runner, tensors: Tensors, src: int, tag: int = 0) -> TorchWork:
    """Starts a receive of one tensor from a group rank."""
    tensor = only(writable(tensors, "recv"), "recv")
    # Other tensors, such as strided ones, get a copy of the message at the end.
    work = runner.group.irecv(src, tag, flat(tensor) if is_plain(tensor) else None)
    return Message(runner.group, work, [src], partial(deal, into=tensors, operation="recv"), receives=True)


def recv_anysource(runner: Runner, tensors: Tensors, tag: int = 0) -> TorchWork:
    """Starts a receive of one tensor from any rank. `source_rank()` of the Work returns the sender."""
    only(writable(tensors, "recv"), "recv")
    work: Work[Received] = runner.group.irecv_any(tag)
    others = [rank for rank in range(runner.group.world_size) if rank != runner.group.rank]
    return Message(runner.group, work, others, lambda came: deal(came.tensor, tensors, "recv"), receives=True)


MESSAGES: Mapping[str, Callable[..., TorchWork]] = {"send": send, "recv": recv, "recv_anysource": recv_anysource}
"""By torch's name."""
