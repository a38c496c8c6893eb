"""What ranks tell each other about their messages: records in a ring, parts of an arena."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.backends.delivery import PIECE_BYTES
from echelon.backends.formats import message_layout
from echelon.backends.formats.arena import MAX_PART_BYTES, MIN_PART_BYTES, Arena
from echelon.errors import ProtocolError

RING = 1024
SIZES = st.integers(1, RING // message_layout.ALIGNMENT // 2).map(lambda units: units * message_layout.ALIGNMENT)


@given(st.lists(st.one_of(SIZES, st.none())))
def test_records_lie_one_behind_the_other_and_never_on_what_is_not_taken(steps):
    """A number puts a record of that size, None takes one."""
    records = taken = 0
    there = deque()
    for size in steps:
        if size is None:
            if there:
                start, length, skip = there.popleft()
                at = taken % RING
                assert start == (0 if skip else at)
                assert message_layout.read_prefix(
                    message_layout.Prefix(length, 1).encode(), records - taken - skip, start, RING
                )
                taken += skip + length
            continue
        place = message_layout.place_for(size, records, taken, RING)
        used = sum(length + skip for _, length, skip in there)
        if place is None:
            at = records % RING
            assert used + size + (RING - at if at + size > RING else 0) > RING
            continue
        assert place.start + size <= RING
        assert all(place.start >= start + length or place.start + size <= start for start, length, _ in there)
        there.append((place.start, size, place.skip))
        records += place.skip + size
    assert records - taken == sum(length + skip for _, length, skip in there)


def test_every_size_fits_an_empty_ring_wherever_that_begins():
    for at in range(0, RING, message_layout.ALIGNMENT):
        assert message_layout.place_for(RING // 2, at, at, RING) is not None


@pytest.mark.parametrize(
    ("prefix", "available", "at"),
    [
        (message_layout.Prefix(0, 0), 128, 0),
        (message_layout.Prefix(100, 40), 128, 0),
        (message_layout.Prefix(192, 40), 128, 0),
        (message_layout.Prefix(128, 40), 128, RING - 64),
        (message_layout.Prefix(128, 120), 128, 0),
        (message_layout.Prefix(8192, 5000), 8192, 0),
        (message_layout.Prefix(128, 40), RING + 64, 0),
    ],
)
def test_what_cannot_be_a_record_is_refused(prefix, available, at):
    with pytest.raises(ProtocolError, match="the peer does not speak this protocol"):
        message_layout.read_prefix(prefix.encode(), available, at, RING)


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
    assert message_layout.record_bytes(2000, sizes.inline_bytes) <= sizes.ring_bytes // 2


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
