"""The command line: `echelon`, or `python -m echelon`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    Prints a user's mistake as one line on stderr. Status 2 for a bad argument or value, 1 for other errors.

    Args:
        arguments: without the name of the program; None: `sys.argv`.
    """
    from echelon.cli.app import run_app  # here, so that `import echelon.cli` loads neither typer nor rich

    return run_app(sys.argv[1:] if arguments is None else arguments)
