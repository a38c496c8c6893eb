"""Frames: what is encoded comes back, and bytes from a stranger are refused and never believed."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.backends.formats import wire
from echelon.backends.formats.wire import Frame, FrameKind
from echelon.errors import ProtocolError
from tests.helpers.worlds import header

U64 = st.integers(0, 2**64 - 1)


@st.composite
def frames(draw):
    kind = draw(st.sampled_from(FrameKind))
    dtype = draw(st.integers(0, len(wire.DTYPES) - 1))
    shape = tuple(draw(st.lists(st.integers(0, 100), max_size=4)))
    payload = 1
    for size in shape:
        payload *= size
    note = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
    return Frame(
        kind,
        draw(U64),
        draw(U64),
        draw(st.integers(0, 2**32 - 1)),
        dtype,
        shape,
        note,
        payload * wire.DTYPES[dtype][1] if kind == FrameKind.DATA else 0,
    )


def read(data, max_message_bytes=wire.MAX_MESSAGE_BYTES):
    """Reads a frame as a connection does."""
    head, rest = data[: wire.HEADER_BYTES], data[wire.HEADER_BYTES :]
    size = wire.extra_bytes(head)
    assert size <= wire.MAX_DIMS * 8 + wire.MAX_NOTE_BYTES
    return wire.decode(head, rest[:size].ljust(size, b"\0"), max_message_bytes)


@given(frames())
def test_a_frame_comes_back(frame):
    data = frame.encode()
    assert len(data) == wire.HEADER_BYTES + wire.extra_bytes(data[: wire.HEADER_BYTES])
    assert read(data) == frame


@given(st.binary(min_size=wire.HEADER_BYTES, max_size=2000))
def test_arbitrary_bytes_are_a_frame_or_a_protocol_error(data):
    try:
        frame = read(data, max_message_bytes=1 << 20)
    except ProtocolError:
        return
    assert frame.payload_bytes <= 1 << 20


@given(
    st.sampled_from(FrameKind),
    st.integers(0, 255),
    st.lists(st.one_of(st.integers(0, 5), U64), max_size=64),
    U64,
    st.binary(max_size=40),
)
def test_bytes_that_look_like_a_frame_are_one_or_a_protocol_error(kind, dtype, shape, payload, note):
    data = header(kind=kind, dtype=dtype, dims=len(shape), note=len(note), payload=payload)
    try:
        frame = read(data + struct.pack(f"<{len(shape)}Q", *shape) + note, max_message_bytes=1 << 20)
    except ProtocolError:
        return
    assert frame.payload_bytes <= 1 << 20
    assert all(size < 1 << 63 for size in frame.shape)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (header(kind=0), "unknown kind 0"),
        (header(kind=8), "unknown kind 8"),
        (header(dims=65), "65 dimensions"),
        (header(note=1025), "note of 1025 bytes"),
        (header(dtype=len(wire.DTYPES)) + struct.pack("<Q", 1), "unknown dtype code"),
        (header(payload=3) + struct.pack("<Q", 1), "payload of 3 bytes, but its shape needs 4"),
        (header(payload=5) + struct.pack("<Q", 1), "payload of 5 bytes, but its shape needs 4"),
        (header(kind=2, dims=0, payload=1), "payload of 1 bytes, but its shape needs 0"),
        (header(payload=1 << 40) + struct.pack("<Q", 1 << 38), "over the limit of 68719476736: send it in parts"),
        (header(payload=0, dims=2) + struct.pack("<2Q", 0, 1 << 63), "do not fit 64 bits"),
        (header(payload=0, dims=3) + struct.pack("<3Q", 1 << 40, 0, 1 << 40), "do not fit 64 bits"),
        (header(dims=0, note=2) + b"\xc3\x28", "not UTF-8"),
    ],
)
def test_each_limit(data, reason):
    with pytest.raises(ProtocolError, match=reason):
        read(data)


def test_the_largest_that_is_allowed():
    shape = (1,) * wire.MAX_DIMS
    note = "x" * wire.MAX_NOTE_BYTES
    frame = Frame(FrameKind.DATA, 2**64 - 1, 2**64 - 1, wire.MAX_STEP, 0, shape, note, 1)
    assert read(frame.encode()) == frame
    limit = Frame(FrameKind.DATA, dtype=0, shape=(1 << 20,), payload_bytes=1 << 20)
    assert read(limit.encode(), 1 << 20) == limit
    with pytest.raises(ProtocolError):
        read(limit.encode(), (1 << 20) - 1)


@given(st.text(max_size=1500))
def test_a_note_is_cut_as_the_receiver_expects(note):
    """Lone surrogates, as file names have them, and notes over the limit included."""
    sent = wire.as_sent(note)
    assert read(Frame(FrameKind.FAILED, note=note).encode()).note == sent
    assert len(sent.encode()) <= wire.MAX_NOTE_BYTES
    assert wire.as_sent(sent) == sent


def test_a_short_note_is_sent_whole():
    assert wire.as_sent("é" * 512) == "é" * 512
    assert wire.as_sent("é" * 513) == "é" * 512
    assert wire.as_sent("x" + "é" * 512) == "x" + "é" * 511
