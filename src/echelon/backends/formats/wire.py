"""Frames between two ranks as data: encoding, decoding, limits. No sockets and no tensors in here.

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


class Tag(NamedTuple):
    """Address of a message within a pair of ranks. A message matches a receive only if all three numbers are equal.

    context: the group, 0 for a backend used directly (64 bits). sequence: the operation within the group, 0 for point
    to point (64 bits). step: the user's tag; 0 in collectives (32 bits).
    """

    context: int = 0
    sequence: int = 0
    step: int = 0

    @classmethod
    def of(cls, tag: int | Tag) -> Tag:
        """Returns `tag` itself if it is a Tag, else the point-to-point tag of that number.

        Raises:
            SizeMismatch: the number is outside 0 to 2**32 - 1.
        """
        if isinstance(tag, Tag):
            return tag
        if not 0 <= tag <= MAX_STEP:
            raise SizeMismatch(f"a tag from 0 to {MAX_STEP}", tag, advice="choose another")
        return cls(step=tag)

    def is_collective_of(self, context: int) -> bool:
        """Whether this is the tag of a collective of the group `context`, not of a point-to-point message."""
        return self.context == context and self.sequence > 0

    def __str__(self) -> str:
        if self.sequence == 0:
            return f"tag {self.step}"
        if self.sequence >= TRANSFERS:
            value = "gradient" if self.sequence & 1 else "input"
            return f"the {value} of microbatch {self.step // TRANSFER_PARTS} for stage {self.sequence >> 1 & _STAGES}"
        return f"tag {self.step} of operation {self.sequence} in context {self.context:x}"


# The sequence number of a transfer holds TRANSFERS, the stage and the direction. Its step holds the microbatch and the
# number of the tensor.
TRANSFERS = 1 << 63
"""First sequence number of transfers between stages. The collectives of the same group have smaller ones."""
TRANSFER_PARTS = 1 << 10
"""Number of messages that a transfer may have."""
_STAGES = (1 << 19) - 1


def transfer_tag(context: int, stage: int, microbatch: int, *, is_gradient: bool) -> Tag:
    """Returns the tag of the first message of a transfer to a stage. Each message after it has the next step."""
    return Tag(context, TRANSFERS | stage << 1 | is_gradient, microbatch * TRANSFER_PARTS)


MAX_NOTE_BYTES = 1024
MAX_DIMS = 64
MAX_STEP = 2**32 - 1
"""Largest user's tag, and largest step of a collective."""
MAX_MESSAGE_BYTES = 1 << 36
"""Largest payload that is accepted: 64 GiB, unless the backend is given a lower limit."""

_LAYOUT = "<BBBxHxxQQIxxxxQ"
_HEADER = struct.Struct(_LAYOUT)
HEADER_BYTES = _HEADER.size

# Names, not objects of torch: some versions of torch lack some of the dtypes, and all must agree on the codes.
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
"""Name and item size in bytes of every dtype. The index is its code on the wire, so only append."""


class FrameKind(IntEnum):
    """Kind of a frame."""

    DATA = 1
    """Message with a tensor."""
    CLOSE = 2
    """The sender has closed; nothing follows."""
    FAILED = 3
    """Revocation: operations of `context` (0: all) cannot finish, because of rank `step`. The note says why."""
    MISMATCH = 4
    """Ranks have made different calls in `context`; the note says which. `step` - 1 is the rank that has left. 0: none
    has."""
    QUESTION = 5
    """Asks for the receiver's progress, seen from operation `sequence` of `context` with signature `step`."""
    ANSWER = 6
    """Progress of the sender, in `step`. Context and sequence are the question's; the note has details."""
    TALLY = 7
    """Sent before CLOSE. The sender's last collective in `context` is number `sequence`, with signature `step`; the
    note names it, and has the lines of the calls before it. For context 0: the sender has received `sequence` messages
    from the receiver."""


class Frame(NamedTuple):
    """Frame without its payload. `context`, `sequence` and `step` are the message's tag."""

    kind: FrameKind
    context: int = 0
    sequence: int = 0
    step: int = 0
    dtype: int = 0
    shape: tuple[int, ...] = ()
    note: str = ""
    payload_bytes: int = 0

    def encode(self) -> bytes:
        """Returns header, shape and note as bytes. The payload has to follow."""
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
    """Returns the note as the peer will read it: cut to the limit, lone surrogates escaped."""
    # Fast path: nearly all notes are short ASCII.
    if note.isascii() and len(note) <= MAX_NOTE_BYTES:
        return note
    return _encode_note(note).decode()


def signed(operation: str, sequence: int, signature: int) -> str:
    """Returns the note that two ranks compare: an operation, its number, and a signature of all calls up to it."""
    return f"{operation}, #{sequence} ~{signature:08x}"


def is_signed(note: str) -> bool:
    """Whether a note is that of a collective."""
    return " ~" in note


def readable(note: str) -> str:
    """Returns a note without its signature, if it has one."""
    head, mark, tail = note.partition(" ~")
    # The signature has 8 hexadecimal digits. Text may follow it.
    return head + tail[8:] if mark else note


def _encode_note(note: str) -> bytes:
    data = note.encode(errors="backslashreplace")
    if len(data) > MAX_NOTE_BYTES:
        # The cut may fall inside a character, whose first bytes are dropped.
        data = data[:MAX_NOTE_BYTES].decode(errors="ignore").encode()
    return data


def extra_bytes(header: bytes | memoryview) -> int:
    """Returns the number of bytes of shape and note after a header of HEADER_BYTES bytes.

    Raises:
        ProtocolError: the kind is unknown, or a length is over its limit.
    """
    # Needs the fixed header alone, so a stranger's bytes are refused before a length of theirs is believed.
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
    """Decodes a header and the `extra_bytes(header)` bytes after it.

    Raises:
        ProtocolError: a limit is exceeded, or payload, shape and dtype contradict each other.
    """
    kind, dtype, num_dims, _, context, sequence, step, payload_bytes = _HEADER.unpack(header)
    shape = struct.unpack_from(f"<{num_dims}Q", extra)
    if dtype >= len(DTYPES):
        raise ProtocolError(f"frame with unknown dtype code {dtype}: the peer is of another version")
    expected = math.prod(shape) * DTYPES[dtype][1] if kind == FrameKind.DATA else 0
    # Zero sizes count as 1, as in torch's strides: a shape with a zero and an impossible size made torch raise.
    if math.prod([size or 1 for size in shape]) > _MAX_INT64:
        raise ProtocolError(f"frame with shape {_shortened(shape)}: the strides of such a tensor do not fit 64 bits")
    # Only DATA may have a payload, so other kinds cannot make the receiver allocate.
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
