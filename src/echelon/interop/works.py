"""What torch gets for a collective under way: a `torch.distributed.Work` around Echelon's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor
from torch.distributed import Work as TorchWork
from torch.futures import Future, collect_all

from echelon.backends.work import Work
from echelon.interop.futures import FOREVER, Outcome, finished

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


class Pending(TorchWork):
    """An operation under way."""

    def __init__(self, work: Work[list[Tensor]], outcome: Outcome[list[Tensor]]) -> None:
        """Takes over an operation whose result is its tensors, and the future of it."""
        super().__init__()
        self._work = work
        self._outcome = outcome

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Returns when the operation has ended, and its future has its value, for which C++ asks next.

        Raises:
            Timeout: not within `timeout`; the operation goes on.
            EchelonError: it failed.
        """
        limit = seconds(timeout)
        self._work.wait(FOREVER if limit is None else limit)
        self._outcome.wait()
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
        """Returns a future of the tensors."""
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
