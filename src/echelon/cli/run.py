"""`echelon run`: launcher of a program's ranks on this host."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, BinaryIO, TextIO, cast

import typer

from echelon.cli.misplaced import no_ranks, note_misplaced
from echelon.cli.output import AboveProgress
from echelon.errors import LaunchError
from echelon.launch.output import Console, MarkedStream
from echelon.launch.report import GRACE
from echelon.launch.run import Program
from echelon.launch.run import run as run_program
from echelon.launch.status_line import StatusLine, is_terminal

if TYPE_CHECKING:
    from echelon.simulation.script.run import Failure


def run(
    program: Annotated[str, typer.Argument(metavar="SCRIPT", help="Script to run; with -m a module.")],
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--num-ranks", metavar="COUNT", help="Number of ranks to start.  [required]")
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run a module, like python -m.")] = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Leave out the line on ranks, threads and backend.")
    ] = False,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time for other ranks to report after the first failure.")
    ] = GRACE,
) -> int:
    """Runs a script on several ranks of this host.

    Writes a line on ranks, threads and backend to stderr, and at the end the first cause of a failure. Marks each line
    of output with its rank. When a rank fails, the others are ended, and the exit status is that of the first failed
    rank. Ctrl-C and SIGTERM end all ranks, and print where they were. Options go before SCRIPT; words after it are
    passed to the script.
    """
    # Not typer's own error, which would not show the -n that stands after the script.
    if num_ranks is None:
        raise LaunchError(no_ranks(run, program, args or [], is_module=module))
    shown = _with_bars(console())
    if not quiet:
        note_misplaced(shown, run, program, args or [])
    return run_program(
        Program(program, tuple(args or ()), is_module=module), num_ranks, shown, os.environ, grace, tells=not quiet
    )


def console(*, as_json: bool = False) -> Console:
    """Returns the output of this process, with colours if it is a terminal.

    Args:
        as_json: whether standard output gets JSON alone. Ranks then print to standard error.
    """
    stdout = sys.stderr if as_json else sys.stdout
    return Console(
        # Bytes: a rank's output may be cut inside of a character.
        stdout.buffer,
        sys.stderr.buffer,
        color_stdout=_shows_color(stdout),
        color_stderr=_shows_color(sys.stderr),
    )


def above_progress(shown: Console) -> Console:
    """Returns the same output for a program that runs while the progress is shown, if it is."""
    if not is_terminal(sys.stderr):
        return shown
    out, err = (cast("BinaryIO", AboveProgress(each, shown.stderr)) for each in (shown.stdout, shown.stderr))
    return replace(shown, stdout=out, stderr=err)


def tell(failure: Failure, shown: Console) -> None:
    """Prints the failure of a script on simulated ranks, with its traceback."""
    shown.say(failure.text)
    if failure.rank is not None:
        trace = MarkedStream(failure.rank, shown.stderr, color=shown.color_stderr)
        trace.feed(failure.traceback.encode(errors="backslashreplace"))
        trace.finish()


def _with_bars(shown: Console) -> Console:
    """Returns the same output with a line for progress bars of the ranks, if standard error is a terminal for them."""
    if not is_terminal(sys.stderr) or os.environ.get("TERM") == "dumb":
        return shown
    status = StatusLine(shown.stderr)
    stdout = status.above(shown.stdout) if is_terminal(sys.stdout) else shown.stdout
    # 0 on a terminal that does not know, such as that of some editors.
    columns = os.get_terminal_size(sys.stderr.fileno()).columns or shown.columns
    return replace(shown, stdout=stdout, stderr=status.above(shown.stderr), status=status, columns=columns)


def _shows_color(stream: TextIO) -> bool:
    # NO_COLOR as in https://no-color.org: any value but the empty one.
    return is_terminal(stream) and not os.environ.get("NO_COLOR")
