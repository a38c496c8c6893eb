"""What torch gets for a collective under way: a `torch.distributed.Work` around Echelon's."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor
from torch.distributed import Work as TorchWork
from torch.futures import Future, collect_all

from echelon.backends.work import Work
from echelon.errors import UnsupportedOp
from echelon.interop.futures import FOREVER, Outcome, finished

_SMALL_BYTES = 4096
UNSET = timedelta(0)
"""What torch passes for "no timeout"."""


def seconds(timeout: timedelta) -> float | None:
    """Returns a timeout of torch in seconds, None for one that was not given, which torch writes as 0 or -1 ms."""
    return timeout.total_seconds() if timeout > UNSET else None


class Done(TorchWork):
    """An operation that has ended well."""

    def __init__(self, results: Sequence[Tensor]) -> None:
        super().__init__()
        self._results = list(results)

    def wait(self, timeout: timedelta = UNSET) -> bool:  # noqa: ARG002, D102
        return True

    def is_completed(self) -> bool:  # noqa: D102
        return True

    def is_success(self) -> bool:  # noqa: D102
        return True

    def exception(self) -> BaseException | None:  # noqa: D102
        return None

    def result(self) -> list[Tensor]:  # noqa: D102
        return self._results

    def synchronize(self) -> None:  # noqa: D102
        return

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future that has its value."""
        return finished(self._results)


class Orphans:
    """Operations that Python has dropped before anybody waited for them.

    C++ may hold the half of a Work that is C++, as DDP's `join` does, and that half alone does not know when the
    operation ends: whoever waits for it would wait for ever. Whether C++ holds it cannot be asked. So the last ones are
    kept, and of those that have ended well only tensors that are small, such as the number that `join` asks for.
    """

    def __init__(self) -> None:
        """Keeps none yet."""
        self._kept: deque[Pending] = deque(maxlen=4096)
        self._under_way: list[Pending] = []

    def keep(self, work: Pending) -> None:
        """Keeps the Python half of an operation."""
        self._kept.append(work)
        self._under_way = [each for each in (*self._under_way, work) if not each.let_go()]


class Pending(TorchWork):
    """An operation under way."""

    def __init__(self, work: Work[list[Tensor]], outcome: Outcome[list[Tensor]], orphans: Orphans) -> None:
        """Takes over an operation whose result is its tensors, and the future of it."""
        super().__init__()
        self._work = work
        self._outcome = outcome
        self._orphans = orphans
        self._is_wanted = True
        self._has_let_go = False

    def __del__(self) -> None:
        """Lives on if nobody has waited for the operation."""
        if self._is_wanted:
            self._orphans.keep(self)

    def let_go(self) -> bool:
        """Drops large tensors of an operation that has ended well; says whether it has ended."""
        if not (self._work.is_completed() and self._outcome.done()):
            return False
        if self._work.exception() is None and sum(tensor.nbytes for tensor in self._work.result()) > _SMALL_BYTES:
            del self._work, self._outcome
            self._has_let_go = True
        return True

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Returns when the operation has ended, and its future has its value, for which C++ asks next.

        Raises:
            Timeout: not within `timeout`; the operation goes on.
            EchelonError: it failed.
        """
        if not self._has_let_go:
            limit = seconds(timeout)
            self._work.wait(FOREVER if limit is None else limit)
            self._outcome.wait()
        self._is_wanted = False
        return True

    def is_completed(self) -> bool:  # noqa: D102
        return self._work.is_completed()

    def is_success(self) -> bool:  # noqa: D102
        return self._work.is_completed() and self._work.exception() is None

    def exception(self) -> BaseException | None:  # noqa: D102
        return self._work.exception()

    def result(self) -> list[Tensor]:  # noqa: D102
        return self._work.result()

    def synchronize(self) -> None:  # noqa: D102
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future of the tensors.

        Raises:
            UnsupportedOp: nobody in Python held the operation when it ended, and its tensors were large.
        """
        if self._has_let_go:
            raise UnsupportedOp("the tensors of an operation that was dropped are gone: keep the Work, or its future")
        self._is_wanted = False
        return self._outcome


class Coalesced(TorchWork):
    """Several operations that are waited for together."""

    def __init__(self, works: Sequence[TorchWork]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Returns when all have ended; `timeout` counts for each."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:  # noqa: D102
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:  # noqa: D102
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:  # noqa: D102
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def result(self) -> list[Tensor]:  # noqa: D102
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:  # noqa: D102
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future of the tensors of all."""
        futures = collect_all([work.get_future() for work in self._works])
        return futures.then(lambda all: [tensor for future in all.value() for tensor in future.value()])
