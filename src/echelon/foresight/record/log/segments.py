"""Parts of a rank's log, and their copies at other places of the log, with other numbers. Pure.

Two microbatches write the same entries, except for the numbers of the storages, events, communication and batches that
they make. A log counts these up. So the numbers that a segment makes lie between its begin and its end, and its copy
shifts all numbers of a kind by one distance. Other storages, such as those of parameters, stay or have a counterpart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import eq
from typing import NamedTuple

from echelon.foresight.trace import Allocate, Collective, Copy, Entry, Free, HostKernel, Kernel, Message, Wait


class Counters(NamedTuple):
    """Numbers that a log gives next."""

    storage: int
    event: int
    number: int
    batch: int

    def plus(self, other: Counters, minus: Counters) -> Counters:
        """Returns these counters, advanced by the difference of `other` and `minus`."""
        return Counters(*(own + end - begin for own, end, begin in zip(self, other, minus, strict=True)))


class Segment(NamedTuple):
    """Entries in a row, and the counters before and after them."""

    entries: tuple[Entry, ...]
    begin: Counters
    end: Counters

    def has_made(self, storage: int) -> bool:
        """Whether this segment made a storage."""
        return self.begin.storage <= storage < self.end.storage

    @property
    def made(self) -> set[int]:
        """Storages that this segment made and that got memory in it."""
        return {each.storage for each in self.entries if type(each) is Allocate and self.has_made(each.storage)}

    @property
    def freed(self) -> set[int]:
        """Storages that gave memory back in it."""
        return {each.storage for each in self.entries if type(each) is Free}

    def is_copy(self, former: Segment, again: Iterator[Entry]) -> bool:
        """Whether this segment equals a former one, whose entries `again` yields with the numbers of this one."""
        return (
            len(former.entries) == len(self.entries)
            and self.begin.plus(former.end, former.begin) == self.end
            and all(map(eq, again, self.entries))
        )


class MovedSegment(NamedTuple):
    """Segment that is moved, and the counters where its copy begins."""

    segment: Segment
    begin: Counters


def moved(segment: Segment, places: Iterable[MovedSegment], storages: Mapping[int, int]) -> Iterator[Entry]:
    """Yields the entries of a segment with the numbers of another place.

    Args:
        segment: the segment.
        places: the segment's own place, and those of earlier segments whose numbers it refers to.
        storages: counterparts of other storages.
    """
    shift = _Shift(tuple(places), storages)
    for entry in segment.entries:
        match entry:
            # Fast path: most entries are kernels or storages, and `_replace` takes twice the time.
            case Kernel():
                yield Kernel._make((*entry[:6], shift.storages(entry.reads), shift.storages(entry.writes), *entry[8:]))
            case Allocate():
                yield Allocate._make((shift.storage(entry.storage), *entry[1:]))
            case Free():
                yield Free(shift.storage(entry.storage))
            case Collective():
                reads, writes = shift.storages(entry.reads), shift.storages(entry.writes)
                yield entry._replace(number=shift.number(entry.number), reads=reads, writes=writes)
            case Message():
                yield entry._replace(number=shift.number(entry.number), batch=shift.batch(entry.batch))
            case Wait():
                yield entry._replace(number=shift.number(entry.number))
            case Copy() | HostKernel():
                yield entry
            case _:  # of an event
                yield entry._replace(event=shift.event(entry.event))


class _Shift:
    """Numbers of a segment, moved to another place."""

    def __init__(self, places: tuple[MovedSegment, ...], storages: Mapping[int, int]) -> None:
        self._places = places
        self._storages: dict[int, int] = dict(storages)
        self._known: dict[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]] = {}

    def _moved(self, number: int, field: int) -> int:
        for (_, begin, end), base in self._places:
            if begin[field] <= number < end[field]:
                return number + base[field] - begin[field]
        return number

    def storage(self, number: int) -> int:
        found = self._storages.get(number)
        if found is None:
            found = self._storages[number] = self._moved(number, 0)
        return found

    def storages(self, accesses: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        found = self._known.get(accesses)
        if found is None:
            found = self._known[accesses] = tuple((self.storage(each), size) for each, size in accesses)
        return found

    def event(self, number: int) -> int:
        return self._moved(number, 1)

    def number(self, number: int) -> int:
        return self._moved(number, 2)

    def batch(self, number: int) -> int:
        return self._moved(number, 3)
