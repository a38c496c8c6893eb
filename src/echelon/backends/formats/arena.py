"""Parts of a range of memory, given out and taken back. Pure: no memory in here, only where it is.

A part's size is a power of two, and so is where it begins; a free one is joined with the free other half of what the
two were cut from (the buddy system: K. C. Knowlton, A fast storage allocator, CACM 8, 1965). What lies first is given
out first, so the same memory is used again while it is in the cache, and the rest stays untouched. A few small parts
that were taken back are joined later, when there is no other room (a lazy buddy system: T. P. Lee and R. E. Barkley,
1989): most messages are as long as one before.
"""

from __future__ import annotations

from heapq import heappop, heappush

MIN_PART_BYTES = 32 << 10
MAX_PART_BYTES = 16 << 20
ARENA_BYTES = 1 << 30
"""Of all parts for one reader."""
_MAX_KEPT = 4
"""How many parts of a size are kept for the next that asks, of sizes of at most _MAX_KEPT_BYTES."""
_MAX_KEPT_BYTES = 1 << 20


class Arena:
    """The parts of one range of ARENA_BYTES, or as many as are given."""

    def __init__(self, num_bytes: int = ARENA_BYTES) -> None:
        """Begins with everything free; `num_bytes` is a multiple of MAX_PART_BYTES."""
        self._free: dict[int, set[int]] = {MAX_PART_BYTES: set(range(0, num_bytes, MAX_PART_BYTES))}
        self._heaps: dict[int, list[int]] = {MAX_PART_BYTES: sorted(self._free[MAX_PART_BYTES])}
        self._kept: dict[int, list[int]] = {}

    def take(self, num_bytes: int) -> tuple[int, int] | None:
        """Returns start and size of a part of at least `num_bytes`, at most MAX_PART_BYTES; None: there is none."""
        size = max(MIN_PART_BYTES, 1 << (num_bytes - 1).bit_length())
        if kept := self._kept.get(size):
            return kept.pop(), size
        start = self._take(size)
        if start is None and self._join_kept():
            start = self._take(size)
        return None if start is None else (start, size)

    def give_back(self, start: int, size: int) -> int | None:
        """Takes a part back. Returns where a range of MAX_PART_BYTES begins that is free now as a whole, else None."""
        if size <= _MAX_KEPT_BYTES and len(kept := self._kept.setdefault(size, [])) < _MAX_KEPT:
            kept.append(start)
            return None
        return self._join(start, size)

    def _join_kept(self) -> bool:
        """Joins all that is kept; returns whether there was any."""
        kept = [(start, size) for size, starts in self._kept.items() for start in starts]
        self._kept.clear()
        for start, size in kept:
            self._join(start, size)
        return bool(kept)

    def _join(self, start: int, size: int) -> int | None:
        while size < MAX_PART_BYTES:
            other = start ^ size
            if other not in self._free.get(size, ()):
                break
            self._free[size].remove(other)
            start, size = start & ~size, size * 2
        self._add(start, size)
        return start if size == MAX_PART_BYTES else None

    def _take(self, size: int) -> int | None:
        if size > MAX_PART_BYTES:
            return None
        free, heap = self._free.setdefault(size, set()), self._heaps.setdefault(size, [])
        while heap:
            start = heappop(heap)
            if start in free:  # else it was joined with another since
                free.remove(start)
                return start
        start_of_two = self._take(size * 2)
        if start_of_two is not None:
            self._add(start_of_two + size, size)
        return start_of_two

    def _add(self, start: int, size: int) -> None:
        self._free.setdefault(size, set()).add(start)
        heappush(self._heaps.setdefault(size, []), start)
