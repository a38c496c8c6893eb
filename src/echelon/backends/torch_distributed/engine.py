"""Engines: process groups of torch.distributed (c10d backends) whose operations can be abandoned.

Strategy. An engine runs one operation at a time. All its ranks have agreed on the operation and begin it at about the
same time. torch's own waits end only with the operation or its timeout. So operations on CPU tensors are waited for in
slices of 20 ms, and between two slices the rank looks for a reason to stop: a rank has died, or the group was revoked.
Operations on tensors of a device are queued there; the device's stream waits for them, and no thread does. An abandoned
operation keeps its tensors and its process group until it ends. One thread waits for that end, nobody else.
"""

from __future__ import annotations

import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined] # public, by its docs

from echelon._torch_private.autograd import is_in_backward
from echelon._torch_private.distributed import all_gather_into, make_process_group
from echelon.backends.formats.wire import Tag
from echelon.backends.host_copies import AcceleratorStreamScope, StreamScope
from echelon.backends.lanes import wait_checking, wait_for_news
from echelon.backends.memory import as_bytes
from echelon.backends.tcp.backend import TcpBackend
from echelon.backends.torch_distributed.engines import ENGINES, TIMED
from echelon.backends.torch_distributed.store import meet_at_store
from echelon.errors import EchelonError, PeerFailed, Timeout

T = TypeVar("T")

Look = Callable[[], None]
"""Raises the reason to stop waiting for an operation. Returns if there is none."""
Begin = Callable[[dist.ProcessGroup], dist.Work | None]
"""Begins an operation of a process group."""

# The engine waits longer than the caller: the caller's own timeout can say which rank is late, the engine's cannot.
_MARGIN = timedelta(seconds=1)
# Most seconds that a rank whose engine failed waits to learn which rank was the cause.
_NEWS_SECONDS = 2.0
# The variable by which users tell torch which network Gloo uses.
_INTERFACE = "GLOO_SOCKET_IFNAME"

# The name of torch 2.13, and the name of the versions before it.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class EngineFailed(Exception):
    """Failure of an engine in the middle of an operation, with torch's text."""


def _nothing() -> None: ...


def in_thread(function: Callable[[], T], name: str, look: Look = _nothing) -> T:
    """Runs a function of torch that may block for ever, in a thread of its own, and returns its result.

    Calls `look` while it waits. An exception of `look` leaves the thread behind.
    """
    outcome: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # the caller raises it
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    wait_checking(lambda seconds: bool(futures.wait([outcome], seconds).done), look)
    return outcome.result()


class Engine:
    """Collectives and messages of one process group, on contiguous tensors of one device and dtype."""

    def __init__(self, group: dist.ProcessGroup, rank: int, num_ranks: int, *, is_timed: bool) -> None:
        """Takes over a process group.

        Args:
            group: used by this engine alone.
            rank: this rank in the group.
            num_ranks: number of ranks in the group.
            is_timed: whether operations of the group take a timeout.
        """
        self.rank = rank
        self.num_ranks = num_ranks
        self._group: dist.ProcessGroup | None = group
        self._is_timed = is_timed
        self._look: Look = _nothing

    @contextmanager
    def limited(self, seconds: float, look: Look) -> Iterator[None]:
        """Limits the operation inside to `seconds`, and calls `look` while it waits."""
        self._look = look
        if self._is_timed and self._group is not None:
            self._group.set_timeout(timedelta(seconds=max(0.0, seconds)) + _MARGIN)
        try:
            yield
        finally:
            self._look = _nothing

    def close(self) -> None:
        """Drops the process group. Its connections end, so pending operations of peers fail."""
        self._group = None

    def all_reduce(self, flat: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduces a tensor over all ranks, in place."""
        self._run(lambda group: dist.all_reduce(flat, op, group, async_op=True), flat)

    def reduce(self, flat: torch.Tensor, dst: int, op: dist.ReduceOp.RedOpType) -> None:
        """Reduces a tensor over all ranks, in place on rank `dst`. On other ranks it is undefined afterwards."""
        self._run(lambda group: dist.reduce(flat, op=op, group=group, async_op=True, group_dst=dst), flat)

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        """Overwrites a tensor with the tensor of rank `src`."""
        self._run(lambda group: dist.broadcast(data, group=group, async_op=True, group_src=src), data)

    def all_gather(self, out: torch.Tensor, data: torch.Tensor) -> None:
        """Writes the tensors of all ranks, all of one size, into `out`."""
        self._run(lambda group: all_gather_into(group, out, data), out)

    def reduce_scatter(self, out: torch.Tensor, flat: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduces a tensor over all ranks, and writes this rank's part into `out`. All parts have one size."""
        self._run(lambda group: _reduce_scatter(out, flat, op, group=group, async_op=True), out)

    def exchange(self, parts: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
        """Sends part r to each rank r, and receives from rank r into place r, of any dtypes and sizes."""
        sends, gets = [as_bytes(part) for part in parts], [as_bytes(place) for place in places]
        sizes, counts = [len(get) for get in gets], [len(send) for send in sends]
        given = torch.cat(sends)
        came = given.new_empty(sum(sizes))
        self._run(lambda group: dist.all_to_all_single(came, given, sizes, counts, group=group, async_op=True), came)
        for place, part in zip(gets, torch.split(came, sizes), strict=True):
            place.copy_(part)

    def send(self, data: torch.Tensor, dst: int) -> None:
        """Sends a tensor to rank `dst`."""
        self._run_message(lambda group: dist.isend(data, group=group, group_dst=dst), data)

    def receive(self, data: torch.Tensor, src: int) -> None:
        """Overwrites a tensor with the next message from rank `src`, which has its size."""
        self._run_message(lambda group: dist.irecv(data, group=group, group_src=src), data)

    def _run(self, begin: Begin, tensor: torch.Tensor) -> None:
        with _torch_errors():
            work = self._begun(begin, is_beside=is_in_backward() and tensor.device.type == "cpu")
            if work is not None and tensor.device.type != "cpu":
                work.wait()  # the device's stream waits, not this thread
                work = None
        if work is None:
            return
        try:
            wait_checking(partial(_ends_within, work), self._look)
        except BaseException:
            if not work.is_completed():
                # The end may be far away, and whoever drops the process group waits for it: a thread does both.
                threading.Thread(target=_outlive, args=(work, self._group), daemon=True).start()
            raise

    def _run_message(self, begin: Begin, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            self._run(begin, tensor)
            return

        def move() -> None:
            with _torch_errors():
                if (work := self._begun(begin)) is not None:
                    work.wait()

        # Gloo closes the connection of two ranks when a wait times out, so slices of 20 ms would end the channel.
        in_thread(move, "echelon message", self._look)

    def _begun(self, begin: Begin, *, is_beside: bool = False) -> dist.Work | None:
        # Without this check, torch would take None for its default group.
        if self._group is None:
            raise EngineFailed("it was closed")
        if not is_beside:
            return begin(self._group)
        # Gloo's thread keeps the context of the thread that began, and a context in a backward refers to Python's
        # objects. Gloo drops the context some time after the operation, for which it needs the interpreter's lock.
        # Whoever drops the process group joins Gloo's thread with the lock held: a deadlock. So another thread begins.
        return in_thread(partial(begin, self._group), "echelon beside backward")


@contextmanager
def _torch_errors() -> Iterator[None]:
    """Maps torch's errors to EngineFailed."""
    try:
        yield
    except RuntimeError as error:  # its further lines are a C++ backtrace
        raise EngineFailed(str(error).partition("\n")[0]) from error


def _ends_within(work: dist.Work, seconds: float) -> bool:
    """Waits for an operation. False if it goes on after `seconds`; raises EngineFailed if it failed."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False  # the slice has ended, not the operation
        with _torch_errors():
            work.wait()
    return True


def _outlive(work: dist.Work, group: dist.ProcessGroup) -> None:  # noqa: ARG001
    """Keeps an operation and its process group until the operation has ended."""
    try:
        work.wait()
    except RuntimeError:
        return


def _forget_operation(failure: BaseException) -> None:
    """Clears the frames of an error's traceback: the operation in them would keep the connections open."""
    error: BaseException | None = failure
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


class Engines:
    """Engines of one rank: opens them, checks on the ranks they wait for, and names the cause of a failure."""

    def __init__(self, tcp: TcpBackend, name: str, store: Store) -> None:
        """Opens no engine yet.

        Args:
            tcp: connects all ranks.
            name: one of `ENGINES`.
            store: of rank 0, used for nothing else.
        """
        self.name = name
        self.rank = tcp.rank
        self.device = torch.device("cpu")
        """Device of this rank's tensors that are not on the CPU."""
        self._tcp = tcp
        self._store = store
        self._open: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._streams: dict[int, torch.Stream] = {}

    def open(
        self,
        prefix: str,
        ranks: Sequence[int],
        devices: Iterable[str],
        deadline: float,
        look: Look,
        tag: Tag,
        begin: Callable[[dist.ProcessGroup, int, torch.device], None] | None = None,
    ) -> Engine:
        """Returns a new engine. All its ranks call it.

        Args:
            prefix: name of the engine in the store.
            ranks: the world's rank of each member.
            devices: the device types of its tensors.
            deadline: time at which the members must have connected.
            look: called during the wait.
            tag: of a message with which the ranks find each other.
            begin: runs first on the process group, with this rank in it and the device.

        Raises:
            EngineFailed: torch could not connect the members.
        """
        rank, members = list(ranks).index(self.rank), self._tcp.members
        host = members[self.rank].host if members and _INTERFACE not in os.environ else ""
        engines = {device: ENGINES[self.name][device] for device in devices}
        seconds = max(1.0, deadline - self.now())
        timeout = timedelta(seconds=seconds)

        def make() -> dist.ProcessGroup:
            try:
                store = PrefixStore(prefix, self._store_of(ranks, tag, seconds))
                group = make_process_group(engines, store, rank, len(ranks), timeout, host)
                if begin is not None:
                    begin(group, rank, self.device)
                # The store ends with its rank or the rank's group, and other members may still be reading addresses.
                store.set(f"connected/{rank}", "")
                if rank == 0:
                    store.wait([f"connected/{member}" for member in range(len(ranks))], timeout)
            except Exception as error:  # torch does not document its errors here; `cause_of` finds those of TCP
                raise EngineFailed(f"no connections: {error}") from error
            return group

        # torch waits in there for the other members, even for one that has died.
        group = in_thread(make, f"echelon rank {self.rank}, {self.name}", look)
        engine = Engine(group, rank, len(ranks), is_timed=self.name in TIMED)
        self._open.add(engine)
        return engine

    def _store_of(self, ranks: Sequence[int], tag: Tag, seconds: float) -> Store:
        if ranks[0] == 0:
            # A connection of its own: a thread that waits on a connection blocks others, which open other engines.
            return cast("Store", self._store.clone())  # type: ignore[attr-defined] # not in its stub
        # Rank 0 may have left, and its store with it.
        return meet_at_store(self._tcp, ranks, tag, seconds)

    def close(self) -> None:
        """Closes all engines."""
        for engine in list(self._open):
            engine.close()

    def now(self) -> float:
        """Returns the time, in seconds, that deadlines run on."""
        return self._tcp.now()

    def check(self, context: int) -> None:
        """Raises Closed or PeerFailed if a group cannot begin an operation."""
        self._tcp.control.check_open(context)

    def check_liveness(self, deadline: float, context: int, ranks: Sequence[int]) -> None:
        """Raises the reason to stop waiting, if there is one: a revocation, the death of a rank, or Timeout."""
        self._tcp.control.poll()
        self.check(context)
        for rank in ranks:
            error = self._tcp.control.failure(rank, context)
            # A rank that has closed its group has done its part of an operation that all had agreed on.
            if isinstance(error, PeerFailed) and not error.has_closed:
                raise error
        if self.now() >= deadline:
            raise Timeout(f"{self.name}: its time is up")

    def cause_of(self, failure: EngineFailed, look: Look, context: int, ranks: Iterable[int]) -> EchelonError:
        """Returns the failure of one of `ranks` if that failed the engine, else an error with the engine's text."""
        _forget_operation(failure)
        # The engine may notice a broken connection before TCP or the kernel tells which process died.
        try:
            wait_for_news(_NEWS_SECONDS, self.now, look)
        except EchelonError as error:
            return error
        failures = (found for rank in ranks if (found := self._tcp.control.failure(rank, context)))
        return next(failures, PeerFailed(self.rank, f"{self.name} failed: {failure}"))

    def scope(self, lane: int) -> StreamScope | None:
        """Returns the caller's place among the streams of the device. None on the CPU."""
        if self.device.type == "cpu":
            return None
        if lane not in self._streams:
            self._streams[lane] = torch.Stream(self.device)
        return AcceleratorStreamScope(self._streams[lane])

    def finish_queued(self) -> None:
        """Blocks until the device has run all work on the caller's stream."""
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()

    def finish_scopes(self) -> None:
        """Blocks until the device has run all work of all scopes."""
        for stream in self._streams.values():
            stream.synchronize()
