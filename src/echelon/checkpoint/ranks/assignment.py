"""Assignment of each element of a checkpoint to one rank that stores it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from echelon.checkpoint.files.layout import Entry, Part
from echelon.errors import CheckpointError

_WHOLE = 64 << 10
"""Bytes of a part that is not cut for the sake of balance."""
_ROW = 1 << 20
"""Bytes of the longest row that is not cut. Whole rows can be read by other programs."""


def assign(entries: Mapping[str, Entry], held: Sequence[Iterable[Part]]) -> list[list[Part]]:
    """Returns the parts that each rank stores. Together they are all elements, each once.

    Elements that several ranks hold are shared evenly among these.

    Args:
        entries: all tensors.
        held: the parts that each rank holds.

    Raises:
        CheckpointError: no rank holds some elements of a tensor.
    """
    by_name: dict[str, list[tuple[int, int, int]]] = {name: [] for name in entries}
    for rank, parts in enumerate(held):
        for name, start, stop in parts:
            if start < stop:
                by_name[name].append((start, stop, rank))
    by_holders: dict[tuple[int, ...], list[Part]] = {}
    for name, ranges in by_name.items():
        for part, holders in _common(name, entries[name].numel, ranges):
            by_holders.setdefault(holders, []).append(part)
    stored: list[list[Part]] = [[] for _ in held]
    loads = [0] * len(held)
    # Elements with one holder first: they are not to be chosen. Then the fewer holders, the less choice.
    for holders in sorted(by_holders, key=lambda each: (len(each), each)):
        _share(entries, by_holders[holders], holders, stored, loads)
    return [_merged(parts) for parts in stored]


def _common(name: str, numel: int, ranges: list[tuple[int, int, int]]) -> Iterable[tuple[Part, tuple[int, ...]]]:
    """Yields the longest parts of a tensor that are held by the same ranks, with these."""
    events = sorted([(start, 1, rank) for start, _, rank in ranges] + [(stop, -1, rank) for _, stop, rank in ranges])
    counts: dict[int, int] = {}  # a rank may hold an element twice
    position = 0
    # The last event finds elements at the end that nobody holds.
    for place, change, rank in [*events, (numel, 0, 0)]:
        if place > position:
            if not counts:
                raise CheckpointError(
                    f"no rank holds elements {position} to {place} of {name}: save from all ranks of the model"
                )
            yield Part(name, position, place), tuple(sorted(counts))
            position = place
        if change:
            counts[rank] = counts.get(rank, 0) + change
            if not counts[rank]:
                del counts[rank]


def _share(
    entries: Mapping[str, Entry],
    parts: list[Part],
    holders: tuple[int, ...],
    stored: list[list[Part]],
    loads: list[int],
) -> None:
    """Divides parts among their holders so that their loads become even."""
    sizes = [(part.stop - part.start) * entries[part.name].itemsize for part in parts]
    quotas = _quotas([loads[rank] for rank in holders], sum(sizes))
    queue = list(zip(holders, quotas, strict=True))
    rank, quota = queue.pop(0)
    for part in parts:
        entry, start = entries[part.name], part.start
        while start < part.stop:
            left = (part.stop - start) * entry.itemsize
            if left <= quota + _WHOLE or not queue:
                cut = part.stop
            else:
                cut = start + max(quota, 0) // entry.itemsize
                if entry.row * entry.itemsize <= _ROW:
                    cut = max(start, round(cut / entry.row) * entry.row)
                cut = min(cut, part.stop)
            if cut > start:
                stored[rank].append(Part(part.name, start, cut))
                loads[rank] += (cut - start) * entry.itemsize
                quota -= (cut - start) * entry.itemsize
            if cut < part.stop:
                rank, more = queue.pop(0)
                quota = more + min(quota, 0)  # an excess of the last holder is the next one's relief
            start = cut


def _quotas(loads: list[int], total: int) -> list[int]:
    """Returns the shares of `total` that make the loads as even as can be."""
    rising = sorted(loads)
    level, spent = rising[0], 0
    for number, (low, high) in enumerate(zip(rising, [*rising[1:], None], strict=True), 1):
        level = low
        if high is None or spent + (high - low) * number >= total:
            level += -(-(total - spent) // number)
            break
        spent += (high - low) * number
    return [max(0, level - load) for load in loads]


def _merged(parts: list[Part]) -> list[Part]:
    """Returns sorted parts, neighbours as one."""
    merged: list[Part] = []
    for part in sorted(parts):
        if merged and merged[-1].name == part.name and merged[-1].stop == part.start:
            merged[-1] = merged[-1]._replace(stop=part.stop)
        else:
            merged.append(part)
    return merged
