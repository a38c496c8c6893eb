"""Layout of the memory that the ranks of one group share. Pure arithmetic; see docs/shared_memory.md.

The region of a group is a sequence of rank regions, one for each rank. Only its owner writes into a rank region:

    0         tick      u64   counter: steps of the group's collectives that this rank has done
    64        asleep    u64   not 0: this rank sleeps, or is about to, until another tick changes
    72        left      u64   1: this rank has no use for the region any more
    128       words     2 x 16 u64: the operation's mark, 14 numbers, and the mark of the published result, in turns
    1024      note      2 x 1536 bytes: this rank's text for the operation, ended by a zero, in turns
    4096      result    2 x 2 KiB: the result that one rank has combined for all, in turns
    8192      small     2 x 1028 KiB: the data of small operations, in turns
    ...       slots     ring of buffers for the pieces of large operations

"In turns" is double buffering: operation number n uses copy n % 2. Two copies are enough because no rank can be two
operations ahead: the one between needs the tick of every rank. Words written by different ranks never share a cache
line.
"""

from __future__ import annotations

WORD_BYTES = 8
NUM_WORDS = 14
"""Numbers that an operation may publish, besides the mark that identifies it."""

TICK = 0
ASLEEP = 64
LEFT = 72
_WORDS = 128
_NOTES = 1024
NOTE_ROOM = 1536
_RESULTS = 4096
_SMALL = 8192

# Only for hosts with fewer cores than ranks: a rank that gets a core late copies the result instead of combining.
RESULT_BYTES = 2 << 10
"""Largest result that one rank combines for others."""

SMALL_BYTES = 256 << 10
"""Data per rank up to which every operation takes a single synchronisation."""
# A second copy of 1 MiB takes less time than waiting until all ranks have read it in place: in a broadcast of 1 MiB the
# source waited 229 us for a reader that copied for 71 (benchmarks/shared_memory).
SHOWN_BYTES = 1 << 20
"""The same for data that is only moved, or combined for one rank or by two ranks."""
PLACE_BYTES = SHOWN_BYTES + (4 << 10)
"""Buffer for a rank's small data, with 4 KiB for the header that gives the sizes of its blocks."""
SLOTS_BYTES = 8 << 20
"""Of one rank, for the pieces of large operations."""

SLOTS = _SMALL + 2 * PLACE_BYTES
"""Offset of the slots in a rank region."""
ROOM_BYTES = SLOTS + SLOTS_BYTES
"""Size of a rank region: whole pages, which take memory only once they are touched."""


def slot_bytes(num_ranks: int) -> int:
    """Returns the size of the pieces of large operations.

    Two ranks mostly have a core each, and pieces that stay in its cache are fastest. More ranks wait longer for each
    other, so they use fewer and larger pieces.
    """
    # 64 MiB, relative speed: with 2 ranks 256 and 128 KiB gave 0.99 and 0.91 of the code before memmove; with 4 ranks 1
    # MiB, 512 and 256 KiB gave 1.08, 0.92 and 0.88 of it, where 2 MiB gives 1.18.
    return 128 << 10 if num_ranks == 2 else 2 << 20


def words_at(number: int) -> int:
    """Returns the offset of operation `number`'s words in a rank region."""
    return _WORDS + (number & 1) * (2 + NUM_WORDS) * WORD_BYTES


def result_word_at(number: int) -> int:
    """Returns the offset of the word that names the operation whose result is published."""
    return words_at(number) + (1 + NUM_WORDS) * WORD_BYTES


def result_at(number: int) -> int:
    """Returns the offset of the result of operation `number` in a rank region."""
    return _RESULTS + (number & 1) * RESULT_BYTES


def note_at(number: int) -> int:
    """Returns the offset of the note of operation `number` in a rank region."""
    return _NOTES + (number & 1) * NOTE_ROOM


def small_at(number: int) -> int:
    """Returns the offset of the data of small operation `number` in a rank region."""
    return _SMALL + (number & 1) * PLACE_BYTES
