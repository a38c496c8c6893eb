"""`echelon doctor`: what would stop or slow a run on this host, and what to do about it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from echelon.doctor.finding import Finding

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> int:
    """Looks at this host, torch and the environment variables, and says what to do about what is wrong.

    No other host is spoken to. Ends with status 1 if a run would not start. Run it on every
    host, as the ranks will be started: under srun or mpirun, say, with the variables that they will have.
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
    """Prints one row for each, what is to be done below what was found, and how many there are of each kind."""
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
