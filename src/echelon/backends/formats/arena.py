"""Buddy allocator over one range of memory. Pure: it handles offsets, not memory.

A part's size is a power of two, and its offset a multiple of it. A freed part is joined with its free buddy, the other
half of the part that both were cut from (K. C. Knowlton, A fast storage allocator, CACM 8, 1965). The lowest free part
is given out first, so the same memory is reused while it is in the cache, and the rest stays untouched. A few freed
small parts of each size are joined only when there is no other room (lazy buddy system: T. P. Lee and R. E. Barkley,
1989), as most messages are as long as an earlier one.
"""

from __future__ import annotations

from heapq import heappop, heappush

MIN_PART_BYTES = 32 << 10
MAX_PART_BYTES = 16 << 20
ARENA_BYTES = 1 << 30
"""Size of the whole arena of one sender and one receiver, in bytes."""
# Freed parts of one size that stay unjoined for the next request of that size.
_MAX_KEPT = 4
# Larger parts are joined at once, so that whole ranges become free and can be returned to the system.
_MAX_KEPT_BYTES = 1 << 20


class Arena:
    """Free parts of one arena."""

    def __init__(self, num_bytes: int = ARENA_BYTES) -> None:
        """Starts with everything free. `num_bytes` is a multiple of MAX_PART_BYTES."""
        self._free: dict[int, set[int]] = {MAX_PART_BYTES: set(range(0, num_bytes, MAX_PART_BYTES))}
        # A heap finds the lowest free offset. Joined parts are removed from the set alone and skipped when popped.
        self._heaps: dict[int, list[int]] = {MAX_PART_BYTES: sorted(self._free[MAX_PART_BYTES])}
        self._kept: dict[int, list[int]] = {}

    def take(self, num_bytes: int) -> tuple[int, int] | None:
        """Allocates `num_bytes`, at most MAX_PART_BYTES. Returns the part's offset and size. None if none fits."""
        size = max(MIN_PART_BYTES, 1 << (num_bytes - 1).bit_length())
        # Fast path: most messages are as long as an earlier one.
        if kept := self._kept.get(size):
            return kept.pop(), size
        start = self._take(size)
        if start is None and self._join_kept():
            start = self._take(size)
        return None if start is None else (start, size)

    def give_back(self, start: int, size: int) -> int | None:
        """Frees a part. Returns the offset of the MAX_PART_BYTES range that this freed as a whole, else None."""
        if size <= _MAX_KEPT_BYTES and len(kept := self._kept.setdefault(size, [])) < _MAX_KEPT:
            kept.append(start)
            return None
        return self._join(start, size)

    def _join_kept(self) -> bool:
        """Joins all kept parts with their buddies. True if there were any."""
        kept = [(start, size) for size, starts in self._kept.items() for start in starts]
        self._kept.clear()
        for start, size in kept:
            self._join(start, size)
        return bool(kept)

    def _join(self, start: int, size: int) -> int | None:
        while size < MAX_PART_BYTES:
            # The buddy's offset differs in one bit, as offsets are multiples of the size.
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
            if start in free:  # else it was joined with its buddy since it was pushed
                free.remove(start)
                return start
        start_of_two = self._take(size * 2)
        if start_of_two is not None:
            self._add(start_of_two + size, size)
        return start_of_two

    def _add(self, start: int, size: int) -> None:
        self._free.setdefault(size, set()).add(start)
        heappush(self._heaps.setdefault(size, []), start)
