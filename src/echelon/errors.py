"""Exceptions of Echelon.

The type says who is to blame, the fields say where, the message says what happened and what to do:

    EchelonError
    ├── InvalidArgument      (TypeError, ValueError)  you: an argument that the call does not take
    ├── InvalidRank          (ValueError)          you: a rank outside the group
    ├── InvalidWorldSize     (ValueError)          you: a world that cannot be
    ├── SelfSend             (ValueError)          you: a message to yourself
    ├── SizeMismatch         (ValueError)          you: the message does not fit where it is received
    ├── CollectiveMismatch   (RuntimeError)        you: ranks called different operations
    ├── Closed               (RuntimeError)        you: used after its end
    ├── UnsupportedOp        (NotImplementedError) you: not on this backend, dtype or device
    ├── ScheduleError        (ValueError)          you: a pipeline schedule that cannot run
    ├── PlanError            (ValueError)          you: a collective plan that cannot run
    ├── PartitionError       (ValueError)          you: a model that cannot be cut that way
    ├── NotFinite            (ArithmeticError)     the numbers: a loss that is infinite or not a number
    ├── LaunchError          (ValueError)          you: a job that cannot be started that way
    ├── FileError            (OSError)             you: a file that cannot be written or read
    ├── CheckpointError      (RuntimeError)        the files: a damaged checkpoint, or a save that failed
    ├── DeadlockError        (RuntimeError)        the program: every rank waits for another
    ├── PeerFailed           (ConnectionError, RuntimeError) the world: another rank died or gave up
    ├── ConnectError         (ConnectionError)     the world: a rank never came
    ├── AuthenticationError  (ConnectionError)     the world: a peer without the secret
    ├── ProtocolError        (ConnectionError)     the world: a peer that speaks something else
    └── Timeout              (TimeoutError, RuntimeError) the world or you: it took too long

Each also derives from the closest builtin, so `except TimeoutError` and `except ValueError` work.

Pure.
"""

from __future__ import annotations

import os
import re
from typing import TypeAlias


class EchelonError(Exception):
    """Base of all exceptions of Echelon."""

    raised_on: int | None = None
    """The world's rank whose error this one repeats. None: the error is this rank's own."""

    def __reduce__(self) -> tuple[object, ...]:
        # Pickling's default calls the class with the finished message alone, which most __init__ here do not take.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[EchelonError], args: tuple[object, ...], state: dict[str, object]) -> EchelonError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidArgument(EchelonError, TypeError, ValueError):
    """Argument of a wrong type or value."""


class InvalidRank(EchelonError, ValueError):
    """Rank outside the group."""

    def __init__(self, rank: object, world_size: int, what: str = "rank", advice: str = "") -> None:
        self.rank = rank
        self.world_size = world_size
        kind = "" if isinstance(rank, int) else "an int, "
        ranks = "0" if world_size == 1 else f"0 to {world_size - 1}"
        text = repr(rank) if isinstance(rank, int | str) else f"<{type(rank).__name__}>"
        super().__init__(f"{what}={text} is not a rank of this group of {world_size}: use {kind}{ranks}{advice}")


class InvalidWorldSize(EchelonError, ValueError):
    """Impossible number of ranks, or one that does not match the requested layout."""


class SelfSend(EchelonError, ValueError):
    """Message that a rank addressed to itself."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} cannot send to itself or receive from itself: keep the tensor instead")


class SizeMismatch(EchelonError, ValueError):
    """Tensor that does not fit its destination. The connection stays usable."""

    def __init__(
        self,
        expected: object,
        got: object,
        what: str = "",
        advice: str = "make both sides agree on shape and dtype",
    ) -> None:
        self.expected = expected
        self.got = got
        where = f"{what}: " if what else ""
        super().__init__(f"{where}expected {expected}, got {got}: {advice}")


class CollectiveMismatch(EchelonError, RuntimeError):
    """Disagreement of ranks: different collectives, different arguments, or different numbers of calls."""

    def __init__(self, message: str, rank: int | None = None, theirs: str = "", *, departed: int | None = None) -> None:
        """Records the disagreement.

        Args:
            message: the text of the exception.
            rank: the world's rank that differs; None: unknown.
            theirs: operation of that rank.
            departed: rank that has closed its group instead of making the call.
        """
        self.rank = rank
        self.theirs = theirs
        self.departed = departed
        super().__init__(message)

    def noticed_by(self, operation: str) -> CollectiveMismatch:  # noqa: ARG002
        """Returns a copy for an operation to raise, without the traceback of earlier raises."""
        return CollectiveMismatch(str(self), self.rank, self.theirs, departed=self.departed)

    def told_by(self, rank: int) -> CollectiveMismatch:  # noqa: ARG002
        """Returns the error that other ranks raise when `rank` reports it: the same."""
        return self


class Closed(EchelonError, RuntimeError):
    """Use of a group or backend that this rank has closed or aborted, or of a pipeline that has failed."""


class UnsupportedOp(EchelonError, NotImplementedError):
    """Operation that the backend does not support for this dtype or device."""


class ScheduleError(EchelonError, ValueError):
    """Pipeline schedule that cannot run. The message lists the problems, of many alike the first."""


class PlanError(EchelonError, ValueError):
    """Collective plan or algorithm that cannot run. The message lists the problems, of many alike the first."""


class PartitionError(EchelonError, ValueError):
    """Model that cannot be cut into the requested stages."""


class NotFinite(EchelonError, ArithmeticError):
    """Loss that is infinite or not a number."""


class LaunchError(EchelonError, ValueError):
    """Job that cannot be started: wrong environment variables, script, function or backend name."""


class FileError(EchelonError, OSError):
    """File that cannot be written or read. The message has its path and a missing folder."""


class CheckpointError(EchelonError, RuntimeError):
    """Checkpoint that is damaged, incomplete or of a newer version, or that could not be saved."""


class DeadlockError(EchelonError, RuntimeError):
    """Deadlock: every rank waits for another one."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        """Records the world's ranks that wait for each other. Empty: unknown."""
        self.ranks = ranks
        super().__init__(message)


class PeerFailed(EchelonError, ConnectionError, RuntimeError):
    """Failure of another rank: it died, closed its connections or left with an exception.

    A RuntimeError too, as programs of torch.distributed expect.
    """

    def __init__(self, rank: int, reason: str, operation: str = "", *, has_closed: bool = False) -> None:
        """Records the failure.

        Args:
            rank: the world's rank that failed.
            reason: the cause, as the end of a sentence about it.
            operation: this rank's operation during which it was noticed.
            has_closed: the rank has not failed: it closed its group after fewer calls than this rank.
        """
        self.rank = rank
        self.reason = reason
        self.operation = operation
        self.has_closed = has_closed
        super().__init__(f"rank {rank} failed: {reason}" + (f" (noticed by {operation})" if operation else ""))

    def noticed_by(self, operation: str) -> PeerFailed:
        """Returns a copy for an operation of this rank to raise."""
        return PeerFailed(self.rank, self.reason, operation)

    def told_by(self, rank: int) -> PeerFailed:
        """Returns the error that other ranks raise when `rank` reports it."""
        return self if rank == self.rank else PeerFailed(self.rank, f"{self.reason} (reported by rank {rank})")


class ConnectError(EchelonError, ConnectionError):
    """Rendezvous that not all ranks reached in time."""


class AuthenticationError(EchelonError, ConnectionError):
    """Peer that could not prove that it knows the secret of this job."""


class ProtocolError(EchelonError, ConnectionError):
    """Peer that violates the protocol: another version of Echelon, or another program."""


class Timeout(EchelonError, TimeoutError, RuntimeError):
    """Operation that did not finish within its timeout.

    A RuntimeError too, as programs of torch.distributed expect.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        """Records the world's ranks that were waited for, which are late or do not answer. Empty: unknown."""
        self.ranks = ranks
        super().__init__(message)


Failure: TypeAlias = PeerFailed | CollectiveMismatch
"""Errors that revoke a group: its collectives fail on all ranks."""


def inherited_error(what: str, owner: int) -> Closed:
    """Makes the error for the use of a group or backend of process `owner` in its forked child.

    The child has neither the threads nor the connections of its parent.
    """
    return Closed(
        f"{what} belongs to process {owner}, and this is its forked child {os.getpid()}: communicate in the parent, "
        "start the child by 'spawn', or make a group of the child's own with echelon.init()"
    )


def without_frames(error: BaseException) -> BaseException:
    """Removes the traceback of a failure and returns the same error. Other errors stay as they are.

    A failure is kept and raised at each later call. Its traceback would grow by the frames of each call, and keep their
    tensors alive.
    """
    if isinstance(error, PeerFailed | CollectiveMismatch):
        error.__traceback__ = None
    return error


def failure_of(error: BaseException, rank: int) -> PeerFailed:
    """Returns the error that other ranks raise when `rank` fails with `error`.

    A rank that timed out has not failed. If it waited for one rank only, that rank is the cause.
    """
    reason = with_type(error)
    # With several, or none, nobody knows which of them is late.
    if isinstance(error, Timeout) and len(error.ranks) == 1:
        return PeerFailed(error.ranks[0], f"it kept rank {rank} waiting, which gave up: {error}")
    return PeerFailed(rank, reason)


def status_of(code: object) -> int:
    """Returns the exit status that Python gives a process which ends with `SystemExit(code)`."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1  # the kernel keeps 8 bits


def fails(error: BaseException | None) -> bool:
    """Whether a rank that leaves with this exception has failed. False for `sys.exit(0)` and for None."""
    if isinstance(error, SystemExit):
        return status_of(error.code) != 0
    return error is not None


def describe_exit_of(code: object) -> str:
    """Returns the end of a sentence about a rank that called `sys.exit(code)`: "exited with status 1: no data"."""
    # One line: the reason travels in a message, and stands in the middle of a sentence.
    text = one_line(str(code)) if code is not None and not isinstance(code, int) else ""
    return f"exited with status {status_of(code)}" + (f": {text}" if text else "")


def reason_of(error: BaseException) -> str:
    """Returns in one line why a rank left with an exception, as its peers report it."""
    return f"it {describe_exit_of(error.code)}" if isinstance(error, SystemExit) else summarize(error)


def message_of(error: BaseException) -> str:
    """Returns the message of an exception. Of one that has none, since its `__str__` fails, a text that says so."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"  # as in Python's own tracebacks


def with_type(error: BaseException) -> str:
    """Returns the type of an exception and its whole message: "ValueError: no". Its type alone if it has none."""
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def summarize(error: BaseException) -> str:
    """Returns in one line the type of an exception and the beginning of its message."""
    # The further lines of Echelon's own errors are lists and pictures.
    message = str(error).partition("\n")[0] if isinstance(error, EchelonError) else one_line(message_of(error))
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


_LONGEST_SUMMARY = 300
"""Most characters of a paragraph in a message, unless its first line alone is longer."""


def one_line(text: str) -> str:
    """Returns the first paragraph of a text as one line, cut if it is long."""
    lines = [line.strip() for line in re.split(r"\n[ \t]*\n", text.strip(), maxsplit=1)[0].splitlines()]
    most = max(_LONGEST_SUMMARY, len(lines[0])) if lines else 0
    joined = " ".join(lines)
    return joined if len(joined) <= most else f"{joined[:most]}..."
