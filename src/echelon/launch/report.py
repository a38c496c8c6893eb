"""Failures of ranks: records, the choice of the first cause, and the hooks by which a process reports its own end.

`echelon run` gives each rank a file name in ECHELON_ERROR_FILE. A rank that ends with an uncaught exception writes it
there instead of printing it, so that the launcher can print the first cause first and the consequences after it.

When one rank fails, the others soon fail too, because they waited for it. A survivor's PeerFailed can be reported long
before the end of the rank that it blames is noticed, so the order of reports alone does not show the cause.

Python forgets a SystemExit before the functions of `atexit` run, and `sys.excepthook` never sees it. So a wrapper of
`sys.exit` keeps the argument of its last call. `raise SystemExit(3)` without `sys.exit` is not detected. Such a rank
leaves like one that closes its group.
"""

from __future__ import annotations

import dataclasses
import dis
import gc
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from echelon.call_site import is_foreign, is_own
from echelon.errors import (
    CollectiveMismatch,
    DeadlockError,
    EchelonError,
    LaunchError,
    PeerFailed,
    Timeout,
    describe_exit_of,
    failure_of,
    message_of,
    status_of,
    summarize,
)
from echelon.hint import hint_of
from echelon.launch import whereabouts
from echelon.launch.advice import advise
from echelon.launch.at_start import sitecustomize as at_start
from echelon.wording import counted, listed

if TYPE_CHECKING:
    from echelon.group.group import ProcessGroup


@dataclass(frozen=True)
class RankFailure:
    """Failure of one rank.

    at: seconds on the clock of `time.monotonic`, which all processes of one host share. summary: one line. traceback:
    text, empty if the rank left none. where: the innermost line of the user's own code, as "file:line", or empty.
    blames: the rank whose failure caused this one, None if the failure is the rank's own. status: the exit status to
    pass on. consequence: a shorter summary, for a reader who has seen the failure of a rank of consequence_of. hint:
    advice and shapes that follow the summary.
    """

    rank: int
    at: float
    summary: str
    traceback: str = ""
    where: str = ""
    blames: int | None = None
    status: int = 1
    consequence: str = ""
    consequence_of: Sequence[int] = ()
    hint: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.summary}"

    @property
    def placed(self) -> str:
        """The summary with the line of the user's code, named once."""
        named = self.where in (word.strip("(),:;") for word in self.summary.split())
        return f"{self.summary} ({self.where})" if self.where and not named else self.summary

    @property
    def hinted(self) -> str:
        """The summary with its line and the hint."""
        return f"{self.placed}{self.hint and f': {self.hint}'}"

    @property
    def brief(self) -> str:
        """The summary for a reader who has seen it: a long text is left out, and its hint is not."""
        if not self.long_text:
            return self.hinted
        where = f" ({self.where})" if self.where else ""
        return f"{self.summary.partition(': ')[0]}{where}, see above{self.hint and f': {self.hint}'}"

    @property
    def long_text(self) -> str:
        """Text of the error that is too long to be printed twice. Empty if it is short."""
        text = self.summary.partition(": ")[2]
        return text if len(text) > _LONG else ""

    @property
    def kind(self) -> str:
        """Beginning of the summary: the type of the error."""
        return self.summary.partition(":")[0]

    def told_once(self, report: str, *, is_told: bool = False) -> str:
        """Returns a report that follows this failure's summary, without its long text.

        Args:
            report: a traceback, or the summary of another failure.
            is_told: whether to leave out a short text as well.
        """
        text = self.summary.partition(": ")[2] if is_told else self.long_text
        if not text:
            return report
        # The summary is one line, and a message may have several. After ": ", since a line of the source may have it.
        lines = r"\s+".join(map(re.escape, text.split()))
        return re.sub(rf"(?<=: ){lines}", "see above", report)


_LONG = 150
"""Characters of an error's text from which on it is printed once: about a line and a half of a terminal."""
GRACE = 3.0
"""Seconds that the other ranks get to report after the first failure."""
_NOTICED_LATE = 1.0
"""Seconds by which a kill may be noticed late: survivors on a busy host report before the launcher sees the process."""


def first_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """Returns the earliest failure that blames no other rank. The earliest of all if each blames one."""
    return min(failures, key=lambda failure: (failure.blames is not None, _began(failure)))


def are_alike(failures: Collection[RankFailure], num_ranks: int) -> bool:
    """Whether all ranks of a job have failed in the same way, each by itself. None of them is then the cause."""
    has_failed_alone = all(failure.blames is None for failure in failures)
    # A mismatch is told to all ranks alike, which raise it at their own lines.
    ways = {(failure.summary, failure.where) for failure in failures}
    return len(failures) == num_ranks > 1 and has_failed_alone and len(ways) == 1


def consequences(cause: RankFailure, others: Iterable[RankFailure]) -> list[str]:
    """Returns a line for each kind of failure after `cause`, without repeating the cause."""
    ranks: dict[str, list[int]] = {}
    for failure in others:
        # A mismatch has two sides: each rank may name the other one, or tell both alike.
        names = cause.rank in failure.consequence_of or failure.rank in cause.consequence_of
        # A rank may have caught the error that the others name, and failed by another one.
        is_known = names and (failure.blames is not None or failure.kind == cause.kind)
        is_told = failure.blames == cause.rank
        told = cause.told_once(failure.placed, is_told=is_told)
        text = failure.consequence if failure.consequence and (is_known or failure.summary == cause.summary) else told
        ranks.setdefault(text, []).append(failure.rank)
    return [f"{listed(alike)} {text}" for text, alike in ranks.items()]


def _began(failure: RankFailure) -> float:
    # torch's C++ keeps only the text of an error that comes by a future, so a survivor may seem to blame nobody.
    is_kill = failure.status > 128 and not failure.traceback
    return failure.at - _NOTICED_LATE if is_kill else failure.at


def describe_exit(returncode: int) -> str:
    """Describes the end of a process, such as "was killed by SIGKILL" or "exited with status 3".

    Args:
        returncode: as in `subprocess.Popen`: negative means the number of a signal.
    """
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-returncode}"
    return f"was killed by {name}"


def exit_status(returncode: int) -> int:
    """Returns the status that a shell shows for `returncode`: 128 + signal for a killed process."""
    return returncode if returncode >= 0 else 128 - returncode


def blamed_rank(error: BaseException) -> int | None:
    """Returns the rank that failed or departed according to the chain of `error`. None if it names none."""
    # Down the chain: a program may have wrapped our error in its own. It is a cycle if one error was raised twice.
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, PeerFailed):
            return current.rank
        if isinstance(current, CollectiveMismatch) and current.departed is not None:
            return current.departed
        if isinstance(current, EchelonError) and current.raised_on is not None:
            return current.raised_on
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return None


ERROR_FILE = at_start.ERROR_FILE


def describe(rank: int, error: BaseException) -> RankFailure:
    """Returns the failure record of `error`, raised on this rank just now. A known error gets a note of advice."""
    error = unwrapped(error)
    advise(error)
    frames = traceback.extract_tb(error.__traceback__)
    # The user's line, not the innermost one, which lies inside of Echelon or torch.
    own = [frame for frame in frames if not is_foreign(frame.filename)]
    where = f"{own[-1].filename}:{own[-1].lineno}" if own else ""
    consequence, consequence_of = _as_consequence(error, rank, where)
    return RankFailure(
        rank=rank,
        at=time.monotonic(),
        summary=describe_exit_of(error.code) if isinstance(error, SystemExit) else f"raised {summarize(error)}",
        # The summary of a LaunchError says all: what is missing, the cure, and the line of the program.
        traceback="" if isinstance(error, LaunchError) else folded(error),
        where=where,
        blames=None if isinstance(error, SystemExit) else blamed_rank(error),
        status=status_of(error.code) if isinstance(error, SystemExit) else 1,
        consequence=consequence,
        consequence_of=consequence_of,
        hint=hint_of(error),
    )


def _as_consequence(error: BaseException, rank: int, where: str) -> tuple[str, Sequence[int]]:
    """Returns a summary for readers of another rank's failure, which `error` repeats, and the ranks with such a one."""
    if isinstance(error, PeerFailed) and error.operation:
        # The operation begins with the rank: "rank 0 in barrier", "rank 0, waiting for the input of stage 1".
        return f"failed{error.operation.removeprefix(f'rank {rank}')}", (error.rank,)
    if isinstance(error, CollectiveMismatch | DeadlockError):
        ranks = error.ranks if isinstance(error, DeadlockError) else () if error.rank is None else (error.rank,)
        return f"raised {type(error).__name__}, too{f' ({where})' if where else ''}", ranks
    return "", ()


def folded(error: BaseException) -> str:
    """Returns the traceback of `error` and its causes, with Echelon's own frames counted instead of shown.

    The frames are shown if they lead to an exception that Echelon does not raise on purpose, which is a defect of
    Echelon.
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
    """Replaces each run of Echelon's own frames by one line."""
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
    """Writes `failure` to `path`. True if it could be written."""
    try:
        _put(path, dataclasses.asdict(failure))
    except OSError:
        return False
    return True


def _put(path: str, values: dict[str, Any]) -> None:
    # Renamed when complete: the launcher reads the file while this rank is still running.
    partial = f"{path}.{os.getpid()}"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(values, file)
    os.replace(partial, path)


def read(path: str) -> RankFailure | None:
    """Returns the failure that a rank wrote to `path`. None if there is no file."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
            return RankFailure(**{**found, "consequence_of": tuple(found["consequence_of"])})
    except FileNotFoundError:
        return None


def note_checkpoint(step: int, path: str) -> None:
    """Tells the launcher that a checkpoint is on disk. Does nothing without a launcher."""
    if error_file := os.environ.get(ERROR_FILE):
        # A writer in the background outlives the launcher, and so the folder of these files.
        with suppress(OSError):
            _put(_checkpoint_file(error_file), {"step": step, "path": path})


def noted_checkpoint(error_file: str) -> tuple[int, str] | None:
    """Returns step and folder of the last checkpoint of a rank with this error file. None if it wrote none."""
    try:
        with open(_checkpoint_file(error_file), encoding="utf-8") as file:
            noted = json.load(file)
    except FileNotFoundError:
        return None
    return noted["step"], noted["path"]


def _checkpoint_file(error_file: str) -> str:
    return f"{error_file}.checkpoint"


@contextmanager
def reported_start() -> Iterator[None]:
    """Inside, an exception that nobody catches is reported to the launcher, which learns that this rank has a group.

    There is no group yet whose peers could be notified, so they detect the failure themselves.
    """
    if path := os.environ.get(ERROR_FILE):
        whereabouts.note_group(path)
    try:
        yield
    except BaseException:
        rank = os.environ.get("RANK", "")
        if os.environ.get(ERROR_FILE) and rank.isdecimal():
            _installed().rank = int(rank)
        raise


def report_uncaught(group: ProcessGroup) -> Callable[[], None]:
    """Makes an uncaught exception of this process abort `group` and reach the launcher.

    The peers then fail with the reason, instead of a lost connection. The reason names the rank that failed first,
    which need not be this one. Without a launcher the exception is printed as usual. An excepthook installed before is
    still called. One installed later replaces this one, unless it calls it.

    Returns:
        A function that removes the group again. It must be called when the group is closed. Until then the group is
        kept alive, so that an exception reaches the peers even if the program dropped its own reference.
    """
    hook = _installed()
    hook.rank = group.rank
    hook.groups.append(group)

    def forget() -> None:
        if group in hook.groups:
            hook.groups.remove(group)

    return forget


def advise_on_uncaught() -> None:
    """Has a known exception that nobody catches get a note of advice. For a rank without a launcher."""
    _installed()


def _installed() -> _Hook:
    """Returns the excepthook of this process, and installs it first if there is none."""
    # A forked child inherits its parent's hook, which belongs to the parent's rank.
    hook = sys.excepthook
    if not isinstance(hook, _Hook) or hook.pid != os.getpid():
        hook = sys.excepthook = _Hook(hook)
        if path := os.environ.get(ERROR_FILE):
            whereabouts.note_group(path)
    return hook


class _Hook:
    """Excepthook of this process, for all its open groups, and for a failed start.

    One hook for all groups, because a chain with one hook per group would keep them all alive. It stays after the last
    group has closed, so that a later exception is still reported to the launcher.
    """

    def __init__(self, previous: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self.pid = os.getpid()
        self.rank = 0
        """Rank in the latest group, or of the failed start."""
        self.groups: list[ProcessGroup] = []
        """Open groups."""
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        written = False
        advise(error)
        if os.getpid() == self.pid:  # not in a child that was forked later
            path = os.environ.get(ERROR_FILE)
            written = path is not None and write(path, describe(self.rank, error))
            inner = unwrapped(error)
            for group in tuple(self.groups):  # a copy: aborting a group removes it from the list
                # A Timeout is the fault of the rank that was waited for, not of this one.
                cause = failure_of(inner, group.rank) if isinstance(inner, Timeout) else inner
                if isinstance(cause, PeerFailed):
                    group.abort(cause.reason, cause.rank)
                else:
                    group.abort(summarize(inner))
        # The launcher prints the report. The default hook would print it a second time; a user's hook does more.
        if not written or self._previous is not sys.__excepthook__:
            self._previous(kind, error, trace)


class ExitWatch:
    """Replacement of `sys.exit`. One per process, and for good: other code may hold a reference to it."""

    def __init__(self) -> None:
        self._exit = sys.exit
        self._frame = _outermost_frame()
        self._code: object = None

    def __call__(self, status: object = None, /) -> NoReturn:
        """Raises SystemExit, as `sys.exit` does."""
        if threading.current_thread() is threading.main_thread():  # in another thread it ends that thread only
            self._code = status
        self._exit(status)  # type: ignore[arg-type]

    def code(self) -> object:
        """Returns the argument of the `sys.exit` that ends the program. None if the program ends in another way."""
        return self._code if _was_unwound(self._frame) else None


def watch_exit() -> ExitWatch:
    """Installs the wrapper of `sys.exit` if there is none yet. Returns the installed one."""
    current: object = sys.exit
    if isinstance(current, ExitWatch):
        return current
    watch = ExitWatch()
    sys.exit = watch
    return watch


def _outermost_frame() -> FrameType | None:
    """Returns the main thread's outermost frame. None if there is no such frame."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


# A program may catch the SystemExit and go on. The outermost frame distinguishes the two cases: its last instruction is
# a return unless an exception has ended it.
def _was_unwound(frame: FrameType | None) -> bool:
    if frame is None:
        return False
    # By prefix: CPython 3.12 added RETURN_CONST beside RETURN_VALUE.
    return not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


_PLACES = "\n\nAt:\n"
"""Words before the places in the text of such a RuntimeError."""


def unwrapped(error: BaseException) -> BaseException:
    """Returns a copy of the error of Echelon that `error` repeats, with the traceback and notes of `error`.

    torch's C++ keeps the text of a Python exception alone, after words of its own and before lines "At:". The exception
    itself is still held by the future that failed, and so it is found among the objects of this process. Returns
    `error` itself if it repeats none.
    """
    text = message_of(error)
    if type(error) is not RuntimeError or _PLACES not in text:
        return error
    text = text.partition(_PLACES)[0]
    # By type(), since isinstance asks values of the user for their class.
    alive = [each for each in gc.get_objects() if issubclass(type(each), EchelonError)]
    for inner in alive:
        if text.endswith(f"{type(inner).__name__}: {message_of(inner)}"):
            make, arguments = inner.__reduce__()[:2]
            copy: EchelonError = make(*arguments)
            copy.__notes__ = [*getattr(inner, "__notes__", ()), *getattr(error, "__notes__", ())]
            return copy.with_traceback(error.__traceback__)
    return error
