"""What is known about ranks that failed, and which of them was the cause.

When one rank fails, the others soon fail too, because they waited for it. A survivor's PeerFailed can be reported
long before the end of the rank that it blames is noticed, so the order of reports alone does not say who began.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from echelon.errors import CollectiveMismatch, PeerFailed


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
