"""How a collective of torch's interface is run by Echelon: at once, or in the lane of the group."""

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

# Who one of torch's groups is: its names, its store, its timeout, and how it ends.


class Identity(ByDevice):
    """A group of torch over one of Echelon. Methods have the names that torch calls them by, from Python or from C++.

    torch's C++ keeps names only for groups that have C++ backends, so they are kept here.
    """

    def __init__(self, group: ProcessGroup, store: Store) -> None:
        """Puts torch's interface before `group`; `store` is the one that torch gave for it."""
        super().__init__(group)
        self._store = store
        self._name = self._description = ""

    def __repr__(self) -> str:
        return f"<EchelonProcessGroup {self._name!r} over {self.group!r}>"

    # What C++ calls

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

    # What Python calls

    def get_group_store(self) -> Store:  # noqa: D102
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Has every later call wait so long, unless it says otherwise itself."""
        self.group.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Finishes what was sent and frees the connections, if they are this group's own."""
        self.group.close()

    def abort(self) -> None:
        """Gives up: every rank that waits for this one gets PeerFailed."""
        self.group.abort("it has aborted its torch.distributed group")


T = TypeVar("T")


class Options(Protocol):
    """What the options of all torch's collectives have in common."""

    timeout: timedelta
    asyncOp: bool  # noqa: N815


class Running(Identity):
    """Runs collectives, each of which is one call of Echelon's group with something to do when it is done."""

    def __init__(self, group: ProcessGroup, store: Store) -> None:
        """Puts torch's interface before `group`; `store` is the one that torch gave for it."""
        super().__init__(group, store)
        self._thread = threading.local()
        self._coalesced: list[dist.Work] | None = None
        self._orphans = Orphans()

    def _run(
        self, call: Callable[..., T | Work[T]], settle: Callable[[T], Sequence[Tensor]], options: Options
    ) -> dist.Work:
        """Runs a collective, beside the caller if the options say so.

        Args:
            call: begins it, given `async_op` and `timeout`.
            settle: makes the user's tensors of its result; called once.
            options: torch's.
        """
        return self._counted(self._started(call, settle, options))

    def _started(
        self, call: Callable[..., T | Work[T]], settle: Callable[[T], Sequence[Tensor]], options: Options
    ) -> dist.Work:
        timeout = seconds(options.timeout)
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
        return self.group.backend.start(function, f"the end of a collective of {self.group.name}", self.group.context)

    def _complete(self, outcome: Outcome[list[Tensor]], work: Work[list[Tensor]]) -> None:
        """Completes a future in the lane's thread, where its callbacks then run."""
        was_settling = self._is_settling()
        self._thread.settles = True
        try:
            outcome.settle(work.result)
        finally:
            self._thread.settles = was_settling

    def _is_settling(self) -> bool:
        """Whether this is a callback in the lane's thread: what was queued there comes before what it begins."""
        return getattr(self._thread, "settles", False)

    # Several operations at once

    def _counted(self, work: dist.Work) -> dist.Work:
        """Keeps an operation for `_end_coalescing`, if it comes after `_start_coalescing`, and returns it."""
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
