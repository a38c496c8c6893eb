"""What ranks tell each other about their messages: records in a ring, parts of an arena."""

import ctypes
import struct
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon._native import NO_FD, OBSTACLE, Bell, Code, Inlet, Outlet, core, message
from echelon.backends.delivery import PIECE_BYTES
from echelon.backends.formats import message_layout
from echelon.backends.formats.arena import MAX_PART_BYTES, MIN_PART_BYTES, Arena
from echelon.backends.formats.wire import DTYPES
from echelon.backends.memory import dtype_of, type_of
from echelon.errors import ProtocolError

RING = 1024
HEADS = st.integers(1, 200).map(lambda length: bytes(number % 251 for number in range(length)))


class Ring:
    """Both ends of a ring, in memory of this process."""

    def __init__(self):
        self.memory = ctypes.create_string_buffer(RING)
        self.words = (ctypes.c_uint64 * 4)()
        records, taken, waiting, asleep = (ctypes.addressof(self.words) + 8 * number for number in range(4))
        self._bell = Bell(asleep=asleep, fd=NO_FD)
        ends = {
            "ring": ctypes.addressof(self.memory),
            "ring_bytes": RING,
            "records_word": records,
            "taken_word": taken,
            "bell": ctypes.addressof(self._bell),
        }
        self.outlet = Outlet(**ends, small_bytes=RING)
        self.inlet = Inlet(**ends, waiting_word=waiting, most_head_bytes=message_layout.MAX_HEAD_BYTES)

    def put(self, head, payload):
        values = ctypes.create_string_buffer(payload, max(1, len(payload)))
        at = ctypes.addressof(values)
        return core.put(ctypes.addressof(self.outlet), head, at, len(payload), 0, 0) == Code.DONE

    def find(self):
        return core.find(ctypes.addressof(self.inlet))

    def record(self):
        inlet = self.inlet
        return self.memory.raw[inlet.head : inlet.head + inlet.head_bytes], self.memory.raw[inlet.payload :]

    def release(self):
        core.release(ctypes.addressof(self.inlet))


@pytest.mark.skipif(bool(OBSTACLE), reason="records are the native library's")
@given(st.lists(st.one_of(st.tuples(HEADS, st.binary(max_size=200)), st.none())))
def test_records_come_out_as_they_were_put(steps):
    """A header with a payload is put, None takes a record."""
    ring, there = Ring(), deque()
    for step in steps:
        if step is None:
            assert ring.find() == (Code.DONE if there else Code.WAITING)
            if there:
                head, payload = there.popleft()
                assert ring.record()[0] == head
                assert ring.record()[1].startswith(payload)
                ring.release()
        elif ring.put(*step):
            there.append(step)
        else:
            assert ring.outlet.records - ring.words[1] > RING // 4, "there is room"
    assert ring.words[0] == ring.outlet.records <= ring.words[1] + RING


@pytest.mark.skipif(bool(OBSTACLE), reason="records are the native library's")
def test_every_size_fits_an_empty_ring_wherever_that_begins():
    for number in range(2 * RING // 64):
        ring = Ring()
        for _ in range(number):
            assert ring.put(b"x", b"")
            assert ring.find() == Code.DONE
            ring.release()
        assert ring.put(b"y" * (RING // 2 - 64), b"z" * 8)
        assert ring.find() == Code.DONE
        assert ring.record()[0] == b"y" * (RING // 2 - 64)


@pytest.mark.skipif(bool(OBSTACLE), reason="records are the native library's")
@pytest.mark.parametrize(
    ("size", "head_bytes", "available", "at"),
    [
        (0, 0, 128, 0),
        (0, 40, 128, 0),
        (100, 40, 128, 0),
        (192, 40, 128, 0),
        (128, 40, 128, RING - 64),
        (128, 120, 128, 0),
        (8192, 5000, 8192, 0),
        (128, 40, RING + 64, 0),
        (64, 1 << 31, 64, 0),
        ((1 << 32) - 64, 40, (1 << 32) - 64, 0),
        (128, 40, 1 << 63, 0),
        # No header: the end of the ring is skipped, which begins behind another record.
        (RING, 0, RING, 0),
        (128, 0, 192, RING - 192),
    ],
)
def test_what_cannot_be_a_record_is_refused(size, head_bytes, available, at):
    ring = Ring()
    ring.inlet.taken = at
    ring.words[0] = at + available
    ring.memory[at : at + 8] = struct.pack("<II", size, head_bytes)
    assert ring.find() == Code.DIFFERS
    head = b"x" * 40
    like = message(ctypes.addressof(ring.inlet), head, 4, type_of(torch.float32), (1,))
    out = torch.zeros(1)
    assert core.receive(like, out) == Code.NOT_SO
    assert not out.any()


@pytest.mark.skipif(bool(OBSTACLE), reason="records are the native library's")
@pytest.mark.parametrize(
    "other",
    [
        torch.ones(3),
        torch.ones(2, dtype=torch.int32),
        torch.ones(2, dtype=torch.float64),
        torch.ones(1, 2),
        torch.ones(2, 2)[:, 0],
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch._neg_view(torch.ones(2)),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        torch.ones(2).as_subclass(type("Strange", (torch.Tensor,), {})),
        [1.0, 1.0],
    ],
    ids=str,
)
def test_other_tensors_go_the_long_way(other):
    ring = Ring()
    outlet, inlet = (ctypes.addressof(end) for end in (ring.outlet, ring.inlet))
    send, receive = (message(end, b"head", 8, type_of(torch.float32), (2,)) for end in (outlet, inlet))
    assert core.send(send, other) == Code.NOT_SO
    assert ring.find() == Code.WAITING
    assert core.send(send, torch.nn.Parameter(torch.tensor([1.0, 2.0]))) == Code.DONE
    assert core.receive(receive, other) == Code.NOT_SO
    out = torch.zeros(2)
    assert core.receive(receive, out) == Code.DONE
    assert out.tolist() == [1.0, 2.0]
    assert core.receive(receive, out) == Code.WAITING


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.skipif(bool(OBSTACLE), reason="dtypes are compared by the native library")
def test_no_two_dtypes_are_the_same_to_the_library():
    codes = [type_of(dtype_of(code)) for code, (name, _) in enumerate(DTYPES) if hasattr(torch, name)]
    known = [code for code in codes if code]
    assert len(set(known)) == len(known) > 12


def test_pieces_go_where_others_were_drained_and_else_one_behind_the_other():
    slots = message_layout.Slots(3)
    assert [slots.next(drained) for drained in (-2, 0, 1, 1, 1, 2, 2, 4)] == [0, 1, 0, 2, None, 1, None, 0]


@given(st.integers(1, 5), st.lists(st.integers(0, 3), max_size=40))
def test_no_piece_is_written_over_one_that_is_not_drained(num_slots, drains):
    slots, there, drained = message_layout.Slots(num_slots), [], 0
    for count in drains:
        while (slot := slots.next(drained)) is not None:
            assert slot not in there[drained:]
            there.append(slot)
        assert len(there) - drained == num_slots
        drained = min(drained + count, len(there))


def test_more_pieces_drained_than_written_are_refused():
    slots = message_layout.Slots(3)
    slots.next(-1)
    with pytest.raises(ProtocolError, match="2 of 1 pieces drained"):
        slots.next(2)


def test_sizes_keep_pieces_whole():
    sizes = message_layout.SIZES
    assert PIECE_BYTES % sizes.piece_bytes == 0
    assert sizes.circle_bytes % sizes.piece_bytes == 0
    assert sizes.piece_bytes % 16 == 0
    assert sizes.whole_bytes <= MAX_PART_BYTES
    assert 4096 + sizes.inline_bytes <= sizes.ring_bytes // 2


@given(st.lists(st.one_of(st.integers(1, MAX_PART_BYTES), st.integers(-20, -1)), max_size=60))
def test_parts_never_overlap_and_all_come_back(steps):
    """A number above 0 takes so many bytes, one below gives a part back."""
    arena = Arena(4 * MAX_PART_BYTES)
    lent = []
    for step in steps:
        if step < 0:
            if lent:
                arena.give_back(*lent.pop(step % len(lent)))
            continue
        part = arena.take(step)
        if part is None:
            free = 4 * MAX_PART_BYTES - sum(size for _, size in lent)
            assert free < 4 * MAX_PART_BYTES
            continue
        start, size = part
        assert step <= size < 2 * max(step, MIN_PART_BYTES)
        assert start % size == 0
        assert 0 <= start <= 4 * MAX_PART_BYTES - size
        assert all(start >= other + length or start + size <= other for other, length in lent)
        lent.append(part)
    for part in lent:
        arena.give_back(*part)
    assert sorted(arena.take(MAX_PART_BYTES) for _ in range(4)) == [
        (number * MAX_PART_BYTES, MAX_PART_BYTES) for number in range(4)
    ]
    assert arena.take(1) is None


@pytest.mark.parametrize("num_bytes", [100_000, 2_000_000])
def test_what_was_given_back_is_given_out_first(num_bytes):
    arena = Arena(2 * MAX_PART_BYTES)
    first = arena.take(num_bytes)
    arena.take(num_bytes)
    assert arena.give_back(*first) is None
    assert arena.take(num_bytes) == first


def test_wholes_are_named():
    arena = Arena(2 * MAX_PART_BYTES)
    first, second = arena.take(2_000_000), arena.take(2_000_000)
    assert arena.give_back(*first) is None
    assert arena.give_back(*second) == 0
    assert arena.take(MAX_PART_BYTES) == (0, MAX_PART_BYTES)


def test_small_parts_are_kept_apart_until_there_is_no_other_room():
    arena = Arena(MAX_PART_BYTES)
    parts = [arena.take(100_000) for _ in range(8)]
    assert [arena.give_back(*part) for part in parts] == [None] * 8
    assert [arena.take(100_000) for _ in range(4)] == parts[3::-1]
    assert [arena.give_back(*part) for part in parts[:4]] == [None] * 4
    assert arena.take(MAX_PART_BYTES) == (0, MAX_PART_BYTES)
