"""Tells the launcher of this rank how it failed.

`echelon run` gives each rank a file name in ECHELON_ERROR_FILE. A rank that leaves with an uncaught exception
writes it there instead of printing it, so that the launcher can print the first cause first and the consequences
after it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from types import TracebackType
from typing import Protocol

from echelon.errors import PeerFailed, Timeout, failure_of
from echelon.exits import describe_exit_of, status_of, summarize
from echelon.launch.failure import RankFailure, blamed_rank
from echelon.places import is_foreign

ERROR_FILE = "ECHELON_ERROR_FILE"


class Abortable(Protocol):
    """The part of a ProcessGroup that is needed here."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        ...

    def abort(self, reason: str, origin: int | None = None) -> None:
        """Tells every peer that this rank gives up; `origin` is the rank that it began with, None this one."""
        ...


def describe(rank: int, error: BaseException) -> RankFailure:
    """Returns the record of `error`, raised on this rank just now."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_foreign(frame.filename)]
    return RankFailure(
        rank=rank,
        at=time.monotonic(),
        summary=describe_exit_of(error.code) if isinstance(error, SystemExit) else f"raised {summarize(error)}",
        traceback="".join(traceback.format_exception(error)),
        where=f"{own[-1].filename}:{own[-1].lineno}" if own else "",
        blames=None if isinstance(error, SystemExit) else blamed_rank(error),
        status=status_of(error.code) if isinstance(error, SystemExit) else 1,
    )


def write(path: str, failure: RankFailure) -> bool:
    """Writes `failure` to `path`; says whether that worked. The reader never sees half of it."""
    partial = f"{path}.{os.getpid()}"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(failure), file)
        os.replace(partial, path)
    except OSError:
        return False
    return True


def read(path: str) -> RankFailure | None:
    """Returns what a rank wrote to `path`, None if it wrote nothing."""
    try:
        with open(path, encoding="utf-8") as file:
            return RankFailure(**json.load(file))
    except FileNotFoundError:
        return None


def report_uncaught(group: Abortable) -> None:
    """Makes an uncaught exception of this process abort `group` and reach the launcher.

    The peers then fail with the reason, instead of a connection that ended; it names the rank that failed first, which
    need not be this one. Without a launcher the exception is
    printed as ever; an excepthook that somebody installed before is called in any case.
    """
    previous = sys.excepthook
    pid = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        written = False
        if os.getpid() == pid:  # not in a child that was forked later
            path = os.environ.get(ERROR_FILE)
            written = path is not None and write(path, describe(group.rank, error))
            cause = failure_of(error, group.rank) if isinstance(error, Timeout) else error
            if isinstance(cause, PeerFailed):
                group.abort(cause.reason, cause.rank)
            else:
                group.abort(summarize(error))
        if not written or previous is not sys.__excepthook__:
            previous(kind, error, trace)

    sys.excepthook = hook
