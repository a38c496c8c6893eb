"""Execution of torch's collectives by Echelon: synchronously, or in the lane of the group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined] # public, by its docs

from echelon.backends.work import Work
from echelon.group.group import ProcessGroup
from echelon.interop.devices import ByDevice
from echelon.interop.works import Coalesced, Done, Orphans, Outcome, Pending, seconds


class Identity(ByDevice):
    """Names, store, timeout and end of a torch group over one of Echelon. torch calls these methods by their names.

    torch's C++ keeps names only for groups that have C++ backends, so this class keeps them.
    """

    def __init__(self, group: ProcessGroup, store: Store) -> None:
        """Wraps `group`; `store` is torch's store for it."""
        super().__init__(group)
        self._store = store
        self._name = self._description = ""

    def __repr__(self) -> str:
        return f"<EchelonProcessGroup {self._name!r} over {self.group!r}>"

    # Called from C++

    def getBackendName(self) -> str:  # noqa: D102, N802
        return "echelon"

    def setGroupName(self, name: str) -> None:  # noqa: D102, N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: D102, N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: D102, N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: D102, N802
        return self._description

    # Called from Python

    def get_group_store(self) -> Store:  # noqa: D102
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the default timeout of later calls."""
        self.group.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Closes the group: finishes pending sends, then frees connections that only this group uses."""
        self.group.close()

    def abort(self) -> None:
        """Aborts the group: every rank that waits for this one raises PeerFailed."""
        self.group.abort("it has aborted its torch.distributed group")


T = TypeVar("T")


class Options(Protocol):
    """Options common to all of torch's collectives."""

    timeout: timedelta
    asyncOp: bool  # noqa: N815


class Running(Identity):
    """Runner of collectives: each is one call of Echelon's group and a function that writes its result.

    Strategy. A synchronous collective runs in the calling thread. An asynchronous one runs in the group's lane, a
    thread with a queue. The lane then writes its result and completes its future, which runs the user's callbacks.
    """

    def __init__(self, group: ProcessGroup, store: Store) -> None:
        """Wraps `group`; `store` is torch's store for it."""
        super().__init__(group, store)
        self._thread = threading.local()
        self._coalesced: list[dist.Work] | None = None
        self._orphans = Orphans()

    def _run(
        self, call: Callable[..., T | Work[T]], settle: Callable[[T], Sequence[Tensor]], options: Options
    ) -> dist.Work:
        """Runs a collective. Blocks until it has ended, unless `options.asyncOp` is set.

        Args:
            call: starts it, given `async_op` and `timeout`.
            settle: writes its result into the user's tensors and returns them; called once.
            options: torch's options.
        """
        return self._counted(self._started(call, settle, options))

    def _started(
        self, call: Callable[..., T | Work[T]], settle: Callable[[T], Sequence[Tensor]], options: Options
    ) -> dist.Work:
        timeout = seconds(options.timeout)
        # Fast path of a synchronous call. A callback in the lane queues instead, which keeps the order of the group.
        if not options.asyncOp and not self._is_settling():
            return Done(settle(cast("T", call(async_op=False, timeout=timeout))))
        running = cast("Work[T]", call(async_op=True, timeout=timeout))
        settled = self._queue(lambda: list(settle(running.result())))
        outcome: Outcome[list[Tensor]] = Outcome()
        outcome.is_driven_by(self._queue(lambda: self._complete(outcome, settled)))
        work = Pending(settled, outcome, self._orphans)
        if not options.asyncOp:
            work.wait()
        return work

    def _queue(self, function: Callable[[], T]) -> Work[T]:
        return self.group.backend.lanes.start(
            function, f"the end of a collective of {self.group.name}", self.group.context
        )

    def _complete(self, outcome: Outcome[list[Tensor]], work: Work[list[Tensor]]) -> None:
        """Completes a future in the lane's thread, which then runs its callbacks."""
        # Nested: a callback may wait for an Outcome, and the lane's thread then runs queued jobs.
        was_settling = self._is_settling()
        self._thread.settles = True
        try:
            outcome.settle(work.result)
        finally:
            self._thread.settles = was_settling

    def _is_settling(self) -> bool:
        """Whether a callback in the lane's thread is running. Jobs queued before it come before its own operations."""
        return getattr(self._thread, "settles", False)

    # Several operations at once

    def _counted(self, work: dist.Work) -> dist.Work:
        """Adds an operation to the open coalescing block, if there is one, and returns it."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._coalesced = []
        else:
            self.group_for(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        if device.type != "cpu":
            elsewhere: dist.Work = self.group_for(device)._end_coalescing(device)
            return elsewhere
        works, self._coalesced = self._coalesced or [], None
        return Coalesced(works)
