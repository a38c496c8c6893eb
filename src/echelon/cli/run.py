"""`echelon run`: starts a program as all the ranks of this host."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from echelon.errors import LaunchError
from echelon.launch.launcher import Console
from echelon.launch.run import GRACE, Program
from echelon.launch.run import run as run_program


def run(
    program: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or with -m the module.")],
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--num-ranks", help="How many ranks to start.  [required]")
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Passed on to the script.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run a module, like python -m.")] = False,
    grace: Annotated[
        float, typer.Option(help="Seconds that the other ranks get to report after the first one failed.")
    ] = GRACE,
) -> int:
    """Runs a script as all the ranks of this host.

    Output is marked with the rank that printed it. When one rank fails, the others end too, and the exit status is
    that of the first that failed. Options stand before the script; what comes after it is the script's.
    """
    if num_ranks is None:
        raise LaunchError(_no_ranks(program, args or []))
    return run_program(
        Program(program, tuple(args or ()), is_module=module),
        num_ranks,
        Console(
            sys.stdout.buffer,
            sys.stderr.buffer,
            color_stdout=_shows_color(sys.stdout.isatty()),
            color_stderr=_shows_color(sys.stderr.isatty()),
        ),
        os.environ,
        grace,
    )


def _no_ranks(program: str, args: Sequence[str]) -> str:
    """Says that -n is missing; if it stands among the arguments of the script, where it belongs."""
    for place, word in enumerate(args):
        if found := re.fullmatch(r"(-n|--num-ranks)(?:=?(\d+))?", word):
            value = found[2] or "".join(args[place + 1 : place + 2])
            return f"{word} stands after the script, which gets it; options go before: echelon run -n {value} {program}"
    return f"Missing option '-n' / '--num-ranks': say how many ranks to start: echelon run -n 2 {program}"


def _shows_color(is_terminal: bool) -> bool:
    return is_terminal and not os.environ.get("NO_COLOR")
