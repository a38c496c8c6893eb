"""Engine: one group's process group of torch.distributed (a c10d backend), with waits that can be given up.

Strategy. One operation at a time, begun by all ranks at about the same time: they have agreed on it before. A wait
for an operation on CPU tensors is divided into pieces of 20 ms. In between this rank checks its peers, so that it does
not wait for one that has died or given up. An operation on tensors of a device is queued, and the device's stream
waits. An abandoned operation keeps its tensors and the process group until it ends; no thread waits for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from echelon._torch_private import all_gather_into, is_in_backward
from echelon.backends.memory import as_bytes

_LOOK = timedelta(seconds=0.02)
_MARGIN = timedelta(seconds=1)
"""How much longer than the caller the engine waits, so that the caller can say for whom."""

Look = Callable[[], None]
"""Raises the reason to stop waiting for an operation. Returns if there is none."""

# The name of torch 2.13, and that of the versions before it.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class EngineFailed(Exception):
    """Failure of an engine in the middle of an operation, with torch's text."""


def greet(group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
    """Returns when a byte of rank 0 is at rank 1: NCCL connects two ranks when they talk for the first time."""
    token = torch.zeros(1, dtype=torch.uint8, device=device)
    work = dist.isend(token, group=group, group_dst=1) if rank == 0 else dist.irecv(token, group=group, group_src=0)
    if work is not None:
        work.wait()
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


class Engine:
    """The collectives of one group, on contiguous tensors of one device and dtype."""

    def __init__(self, group: dist.ProcessGroup, rank: int, num_ranks: int, *, is_timed: bool) -> None:
        """Takes over a process group of its own.

        Args:
            group: nobody else uses it.
            rank: this one, among its `num_ranks`.
            num_ranks: of the group.
            is_timed: whether its operations take a timeout.
        """
        self.rank = rank
        self.num_ranks = num_ranks
        self._group = group
        self._is_timed = is_timed
        self._look: Look = _nothing

    @contextmanager
    def limited(self, seconds: float, look: Look) -> Iterator[None]:
        """Limits the operation inside to `seconds`, and calls `look` while it waits."""
        self._look = look
        if self._is_timed:
            self._group.set_timeout(timedelta(seconds=max(0.0, seconds)) + _MARGIN)
        try:
            yield
        finally:
            self._look = _nothing

    def close(self) -> None:
        """Drops the process group. Its connections end, so pending operations of peers fail."""
        del self._group

    def all_reduce(self, flat: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Combines a tensor over all ranks, in place."""
        self._run(lambda: dist.all_reduce(flat, op, self._group, async_op=True), flat)

    def reduce(self, flat: torch.Tensor, dst: int, op: dist.ReduceOp.RedOpType) -> None:
        """Combines a tensor over all ranks, in place on rank `dst`; on others it is undefined afterwards."""
        self._run(lambda: dist.reduce(flat, op=op, group=self._group, async_op=True, group_dst=dst), flat)

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        """Overwrites a tensor with that of rank `src`."""
        self._run(lambda: dist.broadcast(data, group=self._group, async_op=True, group_src=src), data)

    def all_gather(self, out: torch.Tensor, data: torch.Tensor) -> None:
        """Writes the tensors of all ranks, all of one size, into `out`."""
        self._run(lambda: all_gather_into(self._group, out, data), out)

    def reduce_scatter(self, out: torch.Tensor, flat: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Combines a tensor over all ranks, and writes this rank's part of it, all of one size, into `out`."""
        self._run(lambda: _reduce_scatter(out, flat, op, group=self._group, async_op=True), out)

    def exchange(self, parts: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
        """Sends part r to each rank r, and receives from rank r into place r; any dtypes, any sizes."""
        sends, gets = [as_bytes(part) for part in parts], [as_bytes(place) for place in places]
        sizes = [len(get) for get in gets]
        given = torch.cat(sends)  # the call takes one buffer each way; as bytes, parts may differ in dtype
        came = given.new_empty(sum(sizes))
        counts = [len(send) for send in sends]
        self._run(
            lambda: dist.all_to_all_single(came, given, sizes, counts, group=self._group, async_op=True),
            came,
        )
        for place, part in zip(gets, torch.split(came, sizes), strict=True):
            place.copy_(part)

    def send(self, data: torch.Tensor, dst: int) -> None:
        """Sends a tensor to rank `dst`."""
        self._pass(lambda: dist.isend(data, group=self._group, group_dst=dst), data)

    def receive(self, data: torch.Tensor, src: int) -> None:
        """Overwrites a tensor with the next that rank `src` sends, which is of its size."""
        self._pass(lambda: dist.irecv(data, group=self._group, group_src=src), data)

    def _pass(self, begin: Callable[[], dist.Work | None], tensor: torch.Tensor) -> None:
        """Moves one message; a CPU tensor in a thread."""
        # Gloo closes the pair of two ranks when a wait times out, so waits of 20 ms would end the channel.
        if tensor.device.type != "cpu":
            self._run(begin, tensor)
            return
        problems: list[RuntimeError] = []

        def move() -> None:
            try:
                work = begin()
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                problems.append(error)

        thread = threading.Thread(target=move, name="echelon message", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK.total_seconds())
            self._look()
        if problems:
            raise EngineFailed(str(problems[0]).partition("\n")[0]) from problems[0]

    def _run(self, begin: Callable[[], dist.Work | None], tensor: torch.Tensor) -> None:
        try:
            if tensor.device.type != "cpu":
                if (work := begin()) is not None:
                    work.wait()
                return
            if (work := _begun_aside(begin) if is_in_backward() else begin()) is None:
                return
            while not _has_ended(work):
                self._look_while(work)
        except RuntimeError as error:
            raise EngineFailed(str(error).partition("\n")[0]) from error

    def _look_while(self, work: dist.Work) -> None:
        try:
            self._look()
        except BaseException:
            # Its end may be far away, and taking the process group apart waits for it: that is left to a thread.
            threading.Thread(target=_outlive, args=(work, self._group), daemon=True).start()
            raise


def _begun_aside(begin: Callable[[], dist.Work | None]) -> dist.Work | None:
    """Begins an operation in a thread of its own, of which Gloo then keeps the context instead of the caller's.

    A context in a backward refers to Python's objects. Gloo's thread drops it some time after the operation has
    ended, and needs the interpreter's lock for that. Closing the process group joins that thread with the lock held,
    so the two would wait for each other for ever.
    """
    begun: Future[dist.Work | None] = Future()

    def act() -> None:
        try:
            begun.set_result(begin())
        except BaseException as error:  # it belongs to the caller
            begun.set_exception(error)

    threading.Thread(target=act, name="echelon beside backward", daemon=True).start()
    return begun.result()


def _has_ended(work: dist.Work) -> bool:
    """Waits a little; raises the error of an operation that failed."""
    try:
        work.wait(_LOOK)
    except RuntimeError:
        if not work.is_completed():
            return False  # that was the time
        work.wait()
    return True


def _outlive(work: dist.Work, group: dist.ProcessGroup) -> None:  # noqa: ARG001
    """Keeps an operation and its process group until it has ended."""
    try:
        work.wait()
    except RuntimeError:
        return


def _nothing() -> None: ...
