"""What stands where in the memory that the ranks of one group share. Pure arithmetic; see docs/shared_memory.md.

The region of a group is one room per rank, one behind the other. Only its owner writes into a room:

    0         tick      u64   how many steps of the group's collectives this rank has done
    64        asleep    u64   not 0: this rank sleeps, or is about to, until another tick changes
    128       words     2 x 16 u64: which operation, its numbers, of which one the result is there, in turns
    1024      note      2 x 1536 bytes: what this rank believes the operation is, ended by a zero, in turns
    4096      result    2 x 2 KiB: what all ranks' data was combined to, in turns
    8192      small     2 x 1028 KiB: the data of small operations, in turns
    ...       slots     the pieces of large operations

"In turns": operation number n uses the one of number n % 2. Words that different ranks write never share a cache line.
"""

from __future__ import annotations

WORD_BYTES = 8
NUM_WORDS = 14
"""Numbers that may go with an operation, besides the one that tells it from others."""

TICK = 0
ASLEEP = 64
_WORDS = 128
_NOTES = 1024
NOTE_ROOM = 1536
_RESULTS = 4096
_SMALL = 8192

RESULT_BYTES = 2 << 10
"""The largest result that one rank combines for others."""

SMALL_BYTES = 256 << 10
"""How many bytes of one rank an operation may have to need no more than one synchronisation, whatever it does."""
SHOWN_BYTES = 1 << 20
"""How many it may have where they are only moved, or combined for one rank, or by two."""
PLACE_BYTES = SHOWN_BYTES + (4 << 10)
"""Of the place for a rank's small data, with room for the numbers that say what is there."""
SLOTS_BYTES = 8 << 20
"""Of one rank, for the pieces of large operations."""

SLOTS = _SMALL + 2 * PLACE_BYTES
"""Where they begin in a room."""
ROOM_BYTES = SLOTS + SLOTS_BYTES
"""Of one rank; whole pages, and touched only as far as they are used."""


def slot_bytes(num_ranks: int) -> int:
    """Returns how large the pieces of large operations are.

    Two ranks mostly have a core each, and pieces that stay in its cache are the fastest. More ranks wait longer for
    each other, so they have fewer pieces.
    """
    return 512 << 10 if num_ranks == 2 else 2 << 20


def words_at(number: int) -> int:
    """Returns where in a room the words of operation `number` begin."""
    return _WORDS + (number & 1) * (2 + NUM_WORDS) * WORD_BYTES


def result_word_at(number: int) -> int:
    """Returns where in a room it stands of which operation the result is there."""
    return words_at(number) + (1 + NUM_WORDS) * WORD_BYTES


def result_at(number: int) -> int:
    """Returns where in a room the result of operation `number` is."""
    return _RESULTS + (number & 1) * RESULT_BYTES


def note_at(number: int) -> int:
    """Returns where in a room the note of operation `number` begins."""
    return _NOTES + (number & 1) * NOTE_ROOM


def small_at(number: int) -> int:
    """Returns where in a room the data of a small operation with that number begins."""
    return _SMALL + (number & 1) * PLACE_BYTES
