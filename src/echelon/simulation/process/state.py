"""Exchange of the process's state between simulated ranks.

Strategy. A process has one environment, one default group of torch.distributed, one random state of each kind. Ranks
take turns in them. The states are exchanged when code of another rank's program is about to run, not at every hand-over
between threads: inside the library nothing reads them. So every reader sees its rank's state, through any name and from
any of the rank's threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.group.group import ProcessGroup


class State(ABC):
    """One kind of state of the process, of which each rank has its own."""

    notes: Sequence[str] = ()
    """Sentences about what the program has changed that all ranks share. Known when the simulation has ended."""

    def first(self, rank: int) -> Any:  # noqa: ARG002 # of most kinds all ranks begin with the same
        """Returns the state with which a rank begins: the one from before the simulation, which is installed now."""
        return self.take()

    @abstractmethod
    def take(self) -> Any:
        """Returns the present state."""

    @abstractmethod
    def put(self, state: Any) -> None:
        """Installs a state."""

    def finish(self, states: Sequence[Any]) -> None:  # noqa: B027 # most kinds need nothing
        """Ends the exchange, after the state from before it was put back. `states` are the ranks' last ones."""


class RankStates:
    """All states that are exchanged in one simulation."""

    def __init__(self, states: Sequence[State], world_size: int) -> None:
        """Notes the present states, to which `restore` returns."""
        self._states = states
        self._outside = [state.take() for state in states]
        self._of_rank: list[list[Any] | None] = [None] * world_size
        self._installed: int | None = None

    def install(self, rank: int) -> None:
        """Installs the states of a rank."""
        # Fast path: the rank goes on without another one's program having run.
        if rank == self._installed:
            return
        self._keep()
        kept = self._of_rank[rank]
        # Made from the state outside of the simulation, not from that of the rank before.
        if kept is None:
            self._put(self._outside)
            kept = [state.first(rank) for state in self._states]
        self._put(kept)
        self._installed = rank

    def restore(self) -> None:
        """Installs the states from before the simulation."""
        self._keep()
        self._put(self._outside)
        for number, state in enumerate(self._states):
            state.finish([kept[number] for kept in self._of_rank if kept is not None])
        self._of_rank.clear()

    def _keep(self) -> None:
        if self._installed is not None:
            self._of_rank[self._installed] = [state.take() for state in self._states]
            self._installed = None

    def _put(self, kept: Sequence[Any]) -> None:
        for state, value in zip(self._states, kept, strict=True):
            state.put(value)


class ProgramWithStates(ABC):
    """Program of the ranks that brings kinds of state of its own."""

    @abstractmethod
    def states(self) -> Sequence[State]:
        """Returns these kinds for one simulation. Called outside of the ranks."""

    @abstractmethod
    def __call__(self, group: ProcessGroup) -> object:
        """Runs the program as the rank of `group`."""
