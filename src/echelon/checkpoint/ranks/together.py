"""Agreement of ranks about an act that can fail on some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from echelon.checkpoint.files.folder import failed_to
from echelon.checkpoint.ranks.writer import failure
from echelon.errors import CheckpointError, EchelonError, FileError, InvalidArgument
from echelon.group import ProcessGroup

Result = TypeVar("Result")
_KINDS = {"file": FileError, "argument": InvalidArgument, "checkpoint": CheckpointError}
"""Errors of other ranks, by the kind that `failure` gives them."""


def gather(group: ProcessGroup | None, value: Any) -> list[Any]:
    """Returns the JSON-like values of all ranks. Collective. `group`: None for one rank."""
    return [value] if group is None else group.all_gather_object(value)


def rank_of(group: ProcessGroup | None) -> int:
    """Returns this rank. `group`: None for one rank."""
    return 0 if group is None else group.rank


def together(group: ProcessGroup | None, act: Callable[[], Result], path: str = "") -> Result:
    """Does something on all ranks. If it fails on one, all raise. Collective.

    Args:
        group: the ranks; None for one.
        act: called on each rank. It makes no collective calls.
        path: path in the message of an OSError that names none.

    Raises:
        Exception: the act failed on this rank.
        FileError: it failed on another rank, or here with an OSError.
        InvalidArgument: it failed on another rank with one.
        CheckpointError: it failed on another rank for another reason.
    """
    error: Exception | None = None
    result: list[Result] = []
    try:
        result.append(act())
    except EchelonError as caught:
        error = caught
    except OSError as caught:
        error = failed_to("use", path, caught)
    except Exception as caught:  # of the user's code, or of a GPU: the others must not wait for this rank
        error = caught
    outcomes = gather(group, None if error is None else failure(error))
    # Before those of the others, which are text: this one has its type and its traceback.
    if error is not None:
        raise error
    raise_first(outcomes, group)
    return result[0]


def raise_first(outcomes: Sequence[Mapping[str, Any] | None], group: ProcessGroup | None) -> None:
    """Raises the first failure among the outcomes of the ranks of a group. `group`: None for one rank.

    Raises:
        FileError: it was one of the file system.
        InvalidArgument: it was a wrong argument.
        CheckpointError: it was something else.
    """
    for rank, outcome in enumerate(outcomes):
        if outcome is not None and "error" in outcome:
            where = f"rank {rank}: " if len(outcomes) > 1 else ""
            error = _KINDS[outcome["kind"]](where + outcome["error"])
            # Reports name ranks of the world, and do not repeat the text.
            if group is not None and rank != group.rank:
                error.raised_on = group.ranks[rank]
            raise error
