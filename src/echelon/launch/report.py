"""Tells the launcher of this rank how it failed.

`echelon run` gives each rank a file name in ECHELON_ERROR_FILE. A rank that leaves with an uncaught exception
writes it there instead of printing it, so that the launcher can print the first cause first and the consequences
after it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import Protocol

from echelon.call_site import is_foreign, is_own
from echelon.errors import CollectiveMismatch, EchelonError, PeerFailed, Timeout, failure_of
from echelon.exits import describe_exit_of, status_of, summarize
from echelon.wording import counted

# What is known about ranks that failed, and which of them was the cause.
#
# When one rank fails, the others soon fail too, because they waited for it. A survivor's PeerFailed can be reported
# long before the end of the rank that it blames is noticed, so the order of reports alone does not say who began.


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    at: seconds on the clock of `time.monotonic`, which all processes of one host share. summary: one line.
    traceback: text, empty if the rank left none. where: the innermost line of the user's own code, as "file:line",
    or empty. blames: the rank that this one failed because of, None if the failure is its own. status: the exit
    status to pass on.
    """

    rank: int
    at: float
    summary: str
    traceback: str = ""
    where: str = ""
    blames: int | None = None
    status: int = 1

    def __str__(self) -> str:
        return f"rank {self.rank} {self.summary}"


def first_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """Returns the failure that came first among those that blame no other rank; if all do, the first of all."""
    return min(failures, key=lambda failure: (failure.blames is not None, failure.at))


def describe_exit(returncode: int) -> str:
    """Says how a process ended, such as "was killed by SIGKILL" or "exited with status 3".

    Args:
        returncode: as in `subprocess.Popen`: negative means the number of a signal.
    """
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"was killed by {name}"


def exit_status(returncode: int) -> int:
    """Returns the status that a shell shows for `returncode`: 128 + signal for a process that was killed."""
    return returncode if returncode >= 0 else 128 - returncode


def blamed_rank(error: BaseException) -> int | None:
    """Returns the rank that an error in the chain of `error` says has failed or departed, None if there is none."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, PeerFailed):
            return current.rank
        if isinstance(current, CollectiveMismatch) and current.departed is not None:
            return current.departed
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return None


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
        traceback=folded(error),
        where=f"{own[-1].filename}:{own[-1].lineno}" if own else "",
        blames=None if isinstance(error, SystemExit) else blamed_rank(error),
        status=status_of(error.code) if isinstance(error, SystemExit) else 1,
    )


def folded(error: BaseException) -> str:
    """Returns the traceback of `error` and its causes, with the frames inside of Echelon counted, not shown.

    They stay where they lead to an exception that Echelon does not raise on purpose: that is a defect of Echelon.
    """
    whole = traceback.TracebackException.from_exception(error)
    described, chain = whole, error
    while True:
        _fold(described, is_on_purpose=isinstance(chain, EchelonError))
        following, cause = described.__cause__, chain.__cause__
        if following is None and not described.__suppress_context__:
            following, cause = described.__context__, chain.__context__
        if following is None or cause is None:
            return "".join(whole.format())
        described, chain = following, cause


def _fold(described: traceback.TracebackException, is_on_purpose: bool) -> None:
    """Puts one line in place of each row of frames inside of Echelon."""
    kept: list[traceback.FrameSummary] = []
    rows = [(own, list(frames)) for own, frames in groupby(described.stack, lambda frame: is_own(frame.filename))]
    for number, (is_ours, frames) in enumerate(rows):
        is_last = number + 1 == len(rows)
        if is_ours and (is_on_purpose or not is_last):
            text, last = f"({counted(len(frames), 'call')} inside of Echelon)", frames[-1]
            kept.append(traceback.FrameSummary(last.filename, last.lineno, last.name, line=text, lookup_line=False))
        else:
            kept += frames
    described.stack = traceback.StackSummary.from_list(kept)


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


@contextmanager
def reported_start() -> Iterator[None]:
    """Has the failure of a start reach the launcher of this rank, if nobody catches it.

    There is no group yet to tell, so the other ranks find out for themselves.
    """
    try:
        yield
    except BaseException:
        rank = os.environ.get("RANK", "")
        if os.environ.get(ERROR_FILE) and rank.isdecimal():
            _installed().rank = int(rank)
        raise


def report_uncaught(group: Abortable) -> Callable[[], None]:
    """Makes an uncaught exception of this process abort `group` and reach the launcher.

    The peers then fail with the reason, instead of a connection that ended; it names the rank that failed first, which
    need not be this one. Without a launcher the exception is printed as ever. An excepthook that somebody installed
    before is called in any case; one that is installed later takes this one's place, unless it calls it.

    Returns:
        Takes the group out of this again. It must be called when the group is closed: until then the group is kept
        alive, so that peers hear of an exception even if the program dropped its own reference.
    """
    hook = _installed()
    hook.rank = group.rank
    hook.groups.append(group)

    def forget() -> None:
        if group in hook.groups:
            hook.groups.remove(group)

    return forget


def _installed() -> _Hook:
    """Returns the excepthook of this process, installed now unless it is there."""
    hook = sys.excepthook
    if not isinstance(hook, _Hook) or hook.pid != os.getpid():
        hook = sys.excepthook = _Hook(hook)
    return hook


class _Hook:
    """Excepthook of this process, for all its open groups, and for a start that failed.

    One is enough however many groups come and go: a chain of one for each would keep them all alive. It stays after the
    last group has closed, since the launcher wants to know of a later exception as well.
    """

    def __init__(self, previous: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self.pid = os.getpid()
        self.rank = 0
        """Of the group that came last, or of the start that failed."""
        self.groups: list[Abortable] = []
        """The groups that are open."""
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        written = False
        if os.getpid() == self.pid:  # not in a child that was forked later
            path = os.environ.get(ERROR_FILE)
            written = path is not None and write(path, describe(self.rank, error))
            for group in tuple(self.groups):  # aborting takes a group out of the list
                cause = failure_of(error, group.rank) if isinstance(error, Timeout) else error
                if isinstance(cause, PeerFailed):
                    group.abort(cause.reason, cause.rank)
                else:
                    group.abort(summarize(error))
        if not written or self._previous is not sys.__excepthook__:
            self._previous(kind, error, trace)
