"""Interface of all backends: a Backend moves contiguous tensors between ranks.

Strategy. `isend` and `irecv` return a `Work` without blocking. A thread that waits on a Work drives the backend until
that Work is done; only when no thread waits does a background thread of the backend drive it. A wait ends in one of
four ways: the result, the error of the operation, `PeerFailed` as soon as the peer is known to be gone, or `Timeout`.
"""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from echelon.arguments import check_world_size
from echelon.backends.collective import CollectiveExecutor
from echelon.backends.formats.wire import Tag
from echelon.backends.host_copies import AcceleratorCopies, HostCopies, StreamScope
from echelon.backends.inherited import inherited_error
from echelon.backends.memory import check_tensor
from echelon.backends.operators import Combine
from echelon.backends.status import Question, Status
from echelon.backends.work import DEFAULT_TIMEOUT, Message, Received, Work
from echelon.errors import (
    Closed,
    CollectiveMismatch,
    Failure,
    InvalidRank,
    PeerFailed,
    SelfSend,
    Timeout,
    fails,
    reason_of,
)
from echelon.operation_records import FlightRecorder

T = TypeVar("T")


class Backend(ABC):
    """Moves contiguous CPU tensors between the ranks of one world, tagged and asynchronously.

    Messages of one sender with one tag arrive in the order they were sent; messages with different tags never mix. A
    send to a rank that is not receiving yet completes or stays under way, but never keeps this rank from doing
    something else.
    """

    devices: frozenset[str] = frozenset({"cpu"})
    """The device types whose tensors the collectives of this backend can move."""
    message_devices: frozenset[str] = frozenset({"cpu"})
    """The device types whose tensors it can move between two ranks."""
    host_copies: HostCopies = AcceleratorCopies()
    """How a group copies tensors of a device that this backend has no path for, where the user allows that."""
    shares_memory = False
    """Whether collectives of ranks on one host go through memory: they take processor time, and wait for no network."""
    query_peers_after = 1.0
    """Seconds that a collective waits for a rank before it asks whether that one makes the same calls."""

    def __init__(self, rank: int, world_size: int, timeout: float = DEFAULT_TIMEOUT) -> None:
        check_world_size(world_size)
        if not 0 <= rank < world_size:
            raise InvalidRank(rank, world_size)
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.device = torch.device("cpu")
        """Device of this rank's tensors."""
        self.flight_recorder = FlightRecorder()
        """Records the last operations of this rank."""
        self._num_barriers = 0
        self._process = os.getpid()

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that users select this backend by, such as "tcp"."""

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each rank, by number: ranks with equal numbers share one. The same on every rank."""
        return (0,) * self.world_size

    @abstractmethod
    def isend(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:
        """Starts to send `tensor` to rank `dst`. The tensor must not change until the Work is done.

        Args:
            tensor: contiguous, on one of `message_devices`; its shape and dtype travel along.
            dst: a rank other than this one.
            tag: what the message is for.
            note: what this rank believes it is doing, at most 1024 bytes of UTF-8; compared with the receiver's.

        Raises:
            InvalidRank, SelfSend, Closed, UnsupportedOp, SizeMismatch (of the tag): at once. Everything else comes
            from `Work.wait`.
        """

    @abstractmethod
    def irecv(
        self,
        src: int,
        tag: int | Tag = 0,
        *,
        out: torch.Tensor | None = None,
        note: str | None = "",
        must_fit: bool = True,
        combine: Combine | None = None,
    ) -> Work[torch.Tensor]:
        """Starts to receive a tensor from rank `src`; the Work's result is the tensor.

        Args:
            src: a rank other than this one.
            tag: what the message is for.
            out: contiguous tensor that is written and returned, one of inference mode too, in any thread; None: a new
                tensor of the shape and dtype that were sent, an ordinary one whatever the caller's mode.
            note: what this rank believes it is doing; None: accept any note, and keep it in `Work.note`.
            must_fit: a message that does not fit `out` is an error; False: it comes as a new tensor, and `out` stays
                as it is.
            combine: combines the message into `out`, by `combine(part of out, same part of the message)`, instead of
                overwriting it. It is called in any thread, part by part as the message arrives. A receive that is
                withdrawn or fails in the middle leaves `out` half combined.

        Raises:
            InvalidRank, SelfSend, Closed, UnsupportedOp: at once. From `Work.wait`: SizeMismatch if the message does
            not fit `out`, CollectiveMismatch if the notes differ (in both cases the message is dropped and the
            connection stays usable), PeerFailed, Timeout.
        """

    @abstractmethod
    def irecv_any(self, sources: Mapping[int, int], tag: int | Tag = 0, *, note: str | None = "") -> Work[Received]:
        """Starts to receive a tensor from the first of `sources` that sends.

        Fair: where several have sent, the next source after the one that was served last is served first, so none
        keeps another waiting by sending much. Receives with one tag, from any rank and from one, get their messages in
        the order they were started.

        Args:
            sources: ranks other than this one that may send, each with the number that `Received.src` is to have.
            tag: what the message is for.
            note: as in `irecv`.

        Raises:
            InvalidRank, SelfSend, Closed: at once. From `Work.wait`: PeerFailed if a source died, in one receive for
            each death and context, so that it is told but does not end what the others have to say; a source that
            closed in good order is only missed when none is left. CollectiveMismatch, Timeout as in `irecv`.
        """

    @abstractmethod
    def cancel(self, work: Work[torch.Tensor] | Work[Received]) -> None:
        """Withdraws a receive that is still under way: its tensor will not be written any more."""

    @abstractmethod
    def start(self, function: Callable[[], T], description: str, lane: int = 0) -> Work[T]:
        """Runs `function` in a lane's thread, for a Work of its result. A lane runs in order; lanes overlap."""

    @abstractmethod
    def close(self, timeout: float | None = None) -> None:
        """Drains the sends, tells the peers and frees all resources. May be called twice."""

    @abstractmethod
    def abort(self, reason: str, origin: int | None = None) -> None:
        """Tells every peer that this rank gives up, then closes without waiting. Peers get PeerFailed with `reason`.

        Args:
            reason: what happened, in one line.
            origin: the rank that it began with; None: this one.
        """

    @abstractmethod
    def revoke(self, context: int, ranks: Iterable[int], failure: Failure) -> Failure:
        """Revokes a context: its pending and future collectives fail with `failure` on all `ranks`.

        Returns the first failure that this rank knows of for the context: `failure`, or an earlier one.

        A collective that fails on one rank leaves others waiting for this rank, not for the one that is gone. They
        raise the first cause instead of waiting for their timeout.
        """

    def executor(self, context: int, ranks: Sequence[int]) -> CollectiveExecutor | None:  # noqa: ARG002
        """Returns the executor of a group's collectives, if they need no messages. None if plans over messages do them.

        The answer is the same on every member.

        Args:
            context: number of the group, unique in the world.
            ranks: the members, this rank included.
        """
        return None

    def brings_memory(self, src: int, num_bytes: int) -> bool:  # noqa: ARG002
        """Whether a message of `num_bytes` from a rank is received without a copy, in the memory it was written to.

        It is then copied only if `out=` is given. Memory for what nobody takes is limited; beyond that it is copied.
        """
        return False

    def send_at_once(
        self,
        tensor: torch.Tensor,  # noqa: ARG002
        dst: int,  # noqa: ARG002
        tag: Tag,  # noqa: ARG002
        *,
        note: str = "",  # noqa: ARG002
    ) -> bool:
        """Fast path: sends a message if all of it can leave now. False, without effect, if `isend` has to do it.

        It makes no Work, because the send is done before anybody could wait for it. Arguments are not checked: they
        must be such as `isend` takes. Messages keep their order, whichever of the two sends them.
        """
        return False

    def recv_at_once(
        self,
        src: int,  # noqa: ARG002
        tag: Tag,  # noqa: ARG002
        *,
        out: torch.Tensor | None = None,  # noqa: ARG002
        note: str | None = "",  # noqa: ARG002
    ) -> Message | None:
        """Fast path: returns the next message of a rank if it comes before the caller would go to sleep, else None.

        None, without effect, if `irecv` has to do it: also where the message does not fit `out` or its note differs.
        Arguments are not checked: they must be such as `irecv` takes.
        """
        return None

    def keeps_messages(self, src: int) -> bool:  # noqa: ARG002
        """Whether the messages of a rank stay in memory until they are received, however late.

        A receive that is posted early gains nothing then.
        """
        return False

    def aside(self, context: int) -> StreamScope | None:  # noqa: ARG002
        """Returns the place of a group's asynchronous operation among the streams of a device; None: there are none."""
        return None

    def join(self, context: int, ranks: Sequence[int]) -> None:  # noqa: B027
        """Adds a group to the groups whose calls `close` compares; `ranks` are the backend's, this one included."""

    def keep_silent(self) -> None:  # noqa: B027
        """Switches off the comparison of calls in `close`: ranks may end with different numbers of calls."""

    def difference(self) -> CollectiveMismatch | None:
        """Returns, after `close`, the first difference to the calls of ranks that closed before.

        None if there is none, or if it cannot be known.
        """
        return None

    def ask(self, ranks: Iterable[int], question: Question, timeout: float) -> dict[int, Status]:  # noqa: ARG002
        """Asks other ranks for their status. Returns the answers that come within `timeout` seconds."""
        return {}

    def last_heard(self, rank: int) -> str:  # noqa: ARG002
        """Returns the note of the last collective message of a rank. Empty if there was none."""
        return ""

    def now(self) -> float:
        """Returns the time, in seconds, that timeouts of this backend run on."""
        return time.monotonic()

    def will_wait(self) -> AbstractContextManager[object]:
        """Returns a scope in which the caller waits for its own operations; the background thread stays asleep."""
        return nullcontext()

    def compute(self, step: object) -> AbstractContextManager[object]:  # noqa: ARG002
        """Says that this rank computes `step` inside. A simulated rank takes from that how long it lasts."""
        return nullcontext()

    def send(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, timeout: float | None = None) -> None:
        """Sends and waits until `tensor` may be changed again (not: until it was received)."""
        with self.will_wait():
            self.isend(tensor, dst, tag).wait(timeout)

    def recv(
        self, src: int, tag: int | Tag = 0, *, out: torch.Tensor | None = None, timeout: float | None = None
    ) -> torch.Tensor:
        """Receives and waits. After a Timeout the receive is withdrawn: `out` will not be written later."""
        with self.will_wait():
            work = self.irecv(src, tag, out=out)
            try:
                return work.wait(timeout)
            except Timeout:
                self.cancel(work)
                raise

    def barrier(self, timeout: float | None = None) -> None:
        """Waits until every rank has called it, in ceil(log2(world_size)) rounds of empty messages (dissemination)."""
        token = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._num_barriers += 1  # part of the tag: messages left by a barrier that timed out do not match the next one
        distance, step = 1, 0
        while distance < self.world_size:
            dst = (self.rank + distance) % self.world_size
            src = (self.rank - distance) % self.world_size
            tag = Tag(context=0, sequence=self._num_barriers, step=step)
            with self.will_wait():
                sent = self.isend(token, dst, tag)
                self.recv(src, tag, timeout=timeout)
                sent.wait(timeout)
            distance, step = distance * 2, step + 1

    def checked_send(self, tensor: torch.Tensor, dst: int, tag: int | Tag) -> Tag:
        """Checks the arguments of `isend`, for backends, and returns the tag.

        Raises:
            InvalidRank, SelfSend, UnsupportedOp, SizeMismatch: as `isend`.
        """
        self._check_peer(dst, "dst")
        check_tensor(tensor, self.message_devices, "send")
        return Tag.of(tag)

    def checked_receive(self, src: int, tag: int | Tag, out: torch.Tensor | None) -> Tag:
        """Checks the arguments of `irecv`, for backends, and returns the tag.

        Raises:
            InvalidRank, SelfSend, UnsupportedOp, SizeMismatch: as `irecv`.
        """
        self._check_peer(src, "src")
        if out is not None:
            check_tensor(out, self.message_devices, "recv(out=)")
        return Tag.of(tag)

    def checked_receive_any(self, sources: Iterable[int], tag: int | Tag) -> Tag:
        """Checks the arguments of `irecv_any`, for backends, and returns the tag.

        Raises:
            InvalidRank, SelfSend, SizeMismatch: as `irecv_any`.
        """
        for src in sources:
            self._check_peer(src, "sources")
        return Tag.of(tag)

    def _check_peer(self, peer: int, what: str) -> None:
        if not isinstance(peer, int) or not 0 <= peer < self.world_size:
            raise InvalidRank(peer, self.world_size, what)
        if peer == self.rank:
            raise SelfSend(self.rank)

    def close_reason(self) -> PeerFailed:
        """Makes the failure that peers see when this rank closes: closed in good order, or because of an error."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            reason = reason_of(error) if fails(error) else "it has closed its group"
        else:
            during = "" if error is None else f" while it handled {type(error).__name__}: {error}"
            reason = f"it has closed its group{during}"
        return PeerFailed(self.rank, f"{reason}, {self.flight_recorder.activity()}", has_closed=not fails(error))

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from that of the rank, and so has no part in its world."""
        return os.getpid() != self._process

    def closed_error(self) -> Closed:
        """Makes the error for a call after `close`, or in a forked child."""
        if self.is_inherited:
            return inherited_error(f"the {self.name} backend of rank {self.rank}", self._process)
        return Closed(f"the {self.name} backend of rank {self.rank} is closed: make a new one")

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or not fails(error):
            self.close()
        elif isinstance(error, PeerFailed):
            self.abort(error.reason, error.rank)
        else:
            self.abort(reason_of(error))
