"""Memory of a step: bytes of tensors exactly, and bytes that PyTorch's caching allocator reserves for them. Pure.

The allocator takes memory from the device in segments. A request of at most 1 MiB is a part of a segment of 2 MiB. One
below 10 MiB is a part of a segment of 20 MiB. A larger one gets a segment of its own, rounded to 2 MiB. A request takes
the smallest free block that is large enough. The block is split unless the rest would be too small to keep. Free
neighbours are merged. Blocks belong to the stream that they were allocated for. If the device is full, segments that
are wholly free are given back. With expandable segments a stream has one segment of each kind, which grows at its end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from echelon.foresight.trace import Allocate, Free, Kernel, Trace

_MIB = 1 << 20
SMALL = 1 * _MIB
"""Largest request of the small pool."""
SMALL_SEGMENT = 2 * _MIB
LARGE_REQUEST = 10 * _MIB
"""Smallest request that gets a segment of its own."""
LARGE_SEGMENT = 20 * _MIB
ROUND_LARGE = 2 * _MIB
MIN_BLOCK = 512


@dataclass(frozen=True)
class Memory:
    """Memory of one rank over a step."""

    live_peak: int
    """Most bytes of tensors at once."""
    reserved_peak: int
    """Most bytes of segments at once. A full device reserves no more than it has."""
    needed_peak: int
    """Bytes that the device needs at least: more than it has if a request was not met, else those of `reserved_peak`.

    Blocks that are free but too small may keep a request from being met, so that tensors need less than the device has.
    """
    kinds_at_peak: Mapping[str, int]
    """Bytes of tensors at the peak, by kind."""
    alive_at_peak: tuple[Allocate, ...]
    """Storages at the peak, the largest first."""
    fits: bool
    """Whether every request was met within the device's memory."""
    retries: int
    """Times in the step that the device was full and free segments were given back, which slows the step down."""
    reserved: tuple[tuple[int, int], ...]
    """(index of the entry, bytes of segments) after each change. Index -1: before the step."""
    host_peak: int = 0
    """Most bytes of tensors on the host at once."""


@dataclass(slots=True, eq=False)
class _Block:
    """Part of a segment."""

    size: int
    pool: tuple[int, bool]
    number: int = 0
    """Number while the block is in a list of free blocks: those of equal size are taken by age."""
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None


class _Slot(NamedTuple):
    """Entry of a list of free blocks, by size and then by age."""

    size: int
    number: int


class CachingAllocator:
    """Model of PyTorch's allocator of device memory.

    Args:
        limit: Bytes of the device. None: no limit.
        expandable: Whether segments grow (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).
    """

    def __init__(self, limit: int | None = None, expandable: bool = False) -> None:
        self.reserved = 0
        self.peak = 0
        self.needed = 0
        """Most bytes of segments that a request would have led to which was not met."""
        self.retries = 0
        """Times that the device was full and free segments were given back, which waits for all kernels."""
        self._refused = 0
        """Bytes of segments that the last refused growth would have led to."""
        self._limit = limit
        self._expandable = expandable
        self._free: dict[tuple[int, bool], list[_Slot]] = defaultdict(list)
        self._blocks: dict[int, _Block] = {}
        """Free blocks by number."""
        self._new_number = count(1).__next__
        self._used: dict[int, _Block] = {}
        self._ends: dict[tuple[int, bool], _Block] = {}
        """Last block of a pool's expandable segment."""

    def allocate(self, storage: int, num_bytes: int, stream: int = 0) -> bool:
        """Allocates memory. Returns False if the device has too little."""
        size = max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)
        pool = stream, size <= SMALL
        block = self._best_fit(pool, size) or self._grow(pool, size)
        if block is None:
            # As PyTorch does before it gives up.
            self.retries += 1
            self._give_back()
            block = self._grow(pool, size)
            if block is None:
                self.needed = max(self.needed, self._refused)
                return False
        self._split(block, size)
        block.is_free = False
        self._used[storage] = block
        return True

    def free(self, storage: int) -> None:
        """Frees memory. It stays reserved."""
        block = self._used.pop(storage, None)
        if block is None:
            return
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove(other)
                block = self._merge(block, other)
        self._add(block)

    def _best_fit(self, pool: tuple[int, bool], size: int) -> _Block | None:
        slots = self._free[pool]
        index = bisect_left(slots, _Slot(size, -1))
        if index == len(slots):
            return None
        block = self._blocks[slots[index].number]
        self._remove(block)
        return block

    def _grow(self, pool: tuple[int, bool], size: int) -> _Block | None:
        if self._expandable:
            return self._extend(pool, size)
        segment = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT if size < LARGE_REQUEST else _up(size, ROUND_LARGE)
        if not self._reserve(segment):
            return None
        return _Block(segment, pool)

    def _extend(self, pool: tuple[int, bool], size: int) -> _Block | None:
        """Maps more pages at the end of a pool's segment, behind the free block there."""
        page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        last = self._ends.get(pool)
        at_end = last is not None and last.is_free
        lacking = size - last.size if last is not None and at_end else size
        mapped = _up(lacking, page)
        if not self._reserve(mapped):
            return None
        if last is not None and at_end:
            self._remove(last)
            last.size += mapped
            return last
        block = _Block(mapped, pool)
        if last is not None:
            last.after, block.before = block, last
        self._ends[pool] = block
        return block

    def _reserve(self, num_bytes: int) -> bool:
        if self._limit is not None and self.reserved + num_bytes > self._limit:
            self._refused = self.reserved + num_bytes
            return False
        self.reserved += num_bytes
        self.peak = max(self.peak, self.reserved)
        return True

    def _give_back(self) -> None:
        """Gives wholly free segments back to the device."""
        for block in list(self._blocks.values()):
            if self._expandable:
                page = SMALL_SEGMENT if block.pool[1] else LARGE_SEGMENT
                # Whole pages inside the block are unmapped. The hole stays in the address space and holds no memory.
                mapped = block.size // page * page
                if mapped:
                    self._remove(block)
                    self.reserved -= mapped
                    block.size -= mapped
                    if block.size:
                        self._add(block)
                    else:
                        self._unlink(block)
            elif block.before is None and block.after is None:
                self._remove(block)
                self.reserved -= block.size

    def _unlink(self, block: _Block) -> None:
        if block.before is not None:
            block.before.after = block.after
        if block.after is not None:
            block.after.before = block.before
        # A segment can only grow behind its last block.
        if self._ends.get(block.pool) is block:
            if block.before is not None:
                self._ends[block.pool] = block.before
            else:
                del self._ends[block.pool]

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        # The rest of a small or expandable block is kept from 512 bytes on, that of another block above 1 MiB.
        keeps = rest >= MIN_BLOCK if block.pool[1] or self._expandable else rest > SMALL
        if not keeps:
            return
        block.size = size
        other = _Block(rest, block.pool)
        other.before, other.after = block, block.after
        if block.after is not None:
            block.after.before = other
        block.after = other
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = other
        self._add(other)

    def _merge(self, block: _Block, other: _Block) -> _Block:
        first, second = (other, block) if block.before is other else (block, other)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if self._ends.get(block.pool) is second:
            self._ends[block.pool] = first
        return first

    def _add(self, block: _Block) -> None:
        block.number = self._new_number()
        self._blocks[block.number] = block
        insort(self._free[block.pool], _Slot(block.size, block.number))

    def _remove(self, block: _Block) -> None:
        del self._blocks[block.number]
        slots = self._free[block.pool]
        del slots[bisect_left(slots, _Slot(block.size, block.number))]


def memory_of(trace: Trace, limit: int | None = None) -> Memory:
    """Returns the memory of a recorded step on a device of `limit` bytes, and that of its tensors on the host.

    The program's first step is played before it, because it fragments the memory: the optimizer's state is allocated at
    its end, in blocks that are free then, and later requests do not find these blocks whole.
    """
    host_peak = _host_peak(trace)
    if host_peak:
        live_on_gpu = tuple(entry for entry in trace.live if not entry.on_host)
        # Indices of entries stay: a storage that is freed without having got memory changes nothing.
        entries = tuple(Free(-1) if type(each) is Allocate and each.on_host else each for each in trace.entries)
        trace = replace(trace, live=live_on_gpu, entries=entries)
    allocator = CachingAllocator(limit, trace.has_expandable_segments)
    fits = _warm_up(allocator, trace)
    earlier_retries = allocator.retries
    alive: dict[int, Allocate] = {entry.storage: entry for entry in trace.live}
    live = peak = sum(entry.num_bytes for entry in trace.live)
    at_peak = dict(alive)
    reserved = [(-1, allocator.reserved)]
    is_rising = False
    for index, change in enumerate(trace.entries):
        if type(change) is Allocate:
            alive[change.storage] = change
            live += change.num_bytes
            fits &= allocator.allocate(change.storage, change.num_bytes, change.stream)
            if allocator.reserved != reserved[-1][1]:
                reserved.append((index, allocator.reserved))
            if live > peak:
                peak, is_rising = live, True
        elif type(change) is Free:
            gone = alive.get(change.storage)
            if gone is None:
                continue
            # Copied at the end of each rise, not at each of its steps.
            if is_rising:
                at_peak, is_rising = dict(alive), False
            del alive[change.storage]
            live -= gone.num_bytes
            allocator.free(change.storage)
    if is_rising:
        at_peak = dict(alive)
    kinds: dict[str, int] = defaultdict(int)
    for each in at_peak.values():
        kinds[each.kind] += each.num_bytes
    return Memory(
        live_peak=peak,
        reserved_peak=allocator.peak,
        needed_peak=allocator.peak if fits else max(allocator.peak, allocator.needed, peak),
        kinds_at_peak=dict(sorted(kinds.items(), key=lambda item: -item[1])),
        alive_at_peak=tuple(sorted(at_peak.values(), key=lambda each: -each.num_bytes)),
        fits=fits,
        # Those of the first step do not come again.
        retries=allocator.retries - earlier_retries,
        reserved=tuple(reserved),
        host_peak=host_peak,
    )


def _host_peak(trace: Trace) -> int:
    """Returns the most bytes of tensors on the host at once."""
    alive = {entry.storage: entry.num_bytes for entry in trace.live if entry.on_host}
    held = peak = sum(alive.values())
    for change in trace.entries:
        if type(change) is Allocate and change.on_host:
            alive[change.storage] = change.num_bytes
            held += change.num_bytes
            peak = max(peak, held)
        elif type(change) is Free:
            held -= alive.pop(change.storage, 0)
    return peak


def _warm_up(allocator: CachingAllocator, trace: Trace) -> bool:
    """Plays a first step, and leaves allocated the storages that are alive when the second one begins.

    Returns whether all of them fit.
    """
    used: set[int] = set()
    fits = True

    def allocate(entries: Iterable[Allocate]) -> None:
        nonlocal fits
        for entry in entries:
            fits &= allocator.allocate(entry.storage, entry.num_bytes, entry.stream)
            used.add(entry.storage)

    later = [entry for entry in trace.live if entry.kind == "optimizer"]
    allocate(entry for entry in trace.live if entry.kind != "optimizer")
    for change in trace.entries:
        if type(change) is Allocate:
            allocate([change])
        elif type(change) is Free:
            allocator.free(change.storage)
            used.discard(change.storage)
        # The state of most optimizers is made in their first step.
        elif later and type(change) is Kernel and change.phase == "optimizer":
            allocate(later)
            later = []
    for storage in used - {entry.storage for entry in trace.live}:
        allocator.free(storage)
    allocate([entry for entry in trace.live if entry.storage not in used])
    return fits


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
