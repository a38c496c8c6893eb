"""The command line: `echelon`, or `python -m echelon`."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    Prints a user's mistake as one line on stderr. Status 2 for a bad argument or value, 130 after Ctrl-C, 141 if the
    reader of the output has gone, such as `head`. 1 for other errors, such as a full disk. After SIGTERM `run`,
    `simulate` and `foresee --sweep` return 143; the signal itself ends the others, which a shell reports as 143, too.

    Args:
        arguments: without the name of the program; None: `sys.argv`.
    """
    if arguments is None:
        _open_standard_streams()
        kept = None
    else:
        kept = os.dup(_STDOUT)  # JSON of a command leaves it closed to all else
    try:
        from echelon.cli.app import run_app  # here, so that `import echelon.cli` loads neither typer nor rich

        status = run_app(sys.argv[1:] if arguments is None else arguments)
        if not sys.stdout.closed:  # by a script
            sys.stdout.flush()  # here, where an error is answered
        return status
    except KeyboardInterrupt:  # during the imports, which take half a second
        return ended_by_sigint()
    except (BrokenPipeError, SystemExit) as error:
        # typer and rich answer a closed pipe by sys.exit(1), the status of a check that failed.
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _drop_output()
        return 141  # 128 + SIGPIPE, as a shell reports it
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _drop_output()
        with contextlib.suppress(OSError):  # it may be standard error itself
            print(f"echelon: cannot write the output: {error.strerror}; write it to another place", file=sys.stderr)
        return 1
    finally:
        if kept is not None:
            os.dup2(kept, _STDOUT)
            os.close(kept)


_STDOUT, _STDERR = 1, 2
"""File descriptors."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a file that takes no more output, as /dev/full."""


def _drop_output() -> None:
    # Else Python writes the rest of the buffer at its end, and a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_standard_streams() -> None:
    """Opens the standard streams that the caller has closed, as by `>&-`. A file would get their descriptors."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(opened, True)
    os.close(opened)
    for descriptor, name in ((_STDOUT, "stdout"), (_STDERR, "stderr")):
        if getattr(sys, name) is None:
            stream = os.fdopen(descriptor, "w")
            for each in (name, f"__{name}__"):
                setattr(sys, each, stream)


def ended_by_sigint() -> int:
    """Writes a line on Ctrl-C to stderr, and returns the exit status for it."""
    print("echelon: ended by SIGINT", file=sys.stderr)
    return 130  # 128 + SIGINT, as a shell reports it


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def signal_of(error: KeyboardInterrupt) -> signal.Signals:
    """Returns the signal that has raised an error inside of `ending_by_sigterm`."""
    return signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT


@contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated` in the main thread. No effect in other threads, which get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_: int, __: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
