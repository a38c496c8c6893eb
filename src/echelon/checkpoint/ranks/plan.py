"""Plan of a save: which rank stores which elements, agreed by all ranks."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from echelon.checkpoint.files.layout import Entry, Part
from echelon.checkpoint.files.manifest import Tensors
from echelon.checkpoint.ranks.assignment import assign
from echelon.checkpoint.ranks.image import Copy, copies_of, entry_of
from echelon.checkpoint.ranks.together import gather, raise_first, rank_of
from echelon.checkpoint.ranks.writer import failure
from echelon.checkpoint.state import State
from echelon.errors import InvalidArgument, UnsupportedOp
from echelon.group import ProcessGroup


class Plan(NamedTuple):
    """Assignment of elements to ranks. It serves later saves of the same ranges, too."""

    digests: list[str]
    """Of the ranges that each rank holds."""
    tensors: Tensors
    copies: list[Copy]
    """Of this rank."""


class Agreed(NamedTuple):
    """Values of one save that all ranks know."""

    plan: Plan
    run: str
    """Name of this start of the job, chosen by rank 0."""
    own: list[dict[str, Any]]
    """Own values of each rank."""


def agree(group: ProcessGroup | None, call: dict[str, Any], state: State, run: str, last: Plan | None) -> Agreed:
    """Agrees on a save with all ranks. Collective.

    Args:
        group: the ranks; None for one.
        call: arguments that must be the same on all ranks.
        state: tensors and values of this rank.
        run: this rank's proposal for the name of the job's start.
        last: plan of the last save.

    Raises:
        InvalidArgument: the arguments, the common values, or shape and dtype of a tensor differ between ranks.
        UnsupportedOp: a dtype of this rank cannot be stored.
        CheckpointError: no rank holds some elements of a tensor, or another rank has failed.
    """
    held = [[piece.name, piece.start, piece.start + piece.values.numel()] for piece in state.pieces]
    error: UnsupportedOp | None = None  # raised after the gather, in which the others wait
    entries: dict[str, Entry] = {}
    try:
        entries = {name: entry_of(name, spec) for name, spec in state.specs.items()}
    except UnsupportedOp as caught:
        error = caught
    mine = {
        # Rank 0 alone writes the values that all ranks share, so the others compare theirs by a digest.
        "call": call | {"data": _digest(state.data)},
        "digest": _digest([entries, held]),
        "own": state.own,
        "run": run,
        "failed": None if error is None else failure(error),
    }
    values = gather(group, mine)
    if error is not None:
        raise error
    raise_first([value["failed"] for value in values], group)
    for rank, value in enumerate(values):
        for what, given in value["call"].items():
            if given != values[0]["call"][what]:
                shown = "" if what == "data" else f", {given} and {values[0]['call'][what]}"  # of data it is a digest
                raise InvalidArgument(
                    f"rank {rank} saves another {what} than rank 0{shown}: pass the same on all ranks, and a value of "
                    "one rank as PerRank(value)"
                )
    digests = [value["digest"] for value in values]
    # All ranges of all ranks are many names, and a run saves the same ones each time.
    if last is None or last.digests != digests:
        given_by = gather(group, [entries, held])
        parts = [[Part(*part) for part in each[1]] for each in given_by]
        joined = _joined([each[0] for each in given_by])
        tensors = Tensors.assigned(joined, assign(joined, parts))
        rank = rank_of(group)
        last = Plan(digests, tensors, copies_of(tensors.layouts[rank], parts[rank]))
    return Agreed(last, values[0]["run"], [value["own"] for value in values])


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def _joined(given: list[dict[str, Any]]) -> dict[str, Entry]:
    """Returns the tensors of all ranks."""
    entries: dict[str, Entry] = {}
    whose: dict[str, int] = {}
    for rank, each in enumerate(given):
        for name, (dtype, shape) in each.items():
            entry = Entry(dtype, tuple(shape))
            if entries.setdefault(name, entry) != entry:
                raise InvalidArgument(
                    f"{name} is {_shown(entries[name])} on rank {whose[name]} and {_shown(entry)} on rank {rank}: give "
                    "it the same shape and dtype on all ranks"
                )
            whose.setdefault(name, rank)
    return entries


def _shown(entry: Entry) -> str:
    return f"{entry.dtype}{list(entry.shape)}"
