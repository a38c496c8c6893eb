"""The commands of the command line, and what becomes of their errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version as version_of
from typing import Annotated, cast

import typer

from echelon._torch_versions import UnsupportedTorch
from echelon.cli.bench import bench
from echelon.cli.doctor import doctor
from echelon.cli.plan import plan
from echelon.cli.plan_collective import is_asked_for, plan_collective
from echelon.cli.run import run
from echelon.cli.tune import tune
from echelon.errors import EchelonError, FileError

_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="echelon",
    help="Distributed training on PyTorch: plan it, check it, simulate it, run it, draw it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_HELP,
)
collectives = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=_HELP
)
"""`echelon plan` where a collective is named: other options than those of a pipeline's schedule."""
app.command("run", context_settings={"allow_interspersed_args": False})(run)
app.command("plan")(plan)
app.command("bench", short_help="Measures how fast collectives are here.")(bench)
app.command("tune", short_help="Finds the best algorithms for this system.")(tune)
app.command("doctor", short_help="Says what would stop a run on this host.")(doctor)
collectives.command()(plan_collective)


def _print_version(asked_for: bool) -> None:
    if asked_for:
        print(f"echelon {version_of('echelon')}")
        raise typer.Exit


@app.callback()
def _echelon(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""What typer raises for a wrong command line; every version has it, but not under one name."""


def run_app(arguments: Sequence[str]) -> int:
    """Runs the command that `arguments` ask for and returns the exit status."""
    of_collective = False
    try:
        if of_collective := is_asked_for(arguments := list(arguments)):
            status = collectives(arguments[1:], prog_name="echelon plan", standalone_mode=False)
        else:
            status = app(arguments or ["--help"], prog_name="echelon", standalone_mode=False)
    except (EchelonError, UnsupportedTorch) as error:
        print(f"echelon: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | FileError) else 1
    except _UsageError as error:
        message = error.format_message().rstrip(".")
        command = "echelon" if error.ctx is None else error.ctx.command_path
        print(f"echelon: {message}: see `{command}{' all-reduce' * of_collective} --help`", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("echelon: this command needs torch, which is not installed here: pip install torch", file=sys.stderr)
        return 1
    except typer.Abort:  # what typer makes of Ctrl-C
        return 130
    return status if isinstance(status, int) else 0
