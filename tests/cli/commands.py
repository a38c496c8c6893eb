"""How the tests of the command line run it."""

import subprocess
import sys

from echelon.cli import main

_IMPORTED = """\
import sys
from echelon.cli import main
status = main(sys.argv[1:])
print(*sorted(sys.modules))
sys.exit(status)
"""


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
