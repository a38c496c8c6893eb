"""Base class of groups: the members, and the argument checks that all calls share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, TypeAlias, TypeVar

from torch import Tensor

from echelon.arguments import named
from echelon.backends.admission import check_values
from echelon.backends.base import Backend
from echelon.backends.formats.wire import Tag
from echelon.backends.host_copies import HostCopy
from echelon.backends.memory import check_dense, check_tensor, check_writable, wrong_device
from echelon.backends.work import Work
from echelon.collectives.calls.operations import Operation
from echelon.errors import InvalidArgument, InvalidRank, SelfSend, SizeMismatch
from echelon.group.staging import check_away

T = TypeVar("T")
Seconds: TypeAlias = float | None
No: TypeAlias = Literal[False]
Yes: TypeAlias = Literal[True]

_MAX_TAG = 2**32 - 1


class GroupBase(ABC):
    """A rank's view of its group: the members, the backend, and the entry point of collectives."""

    backend: Backend
    """Transport of the group's messages."""
    ranks: tuple[int, ...]
    """The backend's rank of each member."""
    rank: int
    """This rank within the group."""
    timeout: float
    """Default timeout of blocking calls, in seconds."""
    name: str
    """Name in errors."""
    context: int
    """Number that separates this group's messages from those of other groups. The same on every member."""

    @property
    def world_size(self) -> int:
        """Number of ranks in this group."""
        return len(self.ranks)

    @property
    @abstractmethod
    def hosts(self) -> tuple[int, ...]:
        """Number of each rank's host; 0 is the host of rank 0. Selects the algorithms of collectives."""

    @abstractmethod
    def _call(
        self,
        operation: Operation[T],
        async_op: bool,
        timeout: Seconds,
        out: Tensor | None = None,
        changes: Sequence[Tensor] = (),
    ) -> T | Work[T]:
        """Runs a collective here, or with `async_op` in the group's lane. If it fails, it fails on all ranks.

        The caller has checked that the group is open. Autograd is told that the operation overwrites `out` and
        `changes`.
        """

    @abstractmethod
    def _reduced_as_before(self, tensor: Tensor, op: str, timeout: Seconds) -> bool:
        """Fast path: runs an all-reduce whose arguments an earlier call validated. False if there was none."""

    @abstractmethod
    def _know_all_reduce(self, tensor: Tensor, op: str, note: str) -> None:
        """Remembers the validated arguments of an all-reduce that needs no copy on the host, for the fast path."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raises Closed if the group is closed, UnsupportedOp inside of FakeTensorMode or a transform of torch.func."""

    def _check(self, tensor: Tensor, what: str, *, in_place: bool = False) -> HostCopy | None:
        """Checks a tensor of a collective. Returns None if the backend can move it, else its copy on the host.

        Raises:
            Closed: the group was closed. UnsupportedOp: it cannot be moved. LaunchError: as `check_away`.
        """
        self._check_open()
        is_here = check_dense(tensor, self.backend.devices, what)
        if in_place:
            check_writable(tensor, what)
        return None if is_here else self._land(tensor, what)

    def _land(self, tensor: Tensor, what: str) -> HostCopy:
        if not self.backend.host_copies.handles(tensor):
            raise wrong_device(tensor, self.backend.devices, what)
        check_away(tensor, what, self.backend.name)
        return self.backend.host_copies.to_host(tensor)

    def _check_place(self, out: Tensor | None, what: str) -> None:
        """Raises UnsupportedOp if no result can be written into `out`."""
        # The shape of the result may be known only after the collective, so it is compared then.
        if out is not None:
            if not isinstance(out, Tensor):
                raise InvalidArgument(f"out is {named(out)}: pass one tensor for the whole result, or leave it out")
            check_values(out, f"{what}(out=)", takes_meta=True)
            if out.is_meta and not self.backend.host_copies.handles(out):
                raise wrong_device(out, self.backend.devices, f"{what}(out=)")
            check_writable(out, f"{what}(out=)")

    def _check_message(self, tensor: Tensor) -> None:
        self._check_open()
        if not check_dense(tensor, self.backend.messages.devices, "send"):
            raise wrong_device(tensor, self.backend.messages.devices, "send")

    def _check_out(self, out: Tensor | None) -> None:
        self._check_open()
        if out is not None:
            check_tensor(out, self.backend.messages.devices, "recv(out=)")

    def _check_rank(self, rank: int, what: str) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise InvalidRank(rank, self.world_size, what)

    def _peer(self, rank: int, what: str) -> int:
        self._check_rank(rank, what)
        if rank == self.rank:
            raise SelfSend(rank)
        return self.ranks[rank]

    def _tag(self, tag: int) -> Tag:
        if not isinstance(tag, int) or not 0 <= tag <= _MAX_TAG:
            raise SizeMismatch(f"a tag from 0 to {_MAX_TAG}", repr(tag), advice="choose another")
        return Tag(self.context, 0, tag)
