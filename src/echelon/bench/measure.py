"""Measures on one rank, together with all others.

Subjects take turns, so that what else the machine does hits all of them alike. A turn is several calls in a row after a
barrier; its time is that of the slowest rank, divided by the calls. The median of the turns counts. On simulated ranks
one call says it all.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from echelon.bench import figures
from echelon.bench.figures import Case, Measured, Row
from echelon.bench.request import MOST_ITERATIONS, Request
from echelon.bench.subject import Call, EchelonSubject, Subject
from echelon.bench.workload import Workload
from echelon.collectives.plans.select import STATIC
from echelon.group.group import ProcessGroup
from echelon.wording import counted

# What every rank does in `echelon bench`: measures, and prints if it is the first.


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
        head = f"{_head(group, request)}\n{figures.titles([subject.name for subject in subjects])}\n"

        def report(row: Row) -> None:
            nonlocal head
            if prints and not request.as_json:
                print(head + figures.line(row), flush=True)
                head = ""

        rows = measure(group, request, subjects, report)
    finally:
        for subject in subjects:
            subject.close()
    if prints:
        print(figures.to_json(_values(group, request), rows) if request.as_json else figures.summary(rows), flush=True)
    return figures.wrong_values(rows)


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


_SECONDS = 0.05
"""How long a turn is to last."""
_WARM_UPS = 2


def measure(
    group: ProcessGroup, request: Request, subjects: Sequence[Subject], report: Callable[[Row], None]
) -> list[Row]:
    """Returns a row for each size, on every rank the same, and reports each as soon as it is known.

    Args:
        group: all ranks that measure; what they agree by, also where others are measured.
        request: what to measure.
        subjects: what takes turns.
        report: called on every rank.
    """
    rows = []
    for case in request.cases(group.world_size):
        rows.append(measure_case(group, case, subjects, request.turns, request.iterations))
        report(rows[-1])
    return rows


def measure_case(
    group: ProcessGroup,
    case: Case,
    subjects: Sequence[Subject],
    turns: int,
    iterations: int | None = None,
    seconds: float = _SECONDS,
) -> Row:
    """Returns what each subject takes for one case, after having counted what it gets wrong.

    Args:
        group: the ranks that measure; what they agree by.
        case: what to measure.
        subjects: what takes turns.
        turns: how often; the median counts.
        iterations: calls in a turn; None: as many as take `seconds`.
        seconds: how long a turn is to last.
    """
    workload = Workload(case, group.rank)
    if group.backend.name == "simulated":
        turns, iterations = 1, 1
    wrong = [_count_wrong(group, workload, subject) for subject in subjects]
    calls = [subject.call(case, workload.input()) for subject in subjects]
    numbers = [_num_calls(group, call, iterations, seconds) for call in calls]
    times: list[list[float]] = [[] for _ in subjects]
    for _ in range(turns):
        for call, number, mine in zip(calls, numbers, times, strict=True):
            mine.append(_turn(group, call, number))
    legs = 2 if case.operation == "send_recv" else 1
    found = (
        Measured(subject.name, statistics.median(mine) / legs, count)
        for subject, mine, count in zip(subjects, times, wrong, strict=True)
    )
    return Row(case, tuple(found))


def _count_wrong(group: ProcessGroup, workload: Workload, subject: Subject) -> int:
    """Does the operation once and counts what is wrong in the results of all ranks."""
    result = subject.call(workload.case, workload.input())()
    mine = torch.tensor([workload.count_wrong(result)])
    return int(group.all_reduce(mine).item())


def _num_calls(group: ProcessGroup, call: Call, iterations: int | None, seconds: float) -> int:
    """Warms up, and returns how many calls a turn has: on all ranks the same."""
    if iterations is not None:
        call()
        return iterations
    for _ in range(_WARM_UPS):
        one = _turn(group, call, 1)
    return max(1, min(MOST_ITERATIONS, int(seconds / max(one, 1e-9))))


def _turn(group: ProcessGroup, call: Call, number: int) -> float:
    """Returns the seconds per call of the slowest rank."""
    group.barrier()
    begin = group.backend.now()
    for _ in range(number):
        call()
    mine = torch.tensor([group.backend.now() - begin], dtype=torch.float64)
    return float(group.all_reduce(mine, "max").item()) / number
