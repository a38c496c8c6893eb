"""Frames as data: what crosses a connection between two ranks. No sockets and no tensors in here.

A frame is a fixed header, then the shape and the note, then the payload:

    0        1      2     3      4       6      8         16         24      28      32        40
    | kind u8 | dtype | ndim | zero | note u16 | zero | context u64 | sequence u64 | step u32 | zero | payload u64 |
    | shape: ndim x u64 | note: UTF-8 | payload bytes ...

All numbers are little-endian. Every length is checked against its limit, and the payload against shape and dtype,
before anything is allocated for it.
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from typing import NamedTuple

from echelon.errors import ProtocolError, SizeMismatch

# What a message is for: the group, the operation and the step that it belongs to.


class Tag(NamedTuple):
    """What a message is for. Two messages meet only if all three numbers are equal.

    context: the group, 0 for a backend used directly (64 bits). sequence: the operation within the group, 0 for point
    to point (64 bits). step: the user's tag; 0 in collectives (32 bits).
    """

    context: int = 0
    sequence: int = 0
    step: int = 0

    @classmethod
    def of(cls, tag: int | Tag) -> Tag:
        """Returns `tag` itself, or the point-to-point tag of that number.

        Raises:
            SizeMismatch: a number outside 0 to 2**32 - 1.
        """
        if isinstance(tag, Tag):
            return tag
        if not 0 <= tag <= MAX_STEP:
            raise SizeMismatch(f"a tag from 0 to {MAX_STEP}", tag, advice="choose another")
        return cls(step=tag)

    def is_collective_of(self, context: int) -> bool:
        """Says whether this is the tag of a collective, not of a message, in that group."""
        return self.context == context and self.sequence > 0

    def __str__(self) -> str:
        if self.context == 0 and self.sequence == 0:
            return f"tag {self.step}"
        return f"tag {self.step} of operation {self.sequence} in context {self.context:x}"


MAX_NOTE_BYTES = 1024
MAX_DIMS = 64
MAX_STEP = 2**32 - 1
"""The largest user's tag, or step of a collective."""
MAX_MESSAGE_BYTES = 1 << 36
"""The largest payload that is believed: 64 GiB, unless the backend is given a lower limit."""

_LAYOUT = "<BBBxHxxQQIxxxxQ"
_HEADER = struct.Struct(_LAYOUT)
HEADER_BYTES = _HEADER.size

DTYPES: tuple[tuple[str, int], ...] = (
    ("uint8", 1),
    ("int8", 1),
    ("int16", 2),
    ("int32", 4),
    ("int64", 8),
    ("float16", 2),
    ("bfloat16", 2),
    ("float32", 4),
    ("float64", 8),
    ("bool", 1),
    ("complex64", 8),
    ("complex128", 16),
    ("uint16", 2),
    ("uint32", 4),
    ("uint64", 8),
    ("complex32", 4),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
    ("float8_e4m3fnuz", 1),
    ("float8_e5m2fnuz", 1),
    ("float8_e8m0fnu", 1),
    ("float4_e2m1fn_x2", 1),
    ("bits8", 1),
    ("bits16", 2),
    ("bits1x8", 1),
    ("bits2x4", 1),
    ("bits4x2", 1),
)
"""Name and item size in bytes of every dtype, at the place that is its code on the wire. Only append."""


class FrameKind(IntEnum):
    """What a frame is."""

    DATA = 1
    """A tensor."""
    CLOSE = 2
    """The sender has closed; nothing follows."""
    FAILED = 3
    """Operations of `context` (0: all) cannot finish, because of rank `step`; the note says why."""
    MISMATCH = 4
    """Ranks have made different calls in `context`; the note says which. `step` - 1 has left instead, 0: none has."""
    QUESTION = 5
    """Where is the receiver, seen from operation `sequence` of `context` with signature `step`?"""
    ANSWER = 6
    """The standing of the sender, in `step`; context and sequence are the question's, the note says more."""
    TALLY = 7
    """Before a goodbye: the sender's last collective in `context` is number `sequence`, with signature `step`; the note
    says which. For context 0: it has received `sequence` messages of the receiver."""


class Frame(NamedTuple):
    """One frame without its payload. `step`, `sequence` and `context` are the tag of the message."""

    kind: FrameKind
    context: int = 0
    sequence: int = 0
    step: int = 0
    dtype: int = 0
    shape: tuple[int, ...] = ()
    note: str = ""
    payload_bytes: int = 0

    def encode(self) -> bytes:
        """Returns header, shape and note as bytes; the payload is to follow."""
        note = _encode_note(self.note)
        head = struct.pack(
            f"{_LAYOUT}{len(self.shape)}Q",
            self.kind,
            self.dtype,
            len(self.shape),
            len(note),
            self.context,
            self.sequence,
            self.step,
            self.payload_bytes,
            *self.shape,
        )
        return head + note


def as_sent(note: str) -> str:
    """Returns the note as the other end will read it: cut to the limit, lone surrogates spelled out."""
    if note.isascii() and len(note) <= MAX_NOTE_BYTES:
        return note
    return _encode_note(note).decode()


def signed(operation: str, sequence: int, signature: int) -> str:
    """Returns what two ranks compare: an operation, its number, and a signature of all that was called before."""
    return f"{operation}, #{sequence} ~{signature:08x}"


def is_signed(note: str) -> bool:
    """Says whether a note is that of a collective."""
    return " ~" in note


def readable(note: str) -> str:
    """Returns a note without its signature, if it has one."""
    head, mark, tail = note.partition(" ~")
    return head + tail[8:] if mark else note


def _encode_note(note: str) -> bytes:
    data = note.encode(errors="backslashreplace")
    if len(data) > MAX_NOTE_BYTES:
        data = data[:MAX_NOTE_BYTES].decode(errors="ignore").encode()
    return data


def extra_bytes(header: bytes | memoryview) -> int:
    """Returns how many bytes of shape and note follow a header of HEADER_BYTES bytes.

    Raises:
        ProtocolError: the header is not one of ours.
    """
    kind, _, num_dims, note_bytes, *_ = _HEADER.unpack(header)
    if kind not in _KINDS:
        raise ProtocolError(f"frame of unknown kind {kind}: the peer does not speak this protocol")
    if num_dims > MAX_DIMS or note_bytes > MAX_NOTE_BYTES:
        raise ProtocolError(
            f"frame with {num_dims} dimensions and a note of {note_bytes} bytes: "
            f"at most {MAX_DIMS} and {MAX_NOTE_BYTES} are allowed"
        )
    return int(num_dims * 8 + note_bytes)


def decode(header: bytes | memoryview, extra: bytes | memoryview, max_message_bytes: int = MAX_MESSAGE_BYTES) -> Frame:
    """Returns the frame that a header and the `extra_bytes(header)` bytes after it stand for.

    Raises:
        ProtocolError: a limit is passed, or payload, shape and dtype contradict each other.
    """
    kind, dtype, num_dims, _, context, sequence, step, payload_bytes = _HEADER.unpack(header)
    shape = struct.unpack_from(f"<{num_dims}Q", extra)
    if dtype >= len(DTYPES):
        raise ProtocolError(f"frame with unknown dtype code {dtype}: the peer is of another version")
    expected = math.prod(shape) * DTYPES[dtype][1] if kind == FrameKind.DATA else 0
    if math.prod([size or 1 for size in shape]) > _MAX_INT64:
        raise ProtocolError(f"frame with shape {_shortened(shape)}: the strides of such a tensor do not fit 64 bits")
    if payload_bytes != expected:
        raise ProtocolError(f"frame with a payload of {payload_bytes} bytes, but its shape needs {expected}")
    if payload_bytes > max_message_bytes:
        raise ProtocolError(
            f"message of {payload_bytes} bytes is over the limit of {max_message_bytes}: "
            "send it in parts, or raise max_message_bytes"
        )
    try:
        note = str(extra[num_dims * 8 :], "utf-8")
    except UnicodeDecodeError as error:
        raise ProtocolError("frame with a note that is not UTF-8") from error
    return Frame(_KINDS[kind], context, sequence, step, dtype, shape, note, payload_bytes)


def _shortened(shape: tuple[int, ...]) -> str:
    return str(list(shape)) if len(shape) <= 4 else f"{list(shape[:4])} and {len(shape) - 4} more"


_MAX_INT64 = 2**63 - 1
_KINDS = {int(kind): kind for kind in FrameKind}
