"""The exceptions that Echelon raises.

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
    ├── DeadlockError        (RuntimeError)        the program: every rank waits for another
    ├── PeerFailed           (ConnectionError)     the world: another rank died or gave up
    ├── ConnectError         (ConnectionError)     the world: a rank never came
    ├── AuthenticationError  (ConnectionError)     the world: a peer without the secret
    ├── ProtocolError        (ConnectionError)     the world: a peer that speaks something else
    └── Timeout              (TimeoutError)        the world or you: it took too long

Each is also the nearest builtin, so `except TimeoutError` and `except ValueError` work.

Pure.
"""

from __future__ import annotations

from typing import TypeAlias


class EchelonError(Exception):
    """The base of every exception that Echelon raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the class again with the finished message alone.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[EchelonError], args: tuple[object, ...], state: dict[str, object]) -> EchelonError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidArgument(EchelonError, TypeError, ValueError):
    """An argument of another type than the call takes, or a value that it cannot have."""


class InvalidRank(EchelonError, ValueError):
    """A rank that is not in the group."""

    def __init__(self, rank: object, world_size: int, what: str = "rank") -> None:
        self.rank = rank
        self.world_size = world_size
        kind = "" if isinstance(rank, int) else "an int, "
        super().__init__(
            f"{what}={rank!r} is not a rank of this group of {world_size}: use {kind}0 to {world_size - 1}"
        )


class InvalidWorldSize(EchelonError, ValueError):
    """A number of ranks that cannot be, or that does not match the layout asked for."""


class SelfSend(EchelonError, ValueError):
    """A message that a rank addressed to itself."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} cannot send to itself or receive from itself: keep the tensor instead")


class SizeMismatch(EchelonError, ValueError):
    """A tensor that does not fit the place it is meant for. The connection stays usable."""

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
    """Ranks that called different collectives, the same one with different arguments, or not as many."""

    def __init__(self, message: str, rank: int | None = None, theirs: str = "", *, departed: int | None = None) -> None:
        """Says that `rank` of the world, if it is known which, is in `theirs`, where this rank is in something else.

        A rank that `departed` has closed its group instead of making the call.
        """
        self.rank = rank
        self.theirs = theirs
        self.departed = departed
        super().__init__(message)

    def noticed_by(self, operation: str) -> CollectiveMismatch:  # noqa: ARG002
        """Returns it as an operation raises it: anew."""
        return CollectiveMismatch(str(self), self.rank, self.theirs, departed=self.departed)

    def told_by(self, rank: int) -> CollectiveMismatch:  # noqa: ARG002
        """Returns it as other ranks hear it from `rank`: unchanged."""
        return self


class Closed(EchelonError, RuntimeError):
    """A group or backend that this rank has closed or aborted, or a pipeline that ended with a failure."""


class UnsupportedOp(EchelonError, NotImplementedError):
    """An operation that this backend cannot do with this dtype or device."""


class ScheduleError(EchelonError, ValueError):
    """A pipeline schedule that cannot run. Lists every problem found."""


class PlanError(EchelonError, ValueError):
    """A collective's plan or algorithm that cannot run. Lists every problem found."""


class PartitionError(EchelonError, ValueError):
    """A model that cannot be cut into the stages asked for."""


class NotFinite(EchelonError, ArithmeticError):
    """A loss that is infinite or not a number."""


class LaunchError(EchelonError, ValueError):
    """A job that cannot be started as asked: environment variables, a script, a function or a backend's name."""


class FileError(EchelonError, OSError):
    """A file that cannot be written or read, with its path and the folder that is missing."""


class DeadlockError(EchelonError, RuntimeError):
    """Every rank waits for another one."""


class PeerFailed(EchelonError, ConnectionError):
    """Another rank died, closed its connections or left with an exception."""

    def __init__(self, rank: int, reason: str, operation: str = "", *, has_closed: bool = False) -> None:
        """Says which rank of the world failed, why, and during which operation of this rank it was noticed.

        A rank that `has_closed` its group has not failed: it has made fewer calls than this one.
        """
        self.rank = rank
        self.reason = reason
        self.operation = operation
        self.has_closed = has_closed
        super().__init__(f"rank {rank} failed: {reason}" + (f" (noticed by {operation})" if operation else ""))

    def noticed_by(self, operation: str) -> PeerFailed:
        """Returns it as an operation of this rank raises it."""
        return PeerFailed(self.rank, self.reason, operation)

    def told_by(self, rank: int) -> PeerFailed:
        """Returns it as other ranks hear it from `rank`."""
        return self if rank == self.rank else PeerFailed(self.rank, f"{self.reason} (told by rank {rank})")


class ConnectError(EchelonError, ConnectionError):
    """The ranks did not all find each other in time."""


class AuthenticationError(EchelonError, ConnectionError):
    """A peer that could not prove that it knows the secret of this job."""


class ProtocolError(EchelonError, ConnectionError):
    """A peer that sent what Echelon does not send: another version, or something else altogether."""


class Timeout(EchelonError, TimeoutError):
    """An operation that did not finish in the time it was given."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        """Says that these ranks of the world were waited for: they are late, or do not answer. Empty: not known."""
        self.ranks = ranks
        super().__init__(message)


Failure: TypeAlias = PeerFailed | CollectiveMismatch
"""What ends the collectives of a group on all its ranks."""


def without_frames(error: BaseException) -> BaseException:
    """Removes the traceback of a failure, which is kept and raised at each later call; returns the same error.

    The traceback would grow by the frames of each call, and keep their tensors alive. Other errors stay as they are.
    """
    if isinstance(error, PeerFailed | CollectiveMismatch):
        error.__traceback__ = None
    return error


def failure_of(error: BaseException, rank: int) -> PeerFailed:
    """Returns an error of a rank as the other ranks are to hear it.

    A rank whose time is up has not failed. If it has waited for one rank only, that rank is the cause.
    """
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, Timeout) and len(error.ranks) == 1:
        return PeerFailed(error.ranks[0], f"it kept rank {rank} waiting, which gave up: {error}")
    return PeerFailed(rank, reason)
