"""Posted receives, and incoming messages on their way to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from echelon.backends.formats.wire import Tag, as_sent, readable
from echelon.backends.memory import bytes_of, describe, new_tensor
from echelon.backends.modes import normal_mode, overwrite
from echelon.backends.operators import Combine
from echelon.backends.work import Message, Received, Work
from echelon.errors import CollectiveMismatch, EchelonError, SizeMismatch, UnsupportedOp
from echelon.purposes import SAME_ARGUMENTS

PIECE_BYTES = 1 << 18
"""Small enough for the cache of one core, large enough for a call of torch not to count. A multiple of every dtype."""


class ReduceOnArrival:
    """Reduction of a message into a tensor while it arrives, a piece at a time.

    A piece is combined while it is still in the processor's cache, and the message needs no memory of its own. Between
    two ranks that took a third off an all-reduce of 64 MiB."""

    def __init__(self, out: torch.Tensor, combine: Combine) -> None:
        """Makes room for a piece.

        Args:
            out: what the message is combined into.
            combine: how.

        Raises:
            UnsupportedOp: there is no memory.
        """
        self._out = out.detach().view(-1)
        self._combine = combine
        self._item_bytes = out.dtype.itemsize
        self._num_bytes = out.nbytes
        self._scratch = new_tensor((min(PIECE_BYTES // self._item_bytes, out.numel()),), out.dtype)
        self._memory = bytes_of(self._scratch)

    def room(self, done: int) -> memoryview:
        """Returns where the bytes after the first `done` are to be written."""
        begin = done % PIECE_BYTES
        return self._memory[begin : min(PIECE_BYTES, self._num_bytes - done + begin)]

    def wrote(self, done: int) -> None:
        """Counts the first `done` bytes as arrived, and combines a full piece. To be called for every full piece."""
        if done % PIECE_BYTES and done < self._num_bytes:
            return
        first = (done - 1) // PIECE_BYTES * PIECE_BYTES // self._item_bytes
        own = self._out[first : done // self._item_bytes]
        self._combine(own, self._scratch[: len(own)])


ANY = -1
"""The source of a receive that takes a message from whoever sends first."""
_OVERHEAD_BYTES = 2560
"""Memory counted for a message beside payload, shape and note. Measured for the objects of a one-byte message: 2.6 KiB
with a tag of its own, 1.6 KiB with the tag of others."""
_DIM_BYTES = 48
"""Memory counted for each dimension: a Python number, and size and stride in torch."""


def disagreement(peer: int, theirs: str, own: str) -> CollectiveMismatch:
    """Returns the error of a rank in one operation for a peer in another."""
    return CollectiveMismatch(
        f"rank {peer} is in {theirs}, this rank in {own}: {SAME_ARGUMENTS}",
        peer,
        theirs,
    )


class Receive:
    """A receive that was posted, or is to be posted in a `Mailbox`."""

    __slots__ = ("combine", "must_fit", "note", "number", "out", "sources", "src", "tag", "work")

    def __init__(
        self,
        work: Work[Any],
        src: int,
        tag: Tag,
        out: torch.Tensor | None,
        note: str | None,
        sources: Mapping[int, int] | None = None,
        must_fit: bool = True,
        combine: Combine | None = None,
    ) -> None:
        """Describes a receive.

        Args:
            work: the Work that ends with the message.
            src: rank of the sender, or ANY.
            tag: address of the message.
            out, note, must_fit, combine: as of `Messages.irecv`.
            sources: for ANY: the ranks that may send, each with its number in the result.
        """
        self.work = work
        self.src = src
        self.tag = tag
        self.out = out
        self.note = None if note is None else as_sent(note)
        self.must_fit = must_fit
        self.combine = combine
        self.sources = sources or {}
        self.number = 0
        """Which of all receives it was."""

    def complete(self, tensor: torch.Tensor, src: int, note: str) -> None:
        """Ends the receive with the message.

        Args:
            tensor: the message.
            src: rank of the sender.
            note: the sender's operation.
        """
        self.work.note = note
        self.work.complete(tensor if self.src != ANY else Received(tensor, self.sources[src], self.tag.step))

    def refusal(self, src: int, shape: tuple[int, ...], dtype: torch.dtype, note: str) -> EchelonError | None:
        """Returns why a message with this head cannot be the one waited for; None if it can.

        A place that it does not fit is given up, unless it must.
        """
        if self.note is not None and note != self.note:
            return disagreement(src, readable(note) or "send", readable(self.note) or "recv")
        if self.out is not None and (self.out.shape != shape or self.out.dtype != dtype):
            if not self.must_fit:
                self.out = None
                return None
            return SizeMismatch(
                describe(self.out.shape, self.out.dtype),
                describe(shape, dtype),
                f"receive from rank {src}, {self.tag}",
            )
        return None


class IncomingMessage:
    """Message that is arriving: its header, its buffer, and its receive once there is one.

    It has no buffer until a receive claims it or `place` is called; until then its bytes are left unread.
    """

    __slots__ = (
        "_arrived",
        "_error",
        "_head",
        "_receive",
        "comes_whole",
        "is_dropped",
        "is_placed",
        "memory",
        "on_place",
        "pieces",
        "src",
        "tag",
        "tensor",
    )

    def __init__(
        self,
        src: int,
        tag: Tag,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        note: str,
        receive: Receive | None,
        whole: torch.Tensor | None = None,
        comes_whole: bool = False,
    ) -> None:
        """Finds a place for the bytes if `receive` asks for them, or takes the tensor that is there already.

        Args:
            src, tag, shape, dtype, note: of the message.
            receive: what asks for it; None: nobody yet.
            whole: the message, if it is there.
            comes_whole: it will be given to `finish`, so it needs a place only if `receive` has one for it.
        """
        self.src = src
        """The rank that sent it."""
        self._head = (src, shape, dtype, note)
        self._arrived = False
        self._error: Exception | None = None
        self._receive: Receive | None = None
        self.comes_whole = comes_whole
        """Whether it will be there as one tensor, and needs no place."""
        self.is_dropped = False
        """Whether nobody will get it."""
        self.tag = tag
        self.is_placed = receive is not None or whole is not None
        """Whether it is known what becomes of the bytes."""
        self.on_place: Callable[[], None] | None = None
        """Called when that has become known later."""
        self.tensor = whole
        self.memory: memoryview | None = None
        """Where the bytes are to be written as a whole."""
        self.pieces: ReduceOnArrival | None = None
        """Where they are to be written in pieces."""
        if receive is None:
            return
        if error := receive.refusal(*self._head):
            receive.work.complete(error=error)
            return
        self._receive = receive
        if whole is None:
            self._find_place()

    @property
    def memory_bytes(self) -> int:
        """How much memory the message is taken to need while nobody asks for it."""
        _, shape, dtype, note = self._head
        note_bytes = len(note) if note.isascii() else 4 * len(note)  # one emoji makes all characters as wide
        return math.prod(shape) * dtype.itemsize + len(shape) * _DIM_BYTES + note_bytes + _OVERHEAD_BYTES

    @property
    def needs_buffer(self) -> bool:
        """Whether its bytes cannot be read before it has a buffer."""
        return not (self.is_placed or self.comes_whole)

    def place(self) -> None:
        """Finds a place for the bytes of a message that nobody has asked for yet."""
        if not self.is_placed:
            self._find_place()
            self._tell()

    def _find_place(self) -> None:
        self.is_placed = True
        _, shape, dtype, _ = self._head
        out = self._receive.out if self._receive is not None else None
        combine = self._receive.combine if self._receive is not None else None
        if out is None and self.comes_whole:
            return
        try:
            self.tensor = new_tensor(shape, dtype) if out is None else out
            if out is not None and combine is not None:
                self.pieces = ReduceOnArrival(out, combine)
            else:
                self.memory = bytes_of(self.tensor)
        except UnsupportedOp as error:
            self.fail(error)

    def _tell(self) -> None:
        call, self.on_place = self.on_place, None
        if call is not None:
            call()

    def room(self, done: int) -> memoryview | None:
        """Returns where the bytes after the first `done` are to be written; None: drop them."""
        if self.pieces is not None:
            return self.pieces.room(done)
        return None if self.memory is None else self.memory[done:]

    def wrote(self, done: int) -> None:
        """Says that the first `done` bytes are where they were to be written."""
        if self.pieces is not None:
            try:
                self.pieces.wrote(done)
            except Exception as error:  # whatever combining raises is the receive's, not of who reads the connection
                self.fail(error)

    def finish(self, whole: torch.Tensor | None = None) -> None:
        """Says that every byte has arrived; `whole` is the message, unless its bytes were written to their place."""
        if whole is not None:
            self.tensor = whole
            self.pieces = None
        self._arrived = True
        if self._receive is not None:
            self._hand_over(self._receive)

    def take(self, out: torch.Tensor | None, note: str | None) -> Message | None:
        """Fast path: returns a message that has arrived whole, in `out` if that is given. None if it does not fit."""
        _, shape, dtype, own_note = self._head
        tensor = self.tensor
        if not self._arrived or tensor is None or not (note is None or note == own_note):
            return None
        if out is None:
            return Message(tensor, own_note)
        if out.shape != shape or out.dtype != dtype:
            return None
        overwrite(out, tensor)
        return Message(out, own_note)

    def attach(self, receive: Receive) -> None:
        """Gives a message that came unasked to the receive that now asks for it."""
        if error := receive.refusal(*self._head) or self._error:
            receive.work.complete(error=error)
            self._drop()
            return
        self._receive = receive
        if self._arrived:
            self._hand_over(receive)
        else:
            self.place()

    def detach(self, work: Work[Any]) -> bool:
        """Takes the message away from the receive of `work`, which is cancelled; returns False if it is not its own.

        The message is kept in memory of its own, so nothing is written to the receive's tensor later. A message that is
        combined as it arrives is lost.
        """
        if self._receive is None or self._receive.work is not work:
            return False
        if self.pieces is not None:  # what was combined cannot be taken back
            self._receive = None
            self._drop()
            return False
        if self._receive.out is not None and self.tensor is not None:
            with normal_mode():
                self.tensor = self.tensor.detach().clone()
            self.memory = bytes_of(self.tensor)
        self._receive = None
        return True

    def fail(self, error: Exception) -> None:
        """Ends a delivery for the receive that it has or will get; bytes that still come are dropped."""
        self._error = error
        if self._receive is not None:
            self._receive.work.complete(error=error)
            self._receive = None
        self._drop()

    def _drop(self) -> None:
        self.tensor = self.memory = self.pieces = None
        self.is_placed = self.is_dropped = True
        self._tell()

    def _hand_over(self, receive: Receive) -> None:
        assert self.tensor is not None
        if receive.out is not None and receive.out is not self.tensor:
            try:
                if receive.combine is not None:
                    receive.combine(receive.out.detach(), self.tensor)
                else:
                    overwrite(receive.out, self.tensor)
            except Exception as error:
                self.fail(error)
                return
            self.tensor = receive.out
        src, _, _, note = self._head
        receive.complete(self.tensor, src, note)
