"""Messages of one rank: contiguous tensors that go to one other rank, tagged and asynchronously.

Strategy. `isend` and `irecv` return a `Work` without blocking. A thread that waits on a Work makes progress for all
operations until that Work is done; only when no thread waits does a background thread of the backend do so. A wait ends
in one of four ways: the result, the error of the operation, `PeerFailed` as soon as the peer is known to be gone, or
`Timeout`.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from echelon.backends.formats.wire import Tag
from echelon.backends.memory import check_tensor, is_ordinary
from echelon.backends.operators import Combine
from echelon.backends.work import Message, Received, Work
from echelon.errors import EchelonError, InvalidRank, SelfSend, Timeout


@dataclass(frozen=True, eq=False, slots=True)
class NativeMessage:
    """Messages with one header between two ranks that share memory, as the native library moves them by itself."""

    message: bytes
    """`struct message` of the library."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_send: bool
    spin: int
    """Nanoseconds in which a receive looks for a message before it takes the way of Python."""
    count: ctypes.c_uint64
    """Counter of the messages with the peer."""
    lock: threading.Lock
    """Guards this rank's ends of its links."""
    progress: object
    """Its `is_closed` says whether the rank has closed its messages."""
    receiver: object | None
    """Its `delivery` is the message that is arriving. None for a send."""
    queues: tuple[object, ...]
    """Containers, up to 4. While one of them holds anything, the message takes the way of Python."""


class PreparedSend:
    """Sends of tensors of one shape and dtype to one rank under one tag. Prepared once."""

    __slots__ = ("_messages", "_note", "dst", "tag")

    def __init__(self, messages: Messages, dst: int, tag: Tag, note: str) -> None:
        self._messages = messages
        self._note = note
        self.dst = dst
        self.tag = tag

    def at_once(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        """Fast path: sends a tensor if all of it can leave now. False, without effect, if `start` has to do it.

        It makes no Work, because the send is done before anybody could wait for it. It leaves tensors of another shape
        or dtype to `start`, and all that have no values in memory of their own. It does not ask for modes of torch.
        Messages keep their order, whichever way they go.
        """
        return False

    def native(self) -> NativeMessage | None:
        """Returns how the native library sends such messages by itself. None if it does not."""
        return None

    def start(self, tensor: torch.Tensor) -> Work[None]:
        """Starts to send a tensor, as `isend`."""
        return self._messages.isend(tensor, self.dst, self.tag, note=self._note)


class PreparedReceive:
    """Receives of the messages of one rank under one tag. Prepared once."""

    __slots__ = ("_messages", "_must_fit", "_note", "src", "tag")

    def __init__(self, messages: Messages, src: int, tag: Tag, note: str | None, must_fit: bool) -> None:
        self._messages = messages
        self._note = note
        self._must_fit = must_fit
        self.src = src
        self.tag = tag

    def at_once(self, out: torch.Tensor | None = None) -> Message | None:  # noqa: ARG002
        """Fast path: returns the next message if it comes before the caller would go to sleep, else None.

        None, without effect, if `start` has to do it: also where the message does not fit `out` or its note differs, or
        `out` is not such as `irecv` takes.
        """
        return None

    def native(self) -> NativeMessage | None:
        """Returns how the native library receives a message like the last one by itself. None if it does not."""
        return None

    def start(self, out: torch.Tensor | None = None) -> Work[torch.Tensor]:
        """Starts to receive a message, as `irecv`."""
        return self._messages.irecv(self.src, self.tag, out=out, note=self._note, must_fit=self._must_fit)


class Messages(ABC):
    """Sends and receives of one rank.

    Messages of one sender with one tag arrive in the order they were sent; messages with different tags never mix. A
    send to a rank that is not receiving yet completes or stays in flight, but never keeps this rank from doing
    something else.
    """

    def __init__(
        self, rank: int, world_size: int, timeout: float, devices: frozenset[str] = frozenset({"cpu"})
    ) -> None:
        """Describes the sender.

        Args:
            rank: this rank.
            world_size: number of ranks.
            timeout: default timeout of a Work, in seconds.
            devices: device types of the tensors that can be sent.
        """
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.devices = devices
        self._num_barriers = 0

    @abstractmethod
    def isend(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:
        """Starts to send `tensor` to rank `dst`. Returns its Work. The tensor must not change until the Work is done.

        Args:
            tensor: contiguous, on one of `devices`; its shape and dtype travel along.
            dst: a rank other than this one.
            tag: address of the message.
            note: this rank's operation, at most 1024 bytes of UTF-8; compared with the receiver's.

        Raises:
            InvalidRank, SelfSend, Closed, UnsupportedOp: at once.
            SizeMismatch: the tag is outside its range; at once.
            PeerFailed, Timeout: from `Work.wait`.
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
        """Starts to receive a tensor from rank `src`. Returns a Work whose result is the tensor.

        Args:
            src: a rank other than this one.
            tag: address of the message.
            out: contiguous tensor that is written and returned, one of inference mode too, in any thread; None: a new
                tensor of the shape and dtype that were sent, an ordinary one whatever the caller's mode.
            note: this rank's operation; None: accept any note, and keep it in `Work.note`.
            must_fit: a message that does not fit `out` is an error; False: it comes as a new tensor, and `out` stays
                as it is.
            combine: combines the message into `out`, by `combine(part of out, same part of the message)`, instead of
                overwriting it. It is called in any thread, part by part as the message arrives. A receive that is
                withdrawn or fails in the middle leaves `out` half combined.

        Raises:
            InvalidRank, SelfSend, Closed, UnsupportedOp: at once.
            SizeMismatch: the tag is outside its range, at once; or from `Work.wait`: the message does not fit `out`.
                It is dropped, and the connection stays usable.
            CollectiveMismatch: from `Work.wait`: the notes differ. The message is dropped, as above.
            PeerFailed, Timeout: from `Work.wait`.
        """

    @abstractmethod
    def irecv_any(self, sources: Mapping[int, int], tag: int | Tag = 0, *, note: str | None = "") -> Work[Received]:
        """Starts to receive a tensor from the first of `sources` that sends. Returns the Work.

        Fair: where several have sent, the next source after the last one served is served first, so none keeps another
        waiting by sending much. Receives with one tag, from any rank and from one, get their messages in the order they
        were started.

        Args:
            sources: ranks other than this one that may send, each with the number that `Received.src` is to have.
            tag: address of the message.
            note: as in `irecv`.

        Raises:
            InvalidRank, SelfSend, Closed: at once.
            PeerFailed: from `Work.wait`: a source died. One receive for each death and context raises it, so that the
                messages of the others can still be received. A source that closed in good order is only missed when
                none is left.
            CollectiveMismatch, Timeout: as in `irecv`.
        """

    @abstractmethod
    def cancel(self, work: Work[Any]) -> None:
        """Withdraws a receive that is still in flight: its tensor will not be written any more.

        Args:
            work: the Work of the receive.
        """

    # Optional: faster ways

    def prepare_send(
        self,
        dst: int,
        tag: Tag,
        shape: torch.Size,  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
        *,
        note: str = "",
    ) -> PreparedSend:
        """Returns a handle that sends tensors of one shape and dtype again and again.

        Args:
            dst: a rank other than this one.
            tag: address of the messages.
            shape: of every tensor.
            dtype: of every tensor.
            note: as in `isend`.
        """
        return PreparedSend(self, dst, tag, note)

    def prepare_receive(self, src: int, tag: Tag, *, note: str | None = "", must_fit: bool = True) -> PreparedReceive:
        """Returns a handle that receives the messages of one rank under one tag.

        Args:
            src, tag, note, must_fit: as in `irecv`.
        """
        return PreparedReceive(self, src, tag, note, must_fit)

    def will_wait(self) -> AbstractContextManager[object]:
        """Returns a scope in which the caller waits for its own operations; the background thread stays asleep."""
        return nullcontext()

    def brings_memory(self, src: int, num_bytes: int) -> bool:  # noqa: ARG002
        """Whether a message of `num_bytes` from a rank is received without a copy, in the memory it was written to.

        It is then copied only if `out=` is given. Memory for unclaimed messages is limited; beyond that it is copied.

        Args:
            src: rank of the sender.
            num_bytes: size of the message.
        """
        return False

    def keeps_messages(self, src: int) -> bool:  # noqa: ARG002
        """Whether the messages from the rank `src` stay in memory until they are received, however late.

        A receive that is posted early gains nothing then.
        """
        return False

    def unreceived(self) -> list[tuple[int, Tag]]:
        """Returns source and tag of the messages that have come and that no receive takes, as far as it is known."""
        return []

    # Blocking calls

    def send(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, timeout: float | None = None) -> None:
        """Sends and waits until `tensor` may be changed again (not: until it was received).

        Args:
            tensor, dst, tag: as in `isend`.
            timeout: seconds; None: the backend's.

        Raises:
            InvalidRank, SelfSend, Closed, UnsupportedOp, SizeMismatch: as in `isend`.
            PeerFailed: the receiver is gone.
            Timeout: the message has not left in time.
        """
        with self.will_wait():
            self.isend(tensor, dst, tag).wait(timeout)

    def recv(
        self, src: int, tag: int | Tag = 0, *, out: torch.Tensor | None = None, timeout: float | None = None
    ) -> torch.Tensor:
        """Receives a tensor, waits for it and returns it.

        Args:
            src, tag, out: as in `irecv`.
            timeout: seconds; None: the backend's.

        Raises:
            InvalidRank, SelfSend, Closed, UnsupportedOp, SizeMismatch, CollectiveMismatch, PeerFailed: as in `irecv`.
            Timeout: no message came in time. The receive is withdrawn: `out` will not be written later.
        """
        with self.will_wait():
            work = self.irecv(src, tag, out=out)
            try:
                return work.wait(timeout)
            except Timeout:
                self.cancel(work)
                raise

    def barrier(self, timeout: float | None = None) -> None:
        """Waits until every rank has called it, in ceil(log2(world_size)) rounds of empty messages (dissemination).

        Args:
            timeout: seconds for each message; None: the backend's.

        Raises:
            Closed, PeerFailed, Timeout: as of `send` and `recv`.
        """
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

    # Checks of arguments, for implementations

    def check_send(self, tensor: torch.Tensor, dst: int) -> None:
        """Checks arguments of `isend`.

        Args:
            tensor, dst: as in `isend`.

        Raises:
            InvalidRank, SelfSend, UnsupportedOp: `isend` does not take them.
        """
        if not isinstance(dst, int) or not 0 <= dst < self.world_size or dst == self.rank:
            raise _refused(dst, self.rank, self.world_size, "dst")
        # Fast path: collectives send ordinary tensors.
        if not ("cpu" in self.devices and is_ordinary(tensor)):
            check_tensor(tensor, self.devices, "send")

    def check_receive(self, sources: Iterable[int], out: torch.Tensor | None = None) -> None:
        """Checks arguments of `irecv` and `irecv_any`.

        Args:
            sources: ranks of the senders.
            out: as in `irecv`.

        Raises:
            InvalidRank, SelfSend, UnsupportedOp: `irecv` and `irecv_any` do not take them.
        """
        for src in sources:
            if not isinstance(src, int) or not 0 <= src < self.world_size or src == self.rank:
                raise _refused(src, self.rank, self.world_size, "src")
        if out is not None:
            check_tensor(out, self.devices, "recv(out=)")


def _refused(peer: int, rank: int, world_size: int, argument: str) -> EchelonError:
    if isinstance(peer, int) and peer == rank:
        return SelfSend(rank)
    return InvalidRank(peer, world_size, argument)
