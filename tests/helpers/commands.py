"""How the tests of the command line run it."""

import contextlib
import io
import subprocess
import sys

import pytest

from echelon.cli import main

_IMPORTED = """\
import sys
from echelon.cli import main
status = main(sys.argv[1:])
print(*sorted(sys.modules))
sys.exit(status)
"""


def above_progress(text):
    """Returns the lines that stay on a terminal, without the line of progress below them."""
    lines = (line.rpartition("\r\x1b[2K")[2] for line in text.split("\n"))
    return [line for line in lines if "\x1b" not in line]


def printed(capture, *arguments):
    """Runs a command that succeeds, and returns what it prints."""
    assert main(arguments) == 0
    return capture.readouterr().out


def refusal(capture, *arguments, statuses=(2,)):
    """Runs a command that is refused with one line on stderr and nothing else, and returns what that says."""
    assert main(arguments) in statuses
    captured = capture.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("echelon: ")
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("echelon: ").removesuffix("\n")


def imported_by(*arguments):
    """Runs a command that succeeds in a process of its own, and returns the modules that it imported."""
    command = [sys.executable, "-c", _IMPORTED, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.splitlines()[-1].split())


def captured(group, environ, function, *arguments):
    """Runs a function as a rank whose environment has these variables; returns its result, and what it printed."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        for name, value in environ.items():
            patch.setenv(name, value) if value else patch.delenv(name, raising=False)
        return function(group, *arguments), out.getvalue()


def world_size_of(group):
    return group.world_size


def spawned_by(pool, **environ):
    """Returns what stands in for `echelon.spawn` and takes processes that are there: new ones take seconds.

    To be called before a test changes its own environment, which the pool's first processes would keep.
    """
    pool.run(captured, 2, {}, world_size_of)

    def spawn(function, world_size, arguments=(), backend="auto"):
        outcomes = pool.run(captured, world_size, environ, function, *arguments, backend=backend)
        print("".join(text for _, text in outcomes), end="")
        return [result for result, _ in outcomes]

    return spawn
