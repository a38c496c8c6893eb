"""The user's object: a group of ranks and everything they can say to each other.

What a group can be asked stands in the files beside this one, one for each kind of call: `collectives`, `coalesced`,
`objects`, `point_to_point`; how a collective is run, in `caller`. Here is how a group begins, is divided, and ends.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, SupportsIndex, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from echelon._torch_private import wraps_new_tensors
from echelon.arguments import check_seconds, named
from echelon.backends.admission import check_mode
from echelon.backends.base import Backend
from echelon.backends.inherited import inherited_error
from echelon.backends.work import Work
from echelon.collectives.calls.objects import JsonLike
from echelon.collectives.calls.operations import Operation
from echelon.collectives.plans.algorithms import numbered
from echelon.collectives.plans.select import STATIC, Selector, Table
from echelon.errors import (
    Closed,
    EchelonError,
    InvalidArgument,
    PeerFailed,
    Timeout,
    UnsupportedOp,
    failure_of,
)
from echelon.exits import fails, reason_of
from echelon.group.base import Seconds
from echelon.group.coalesced import CoalescedCollectives
from echelon.group.collectives import Collectives
from echelon.group.messages import PointToPoint
from echelon.group.objects import ObjectCollectives
from echelon.group.runner import CollectiveRunner
from echelon.operation_records import write_records

__all__ = ["JsonLike", "ProcessGroup", "check_group"]

T = TypeVar("T")

_WORLD_CONTEXT = 1


class ProcessGroup(Collectives, CoalescedCollectives, ObjectCollectives, PointToPoint):
    """Ranks that communicate. All of them must call the same collectives in the same order.

    Ranks are those of this group, 0 to world_size - 1; ranks that errors name are those of the whole world. Collectives
    take tensors of any strides and any dtype that can be sent, and hold no reference after they are done. Every call
    that can block takes `timeout` in seconds (None: the group's own).

    - collectives: all_reduce, reduce, broadcast, all_gather, gather, scatter, reduce_scatter, all_to_all, barrier
    - of many tensors at once: all_reduce_coalesced, reduce_coalesced, reduce_scatter_coalesced, all_gather_coalesced,
      gather_coalesced
    - of objects, JSON-like: all_gather_object, broadcast_object, gather_object, scatter_object
    - point to point: send, recv, recv_any, sendrecv; isend, irecv, irecv_any, batch_isend_irecv

    All collectives raise CollectiveMismatch if ranks call different ones, PeerFailed if a rank has gone, Timeout,
    Closed after `close`, and UnsupportedOp for a tensor that the backend cannot move.
    """

    def __init__(
        self,
        backend: Backend,
        ranks: Sequence[int] | None = None,
        *,
        context: int = _WORLD_CONTEXT,
        timeout: Seconds = None,
        name: str = "world",
        table: Table = STATIC,
    ) -> None:
        """Makes the group of all ranks of a backend; for parts of it use `subgroup`.

        Args:
            backend: what moves the bytes.
            ranks: the backend's rank of each member; None: all.
            context: what keeps messages of different groups apart.
            timeout: seconds that a blocking call waits by default; None: the backend's.
            name: shown in errors.
            table: which algorithms collectives run by; the same on every member.
        """
        self.backend = backend
        self.ranks = tuple(range(backend.world_size) if ranks is None else ranks)
        self.rank = self.ranks.index(backend.rank)
        self.timeout = backend.timeout if timeout is None else check_seconds(timeout)
        self.name = name
        self.context = context
        hosts = backend.hosts
        self._selector = Selector(numbered([hosts[rank] for rank in self.ranks]), table)
        self._caller = CollectiveRunner(backend, self.ranks, context, name, self._selector)
        self._num_subgroups = 0
        self._owns_backend = ranks is None
        self._known_sends = {}
        self._known_receives = {}
        self._closed = False
        self._process = os.getpid()
        _groups.add(self)
        self._callbacks: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<ProcessGroup {self.name!r}: rank {self.rank} of {self.world_size} over {self.backend.name}{state}>"

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each rank of this group, by number: 0 is that of rank 0. Collectives go by it."""
        return self._selector.hosts

    @property
    def device(self) -> torch.device:
        """Where this rank is to have its tensors: what `echelon.init(device=)` chose."""
        return self.backend.device

    @property
    def is_native(self) -> bool:
        """Whether the backend itself runs the collectives; else they are messages. The same on every rank."""
        return self._caller.is_native

    @property
    def table(self) -> Table:
        """Which algorithms the collectives run by: `echelon.collectives.plans.select.STATIC`, or what tuning found."""
        return self._selector.table

    # Groups

    def subgroup(
        self, ranks: Sequence[int], name: str | None = None, table: Table | None = None
    ) -> ProcessGroup | None:
        """Returns the group of some of the ranks; None on the others. Every rank of this group must call it.

        Args:
            ranks: ranks of this group, in the order that they are to have in the new one.
            name: shown in errors; None: made from this group's.
            table: which algorithms its collectives run by, the same on every rank; None: as in this group.

        Raises:
            InvalidArgument: `ranks` is no list, is empty, or names a rank twice.
            InvalidRank: a rank that is not in this group.
        """
        self._check_open()
        if not isinstance(ranks, Iterable) or isinstance(ranks, str):
            raise InvalidArgument(f"ranks={ranks!r}: give a list of ranks, such as [0, 1]")
        members = list(ranks)
        for rank in members:
            self._check_rank(rank, "ranks")
        if len(set(members)) != len(members) or not members:
            problem = "names a rank twice" if members else "is empty"
            raise InvalidArgument(f"ranks={members} {problem}: give at least one rank, and each once")
        self._num_subgroups += 1
        self._caller.mark(f"subgroup({members})")
        context = _context_of(self.context, self._num_subgroups)
        if self.rank not in members:
            return None
        name = name or f"{self.name}/{self._num_subgroups}"
        return ProcessGroup(
            self.backend,
            [self.ranks[rank] for rank in members],
            context=context,
            timeout=self.timeout,
            name=name,
            table=self._selector.table if table is None else table,
        )

    def close(self) -> None:
        """Finishes what was sent and frees the connections, if this is the whole world's group. May be called twice.

        In a forked child it does nothing: the group is the parent's.

        Raises:
            EchelonError: an asynchronous operation of this group had failed, and nobody had waited for it.
            Closed: an asynchronous operation of this group was still under way, and is given up.
            CollectiveMismatch: a rank that closed before has called other collectives than this one, or as many more or
                fewer; or a message between the two was not received.
        """
        was_closed, self._closed = self._closed, True
        if self._is_inherited:
            return
        try:
            if self._owns_backend:
                self.backend.close()
        except EchelonError:  # not all was sent, but everything is freed
            self._call_back()
            raise
        self._call_back()
        self._caller.check_seen()
        if not was_closed and self._owns_backend and (difference := self.backend.difference()):
            raise difference

    def abort(self, reason: str, origin: int | None = None) -> None:
        """Gives up: every rank of the world that waits for this one gets PeerFailed with `reason`, and so later.

        Where ECHELON_FLIGHT_RECORDER names a folder, this rank's last operations are written to it.
        """
        self._closed = True
        if self._is_inherited:
            return
        self.backend.abort(reason, origin)
        self._call_back()
        write_records(self.backend.flight_recorder, self.backend.rank)

    def when_closed(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once, when this group has closed or given up.

        Raises:
            InvalidArgument: `callback` cannot be called.
        """
        if not callable(callback):
            raise InvalidArgument(f"callback is {named(callback)}: give a function without arguments")
        self._callbacks.append(callback)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UnsupportedOp(
            f"group {self.name!r} is this rank's connections, and cannot be copied or pickled: call echelon.init() in "
            "the process that needs it, and save a model's state_dict() instead of an object that holds the group"
        )

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or not fails(error):
            self.close()
        elif isinstance(error, PeerFailed):
            self.abort(error.reason, error.rank)
        elif isinstance(error, Timeout):
            cause = failure_of(error, self.backend.rank)
            self.abort(cause.reason, cause.rank)
        else:
            self.abort(reason_of(error))

    # Inside

    @property
    def _is_inherited(self) -> bool:
        return os.getpid() != self._process

    def _call_back(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _call(
        self,
        operation: Operation[T],
        async_op: bool,
        timeout: Seconds,
        out: Tensor | None = None,
        changes: Sequence[Tensor] = (),
    ) -> T | Work[T]:
        seconds = self.timeout if timeout is None else check_seconds(timeout)
        return self._caller.call(operation, async_op, seconds, out, changes)

    def _reduced_as_before(self, tensor: Tensor, op: str, timeout: Seconds) -> bool:
        seconds = self.timeout if timeout is None else check_seconds(timeout)
        return not self._closed and not wraps_new_tensors() and self._caller.all_reduce_known(tensor, op, seconds)

    def _know_all_reduce(self, tensor: Tensor, op: str, note: str) -> None:
        self._caller.know_all_reduce(tensor, op, note)

    def _check_open(self) -> None:
        if self._closed:
            if self._is_inherited:
                raise inherited_error(f"group {self.name!r} of rank {self.backend.rank}", self._process)
            raise Closed(
                f"group {self.name!r} of rank {self.backend.rank} is closed: make a new one with echelon.init()"
            )
        if wraps_new_tensors():
            check_mode(f"group {self.name!r}")


def check_group(group: object, what: str = "group") -> ProcessGroup:
    """Returns a group that was given to a call.

    Raises:
        InvalidArgument: it is none; the message says where to get one.
    """
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, dist.ProcessGroup | DeviceMesh):
        raise InvalidArgument(
            f"{what} is torch's {type(group).__name__}: pass the group that echelon.init() returns, under the same "
            "launcher, or a subgroup of it"
        )
    raise InvalidArgument(
        f"{what} is {named(group)}: pass the group that echelon.init() returned, a subgroup of it, or mesh['dp']"
    )


def _context_of(parent: int, number: int) -> int:
    """Returns the context of a group's n-th subgroup: the same on every rank, and unlike any other's."""
    digest = hashlib.blake2b(f"{parent}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1 << 63


_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _close_all_in_child() -> None:
    """Has every call of a group in a forked child raise at once, before it takes a lock that nobody there releases."""
    for group in list(_groups):
        group._closed = True


os.register_at_fork(after_in_child=_close_all_in_child)
