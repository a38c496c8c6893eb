"""Exit statuses of SystemExit, and the reasons that peers are given when a rank leaves. Pure."""

from __future__ import annotations


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
    text = str(code).partition("\n")[0] if code is not None and not isinstance(code, int) else ""
    return f"exited with status {status_of(code)}" + (f": {text}" if text else "")


def reason_of(error: BaseException) -> str:
    """Returns in one line why a rank left with an exception, as its peers report it."""
    return f"it {describe_exit_of(error.code)}" if isinstance(error, SystemExit) else summarize(error)


def summarize(error: BaseException) -> str:
    """Returns the type of an exception and the first line of its message."""
    message = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
