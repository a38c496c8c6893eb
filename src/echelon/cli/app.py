"""The commands of the command line, and what becomes of their errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

import typer

from echelon.cli.bench import bench
from echelon.cli.plan import plan
from echelon.cli.plan_collective import is_asked_for, plan_collective
from echelon.cli.run import run
from echelon.cli.tune import tune
from echelon.errors import EchelonError

app = typer.Typer(
    name="echelon",
    help="Distributed training on PyTorch: plan it, check it, simulate it, run it, draw it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
collectives = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
"""`echelon plan` where a collective is named: other options than those of a pipeline's schedule."""
app.command("run", context_settings={"allow_interspersed_args": False})(run)
app.command("plan")(plan)
app.command("bench")(bench)
app.command("tune")(tune)
collectives.command()(plan_collective)


@app.callback()
def _echelon() -> None:
    # With a callback, typer keeps the name of the command even while there is only one.
    pass


_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""What typer raises for a wrong command line; every version has it, but not under one name."""


def run_app(arguments: Sequence[str]) -> int:
    """Runs the command that `arguments` ask for and returns the exit status."""
    try:
        if is_asked_for(arguments := list(arguments)):
            status = collectives(arguments[1:], prog_name="echelon plan", standalone_mode=False)
        else:
            status = app(arguments or ["--help"], prog_name="echelon", standalone_mode=False)
    except EchelonError as error:
        print(f"echelon: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except _UsageError as error:
        message = error.format_message().rstrip(".")
        print(f"echelon: {message}: see `echelon --help`", file=sys.stderr)
        return 2
    except typer.Abort:  # what typer makes of Ctrl-C
        return 130
    return status if isinstance(status, int) else 0
