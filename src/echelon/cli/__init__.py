"""The command line: `echelon`, or `python -m echelon`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    Whatever is the user's to mend is one line on stderr: status 2 for a bad argument or value, 1 for the rest.

    Args:
        arguments: without the name of the program; None: those of this process.
    """
    from echelon.cli.app import run_app  # imports typer and rich, which `import echelon.cli` alone does not need

    return run_app(sys.argv[1:] if arguments is None else arguments)
