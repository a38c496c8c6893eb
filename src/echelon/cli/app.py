"""Commands of the command line, and the exit statuses of their errors. Holds `tune` and `doctor` itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon._torch_versions import UnsupportedTorch
from echelon.bench.request import read_size, size_ladder
from echelon.cli.amounts import read_hosts
from echelon.cli.bench import bench
from echelon.cli.plan import plan
from echelon.cli.plan_collective import is_asked_for, plan_collective
from echelon.cli.run import run
from echelon.errors import EchelonError, FileError, LaunchError
from echelon.launch.environment import is_rank

if TYPE_CHECKING:
    from echelon.doctor.finding import Finding


_MOST_RANKS = 1024  # above it a number is a slip of the keyboard


def tune(
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--num-ranks", help="Number of ranks to start.  [default: 2]")
    ] = None,
    backend: Annotated[str, typer.Option(help="tcp, or simulated (virtual time).")] = "tcp",
    largest: Annotated[str, typer.Option("-e", "--max", metavar="BYTES", help="Largest array.")] = "16M",
    turns: Annotated[int, typer.Option(help="Timed runs per algorithm; their median counts.")] = 5,
    network: Annotated[
        str | None, typer.Option(metavar="NAME", help="Network between simulated ranks.  [default: 10GbE]")
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="HOSTS", help="Hosts of simulated ranks: a,a,b,b, or 2x2 (2 hosts of 2 ranks)."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Output file.  [default: $XDG_CONFIG_HOME/echelon/tuned.json]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Measures every collective algorithm and writes a table of the fastest.

    Run it on the ranks that jobs will have: -n on this host, or under a launcher on several hosts. A job uses the
    table on all its ranks if rank 0 finds the file. ECHELON_TUNED names another file, or is "off".
    """
    from echelon.bench.start_tuning import Tuning, run, run_as_rank

    tuning = Tuning(size_ladder(8, read_size("--max", largest), 8), turns, output, as_json)
    if backend not in ("tcp", "simulated"):
        raise LaunchError(f"--backend {backend}: algorithms are for messages; give tcp or simulated")
    for option, value in (("--network", network), ("--hosts", hosts)):
        if value is not None and backend != "simulated":
            raise LaunchError(f"{option} {value}: only simulated ranks have that; add --backend simulated")
    if backend == "simulated" and output is None:
        raise LaunchError("--backend simulated is not this system: name a file of its own, as --output tuned.json")
    if is_rank(os.environ):
        if num_ranks is not None or backend == "simulated":
            raise LaunchError("this is a rank that a launcher started: leave out -n and --backend simulated")
        run_as_rank(tuning, backend)
        return
    count = 2 if num_ranks is None else num_ranks
    if not 2 <= count <= _MOST_RANKS:
        raise LaunchError(f"-n {count}: give 2 to {_MOST_RANKS} ranks")
    link = None
    if backend == "simulated":
        from echelon.bench.start import network_of

        link = network_of(network or "10GbE", "shared-memory", None if hosts is None else read_hosts(hosts, count))
    run(tuning, count, backend, link)


_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> int:
    """Checks this host, torch and the environment variables for problems, and prints a fix for each.

    Contacts no other host. Exits with status 1 if a run would not start. Run it on every host in the way that
    ranks will be started, for example under srun or mpirun with their environment variables.
    """
    from echelon.doctor.checkup import examine

    findings = examine(os.environ)
    num_errors = sum(finding.status == "error" for finding in findings)
    if as_json:
        checks = ",\n".join(f"    {json.dumps(asdict(finding))}" for finding in findings)
        print(f'{{\n  "errors": {num_errors},\n  "checks": [\n{checks}\n  ]\n}}')
    else:
        print_findings(Console(highlight=False), findings)
    return 1 if num_errors else 0


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Prints a table of findings, each with its fix below it, then the numbers of errors and warnings."""
    table = Table("check", "", "found", box=None, pad_edge=False, header_style="bold")
    for finding in findings:
        found = Text(finding.found)
        if finding.fix:
            found.append(f"\n→ {finding.fix}", style=_STYLES[finding.status])
        table.add_row(finding.check, Text(finding.status, style=_STYLES[finding.status]), found)
    console.print(table)
    counts = {status: sum(finding.status == status for finding in findings) for status in ("error", "warning")}
    parts = [f"{number} {status}{'s' * (number != 1)}" for status, number in counts.items() if number]
    console.print(", ".join(parts) if parts else "all is well")


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
"""`echelon plan` of a collective. A separate app, since its options differ from those of a pipeline schedule."""
# Options after SCRIPT belong to the script, so `run` stops parsing there.
app.command("run", context_settings={"allow_interspersed_args": False})(run)
app.command("plan")(plan)
app.command("bench", short_help="Measures the speed of a collective.")(bench)
app.command("tune", short_help="Finds the fastest algorithms for this system.")(tune)
app.command("doctor", short_help="Checks this host for problems.")(doctor)
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
"""typer's exception for a wrong command line. Its name differs between versions of typer, so it is found as a base."""


def run_app(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit status. Errors of the user become one line on stderr."""
    of_collective = False
    try:
        # `plan` has two sets of options, so the first word decides before typer parses.
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
        # Commands that only plan run without torch; the others import it late.
        if error.name != "torch":
            raise
        print("echelon: this command needs torch, which is not installed here: pip install torch", file=sys.stderr)
        return 1
    except typer.Abort:  # typer's form of KeyboardInterrupt
        return 130  # 128 + SIGINT, as a shell reports it
    return status if isinstance(status, int) else 0
