"""What every rank does in `echelon bench`: measures, and prints if it is the first."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

import torch

from echelon.bench import table
from echelon.bench.figures import Row
from echelon.bench.measure import measure
from echelon.bench.request import Request
from echelon.bench.subject import EchelonSubject, Subject
from echelon.collectives.select import STATIC
from echelon.group import ProcessGroup
from echelon.wording import counted


def measure_and_print(
    group: ProcessGroup, request: Request, peer: Callable[[ProcessGroup], Subject] | None = None
) -> int:
    """Measures what is asked for; the first rank prints it. Returns the wrong values.

    Args:
        group: all ranks.
        request: what to measure.
        peer: makes what is measured as well.
    """
    subjects: list[Subject] = [EchelonSubject(group, "ours" if group.backend.name == request.vs else None)]
    if peer is not None:
        subjects.append(peer(group))
    prints = group.rank == 0
    try:
        head = f"{_head(group, request)}\n{table.titles([subject.name for subject in subjects])}\n"

        def report(row: Row) -> None:
            nonlocal head
            if prints and not request.as_json:
                print(head + table.line(row), flush=True)
                head = ""

        rows = measure(group, request, subjects, report)
    finally:
        for subject in subjects:
            subject.close()
    if prints:
        print(table.to_json(_values(group, request), rows) if request.as_json else table.summary(rows), flush=True)
    return table.wrong_values(rows)


def _head(group: ProcessGroup, request: Request) -> str:
    where = f"{counted(group.world_size, 'rank')} on {counted(max(group.hosts) + 1, 'host')}"
    what = request.operation if request.algorithm is None else f"{request.operation} by {request.algorithm}"
    if group.backend.name == "simulated":
        return f"# {what}: {where}, simulated over {request.network or 'nothing'}, in virtual time"
    machine = f"{counted(os.cpu_count() or 1, 'core')}, torch {torch.__version__}, {platform.system()}"
    tuned = "" if group.table is STATIC else ", tuned"
    return f"# {what}: {where} over {group.backend.name}{tuned}, median of {counted(request.turns, 'turn')}; {machine}"


def _values(group: ProcessGroup, request: Request) -> dict[str, Any]:
    return {
        "operation": request.operation,
        "algorithm": request.algorithm,
        "num_ranks": group.world_size,
        "hosts": list(group.hosts),
        "backend": group.backend.name,
        "tuned": group.table is not STATIC,
        "network": request.network or None,
        "turns": request.turns,
        "environment": {"cores": os.cpu_count(), "torch": torch.__version__, "platform": platform.platform()},
    }
