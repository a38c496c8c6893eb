"""Process group: the user's object for communication between ranks.

This module creates, divides and closes groups. The calls of a group are in `collectives`, `coalesced`, `objects` and
`messages`. Collectives are run by `runner`.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, SupportsIndex, TextIO

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from echelon.arguments import check_seconds, is_iterable, named, no_attribute, refuse_others, shown
from echelon.backends.base import Backend
from echelon.collectives.calls.objects import JsonLike
from echelon.collectives.plans.algorithms import numbered
from echelon.collectives.plans.select import STATIC, Selector, Table
from echelon.errors import (
    EchelonError,
    InvalidArgument,
    PeerFailed,
    Timeout,
    UnsupportedOp,
    fails,
    failure_of,
    reason_of,
)
from echelon.group.base import Seconds
from echelon.group.coalesced import CoalescedCollectives
from echelon.group.collectives import Collectives
from echelon.group.messages import PointToPoint
from echelon.group.objects import ObjectCollectives
from echelon.group.runner import CollectiveRunner
from echelon.hashing import stable_number
from echelon.operation_records import write_records

__all__ = ["JsonLike", "ProcessGroup", "check_group"]

_WORLD_CONTEXT = 1
_MEANT = {
    **{"size": "world_size", "Get_size": "world_size", "get_rank": "rank", "Get_rank": "rank"},
    **{"new_group": "subgroup", "Split": "subgroup", "Create": "subgroup", "destroy_process_group": "close"},
    **{"destroy": "close", "Free": "close", "Abort": "abort", "Allgather": "all_gather", "Alltoall": "all_to_all"},
    **dict.fromkeys(("is_main_process", "is_global_zero"), " write group.rank == 0"),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_tensor"), "all_gather"),
    **{"reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all", "monitored_barrier": "barrier"},
    **{"broadcast_coalesced": " call broadcast for each tensor", "bcast": "broadcast"},
    **{"local_rank": " it is in the environment, as LOCAL_RANK, and chooses group.device"},
}
"""Names that torch and mpi4py give to attributes of a group."""


class ProcessGroup(Collectives, CoalescedCollectives, ObjectCollectives, PointToPoint):
    """Group of ranks that communicate. All of them must call the same collectives in the same order.

    Arguments are ranks of this group, 0 to world_size - 1. Errors name ranks of the whole world. Collectives take
    tensors of any strides and any dtype that can be sent, and hold no reference after they are done. Every call that
    can block takes `timeout` in seconds (None: the group's own).

    - collectives: all_reduce, reduce, broadcast, all_gather, gather, scatter, reduce_scatter, all_to_all, barrier
    - on lists of tensors: all_reduce_coalesced, reduce_coalesced, reduce_scatter_coalesced, all_gather_coalesced,
      gather_coalesced
    - on JSON-like objects: all_gather_object, broadcast_object, gather_object, scatter_object
    - point to point: send, recv, recv_any, sendrecv; isend, irecv, irecv_any, batch_isend_irecv
    - `print`, on one rank

    Collectives and messages raise PeerFailed if a rank has gone, DeadlockError if ranks wait for each other, Timeout,
    and Closed after `close`. They raise InvalidRank for a rank outside of the group, and InvalidArgument for a timeout
    that is no number of seconds. They raise UnsupportedOp for a tensor that the backend cannot move, and for an unknown
    `op`. Collectives raise CollectiveMismatch if ranks call different ones.
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
        """Makes the group of all ranks of a backend. For a part of the ranks use `subgroup`.

        Args:
            backend: Transport of the messages.
            ranks: The backend's rank of each member. None: all.
            context: Number that separates this group's messages from those of other groups.
            timeout: Default timeout of blocking calls, in seconds. None: the backend's.
            name: Name in errors.
            table: Table that selects the algorithms of collectives; the same on every member.

        Raises:
            InvalidArgument: `timeout` is not a number of seconds of at least 0.
            ValueError: `ranks` lacks the backend's own rank.
        """
        self.backend = backend
        self.ranks = tuple(range(backend.world_size) if ranks is None else ranks)
        self.rank = self.ranks.index(backend.rank)
        self.context = context
        hosts = backend.control.hosts
        self._selector = Selector(numbered([hosts[rank] for rank in self.ranks]), table)
        seconds = backend.timeout if timeout is None else check_seconds(timeout)
        self._runner = CollectiveRunner(backend, self.ranks, context, name, self._selector, seconds)
        if (known := self._runner.known) is not None:
            self._run_known, self._send_known, self._receive_known = known.run, known.send, known.receive
        self._num_subgroups = 0
        # Only the group of all ranks closes the backend; subgroups share it.
        self._owns_backend = ranks is None
        self._sends, self._receives = {}, {}
        self._last_sends, self._last_receives, self._learnt = {}, {}, set()
        _groups.add(self)
        self._callbacks: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        state = ", closed" if self._runner.is_closed else ""
        return f"<ProcessGroup {self.name!r}: rank {self.rank} of {self.world_size} over {self.backend.name}{state}>"

    @property
    def name(self) -> str:
        """Name in errors."""
        return self._runner.name

    @name.setter
    def name(self, name: str) -> None:
        self._runner.name = name

    @property
    def hosts(self) -> tuple[int, ...]:
        """Number of each rank's host; 0 is the host of rank 0. Selects the algorithms of collectives."""
        return self._selector.hosts

    @property
    def device(self) -> torch.device:
        """Device for this rank's tensors, chosen by `echelon.init(device=)`."""
        return self.backend.device

    @property
    def is_native(self) -> bool:
        """Whether the backend runs collectives itself, not by messages of a plan. The same on every rank."""
        return self._runner.is_native

    @property
    def table(self) -> Table:
        """Table that selects the algorithms: `echelon.collectives.plans.select.STATIC`, or a tuned one."""
        return self._selector.table

    # Groups

    def subgroup(
        self, ranks: Sequence[int], name: str | None = None, table: Table | None = None
    ) -> ProcessGroup | None:
        """Returns the group of some of the ranks. None on other ranks. Every rank of this group must call it.

        Args:
            ranks: Ranks of this group, in the order of the new group.
            name: Name in errors. None: derived from this group's.
            table: Table that selects the algorithms, the same on every rank: rules by operation, such as
                `{"all_reduce": (Rule("ring"),)}`. None: this group's.

        Raises:
            InvalidArgument: `ranks` is no list, is empty, or names a rank twice.
            InvalidRank: a rank that is not in this group.
            Closed: after `close`.
        """
        self._runner.check_open()
        if not is_iterable(ranks):
            raise InvalidArgument(f"ranks={shown(ranks)}: give a list of ranks, such as [0, 1]")
        members = list(ranks)
        for rank in members:
            self._check_rank(rank, "ranks")
        if len(set(members)) != len(members) or not members:
            problem = "names a rank twice" if members else "is empty"
            raise InvalidArgument(f"ranks={members} {problem}: give at least one rank, and each once")
        # No messages: each rank derives the context from the count. The next collective detects ranks that disagree.
        self._num_subgroups += 1
        self._runner.mark(f"subgroup({members})")
        context = context_of(f"{self.context}/{self._num_subgroups}")
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
        """Closes the group. The group of the whole world also finishes pending sends and frees all connections.

        A second call does nothing, as does a call in a forked child: the group is the parent's.

        Raises:
            EchelonError: an asynchronous operation of this group had failed, and nobody had waited for it.
            Closed: an asynchronous operation of this group was still in flight, and was cancelled.
            CollectiveMismatch: a rank that closed before has called other collectives than this one, or more or fewer;
                or a message between the two was not received.
        """
        was_closed, self._runner.is_closed = self._runner.is_closed, True
        if self._runner.is_inherited:
            return
        try:
            if self._owns_backend:
                self.backend.close()
        except EchelonError:  # some sends failed, but everything is freed
            self._call_back()
            raise
        self._call_back()
        self._runner.check_seen()
        if not was_closed and self._owns_backend and (difference := self.backend.control.difference()):
            raise difference

    def abort(self, reason: str, origin: int | None = None) -> None:
        """Fails this rank: ranks of the world that wait for it, now or later, get PeerFailed with `reason`.

        If ECHELON_FLIGHT_RECORDER names a folder, this rank's last operations are written to it.

        Args:
            reason: The cause, in one line.
            origin: Rank of the world that the failure began with. None: this one.
        """
        self._runner.is_closed = True
        if self._runner.is_inherited:
            return
        self.backend.abort(reason, origin)
        self._call_back()
        write_records(self.backend.flight_recorder, self.backend.rank)

    @refuse_others(flush=" each line is written out at once: leave it out", dst="rank", src="rank")
    def print(
        self, *values: object, rank: int | None = 0, sep: str = " ", end: str = "\n", file: TextIO | None = None
    ) -> None:
        """Prints values once, on one rank. Other ranks return at once. Does not communicate.

        Args:
            values: as of Python's `print`.
            rank: the rank that prints. None: all ranks, each line after its rank, as "rank 1: loss 0.5".
            sep, end, file: as of Python's `print`.

        Raises:
            InvalidRank: `rank` is not a rank of this group.
        """
        if rank is not None:
            self._check_rank(rank, "rank")
            if rank != self.rank:
                return
        text = sep.join(map(str, values))
        if rank is None:
            text = "\n".join(f"rank {self.rank}: {line}" for line in text.split("\n"))
        # In one write: a line and its end of two ranks that share a terminal would mix.
        out = sys.stdout if file is None else file
        out.write(text + end)
        out.flush()

    def when_closed(self, callback: Callable[[], object]) -> None:
        """Registers a function that is called once, after this group has closed or aborted.

        Args:
            callback: called without arguments. Its result is dropped.

        Raises:
            InvalidArgument: `callback` cannot be called.
        """
        if not callable(callback):
            raise InvalidArgument(f"callback is {named(callback)}: give a function without arguments")
        self._callbacks.append(callback)

    if not TYPE_CHECKING:  # type checkers report the name themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute("a ProcessGroup", name, dir(type(self)) if name[:2] != "__" else (), _MEANT)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UnsupportedOp(
            f"group {self.name!r} is this rank's connections, and cannot be copied or pickled: call echelon.init() in "
            "the process that needs it, and save a model's state_dict() instead of an object that holds the group"
        )

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # An error that fails this rank aborts, so that other ranks do not wait for it until their timeout. An error
        # that came from another rank names that rank as the cause.
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

    def _call_back(self) -> None:
        # Taken first, so that a callback that closes the group again does not run twice.
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def check_group(group: object, what: str = "group") -> ProcessGroup:
    """Returns `group` if it is a ProcessGroup.

    Raises:
        InvalidArgument: it is something else. The message says where to get a group.
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


def context_of(text: str) -> int:
    """Returns the context of a group from a text: the same on every rank, and different from that of any other text."""
    # The top bit keeps it apart from small numbers such as the world's context, 1.
    return stable_number(text) | 1 << 63


# Weak, so that it keeps no group alive.
_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _close_all_in_child() -> None:
    """Closes every group in a forked child, so that its calls raise at once."""
    # Before any lock is taken: the thread that held it at the fork does not exist in the child.
    for group in list(_groups):
        group._runner.is_closed = True


os.register_at_fork(after_in_child=_close_all_in_child)
