"""Recordings of the published programs, kept in a folder."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path

from models import depth_of
from programs import Recipe
from rows import Row

from echelon.foresight.trace import Kernel, Trace


class Recordings:
    """Traces of rank 0 by recipe and number of layers. Recorded on first use.

    A block in the middle of a model is like its neighbours. So programs are recorded with few layers, and results are
    extended to the full depth by the difference of two depths.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def trace(self, recipe: Recipe, layers: int) -> Trace:
        path = self._path(recipe, layers)
        if not path.exists():
            # Only recording needs torch's fake tensors: seconds of imports.
            from programs import train

            from echelon.foresight.record.run import record

            trace = record(train, recipe.world_size, (0,), args=(recipe, layers))[0]
            unfinished = path.with_suffix(f".{id(trace)}")
            unfinished.write_bytes(pickle.dumps(trace))
            unfinished.rename(path)
        return pickle.loads(path.read_bytes())

    def _path(self, recipe: Recipe, layers: int) -> Path:
        name = hashlib.sha256(repr((recipe, layers)).encode()).hexdigest()[:16]
        return self._folder / f"{recipe.model}-{name}.pickle"


def depths(row: Row) -> tuple[int, ...]:
    """Returns the numbers of layers to record: all where memory is compared, else two."""
    if row.reserved_gib:
        return (depth_of(row.recipe.model),)
    # With checkpointing of every other block, two more blocks are one of each.
    return (4, 6) if row.recipe.checkpointing == "layer" else (3, 5)


def with_another_microbatch(trace: Trace) -> Trace:
    """Returns a step of two microbatches with its first one done twice."""
    starts = [
        index
        for index, (entry, phase) in enumerate(_phases(trace))
        if isinstance(entry, Kernel) and entry.phase == "forward" and phase != "forward"
    ]
    first, second = starts[:2]
    return replace(trace, entries=(*trace.entries[:second], *trace.entries[first:second], *trace.entries[second:]))


def _phases(trace: Trace):
    """Yields each entry with the phase of the model's kernel before it."""
    phase = ""
    for entry in trace.entries:
        yield entry, phase
        if isinstance(entry, Kernel) and entry.phase in ("forward", "backward", "recompute"):
            phase = entry.phase
