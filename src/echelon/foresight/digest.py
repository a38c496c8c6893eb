"""Digest of a recorded step: equal for ranks that do the same, each in its own groups. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from echelon.foresight.trace import Allocate, Collective, Entry, Free, Group, Kernel, Message, Trace


def digest(trace: Trace) -> str:
    """Returns 32 hexadecimal digits, the same for two ranks that can represent each other.

    Groups count by their name and the distances of their ranks, messages by the positions of both sides in the group.
    Lines, modules and the numbers of storages do not count, nor does memory of the host.
    """
    found = hashlib.blake2b(digest_size=16)
    for fact in _facts(trace):
        found.update(repr(fact).encode())
    return found.hexdigest()


def _facts(trace: Trace) -> Iterator[object]:
    yield trace.has_expandable_segments
    live = [entry for entry in trace.live if not entry.on_host]
    sizes = {entry.storage: entry.num_bytes for entry in live}
    yield sorted((entry.kind, entry.num_bytes) for entry in live)
    freed: list[int] = []
    for entry in trace.entries:
        if isinstance(entry, Free):
            # By their sizes, since ranks may number their storages differently.
            if entry.storage in sizes:
                freed.append(sizes.pop(entry.storage))
            continue
        if isinstance(entry, Allocate) and entry.on_host:
            continue
        # Storages that are freed together are freed in any order, such as those of autocast's cache.
        if freed:
            yield sorted(freed)
            freed.clear()
        if isinstance(entry, Allocate):
            sizes[entry.storage] = entry.num_bytes
            yield entry.num_bytes, entry.kind
        else:
            yield _fact(trace, entry)
    yield sorted(freed)


def _fact(trace: Trace, entry: Entry) -> object:
    if isinstance(entry, Kernel):
        return (*entry[:6], _sizes(entry.reads), _sizes(entry.writes), entry.launches, entry.phase, entry.is_compiled)
    if isinstance(entry, Collective):
        group, root = trace.groups[entry.group], entry.root
        return (
            *entry[:3],
            form(group),
            entry.num_bytes,
            entry.dtype,
            entry.op,
            None if root < 0 else root == trace.rank,
            entry.blocking,
            entry.phase,
        )
    if isinstance(entry, Message):
        group = trace.groups[entry.group]
        # Both positions, not only their distance: middle stages of a pipeline do the same, but at different times.
        places = [group.ranks.index(rank) for rank in (trace.rank, entry.peer) if rank >= 0]
        return *entry[:3], places, form(group), *entry[5:11]
    return tuple(value for name, value in zip(entry._fields, entry, strict=True) if name != "place")


def _sizes(accesses: tuple[tuple[int, int], ...]) -> list[int]:
    return sorted(num_bytes for _, num_bytes in accesses)


def form(group: Group) -> tuple[str, tuple[int, ...]]:
    """Returns the form of a group: its name, and the distances of its ranks from the first."""
    return group.name, tuple(rank - group.ranks[0] for rank in group.ranks)
