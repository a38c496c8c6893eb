"""`echelon doctor`: checks of this host."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.cli.options import Json
from echelon.cli.output import rich_console, to_json
from echelon.wording import counted

if TYPE_CHECKING:
    from echelon.doctor.checks import Finding

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(as_json: Json = False) -> int:
    """Checks this host, torch and the environment variables for problems, and prints a fix for each.

    Contacts no other host. Exits with status 1 if a run would not start. Run it on every host in the way that
    ranks will be started, for example under srun or mpirun with their environment variables.
    """
    # Late: it imports torch, which takes seconds that `--help` need not wait.
    from echelon.doctor import checkup

    findings = checkup.examine(os.environ)
    num_errors = sum(finding.status == "error" for finding in findings)
    if as_json:
        print(to_json({"errors": num_errors, "checks": list(map(asdict, findings))}))
    else:
        _print_findings(rich_console(), findings)
    return 1 if num_errors else 0


def _print_findings(console: Console, findings: list[Finding]) -> None:
    table = Table("check", "", "found", box=None, pad_edge=False, header_style="bold")
    for finding in findings:
        found = Text(finding.found)  # brackets of an IPv6 address are no markup
        if finding.fix:
            found.append(f"\n→ {finding.fix}", style=_STYLES[finding.status])
        table.add_row(finding.check, Text(finding.status, style=_STYLES[finding.status]), found)
    console.print(table)
    counts = {status: sum(finding.status == status for finding in findings) for status in ("error", "warning")}
    console.print(", ".join(counted(number, status) for status, number in counts.items() if number) or "all is well")
