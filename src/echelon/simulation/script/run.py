"""Run of a script on simulated ranks, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from echelon.call_site import is_own, shortened
from echelon.errors import DeadlockError, EchelonError, status_of
from echelon.launch.output import Console
from echelon.launch.report import describe, folded, unwrapped
from echelon.launch.run import Program
from echelon.simulation.run import Simulation, simulate
from echelon.simulation.script.script import Script


@dataclass(frozen=True)
class Failure:
    """Failure of a script on simulated ranks.

    status: exit status. rank: rank that has failed first, None if the world has, as by a deadlock. text: error without
    its traceback. traceback: empty if the text says all. error_type: class of the exception, empty if there is none.
    """

    status: int
    rank: int | None
    text: str
    traceback: str = ""
    error_type: str = ""

    def to_json(self) -> dict[str, object]:
        """Returns the failure as plain values: `status` is "deadlock", or "failed" for any other error."""
        status = "deadlock" if self.error_type == DeadlockError.__name__ else "failed"
        return {"status": status, "failed_rank": self.rank, "error_type": self.error_type, "error": self.text}


@dataclass(frozen=True)
class Outcome:
    """Outcome of a script: its simulation, or its failure."""

    simulation: Simulation | None
    failure: Failure | None = None


def run_script(program: Program, world_size: int, console: Console, **options: Any) -> Outcome:
    """Runs a script as the ranks of a simulated world. Blocks until all have ended.

    Args:
        program: script or module.
        world_size: number of ranks.
        console: destination of the ranks' output.
        options: further arguments of `simulate`.

    Raises:
        EchelonError: an argument is invalid. No rank has begun.
        OSError: the output cannot be written. BrokenPipeError: its reader has gone.
        KeyboardInterrupt: Ctrl-C. Its note says where each rank was.
    """
    script = Script(program, console)
    try:
        with script.installed():
            simulation = simulate(script, world_size, **options)
    except BaseException as error:
        script.check_output()
        is_of_rank = any(error is each for each in script.errors.values())  # such as a KeyboardInterrupt that it raised
        if not script.has_begun or not (is_of_rank or isinstance(error, Exception)):
            raise
        return Outcome(None, failure_of(error, script))
    return Outcome(simulation)


def failure_of(error: BaseException, script: Script) -> Failure:
    """Returns the failure of a script whose simulation has raised `error`."""
    cause = error.__cause__ if isinstance(error.__cause__, SystemExit) else error
    # The simulation may raise an error of its own for that of the rank.
    raised = (error, error.__cause__)
    rank = next((rank for rank, own in script.errors.items() if any(own is each for each in raised)), None)
    if rank is None:  # the world's, such as a deadlock
        name = type(error).__name__
        return Failure(1, None, shortened(f"{name}: {error}"), error_type=name)
    cause = unwrapped(cause)
    name = type(cause).__name__
    cause.__traceback__ = _of_user(cause)
    described = describe(rank, cause)
    where = f" ({shortened(described.where)})" if described.where else ""
    if isinstance(cause, SystemExit):
        return Failure(status_of(cause.code), rank, f"rank {rank} {described.summary}{where}", error_type=name)
    if isinstance(cause, EchelonError):  # says what happened and what to do
        where = "" if described.where in str(cause) else where
        return Failure(1, rank, shortened(f"rank {rank} raised {name}: {cause}") + where, error_type=name)
    if isinstance(cause, SyntaxError) and not described.where:  # the script's own: the same on all ranks
        # Without a line if the file holds null characters.
        line = f":{cause.lineno}" if cause.lineno else ""
        place = f"{cause.filename}{line}: " if cause.filename else ""
        line = f": {cause.text.strip()}" if cause.text else ""
        return Failure(1, None, shortened(f"{place}{name}: {cause.msg}{line}"), error_type=name)
    hint = described.hint and f": {described.hint}"
    return Failure(1, rank, f"{described}{where}{hint}", folded(_without_notes(cause)), name)


def _of_user(error: BaseException) -> TracebackType | None:
    """Returns the traceback of an error without the calls that led to the script."""
    trace = error.__traceback__
    while trace is not None and _leads_to_script(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    # Without a frame of the script it is a mistake in the source, or one of Echelon.
    return error.__traceback__ if trace is None and not isinstance(error, SyntaxError) else trace


def _leads_to_script(path: str) -> bool:
    return is_own(path) or path.startswith("<frozen importlib")


def _without_notes(error: BaseException) -> BaseException:
    """Removes the note with the rank, which stands before the traceback. Keeps the notes of the program."""
    notes = getattr(error, "__notes__", [])
    notes[:] = [note for note in notes if not note.startswith("raised on rank ")]
    return error
