"""Who one of torch's groups is: its names, its store, its timeout, and how it ends."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined] # public, by its docs

from echelon.group import ProcessGroup
from echelon.interop.devices import ByDevice


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
