"""Measurement of collectives, run by all ranks together.

Subjects take turns, so that other load of the machine hits all of them alike. A turn is several calls in a row after a
barrier; its time is that of the slowest rank, divided by the calls. The median of the turns counts. On simulated ranks
one call is enough.
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


def measure_and_print(
    group: ProcessGroup, request: Request, peer: Callable[[ProcessGroup], Subject] | None = None
) -> int:
    """Measures a request on all ranks and prints the table on rank 0. Returns the number of wrong values.

    Args:
        group: all ranks.
        request: the operation, sizes and turns.
        peer: makes a second subject to measure against; None: only Echelon.
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
"""Target length of a turn."""
_WARM_UPS = 2


def measure(
    group: ProcessGroup, request: Request, subjects: Sequence[Subject], report: Callable[[Row], None]
) -> list[Row]:
    """Measures each size and returns a row for it, the same on every rank.

    Args:
        group: all ranks; they agree on times over it, also on those of other subjects.
        request: the operation, sizes and turns.
        subjects: take turns.
        report: called with each row when it is measured, on every rank.
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
    """Measures one case: counts wrong elements of each subject, then times it.

    Args:
        group: the ranks that measure; they agree on times over it.
        case: the call to measure.
        subjects: take turns.
        turns: turns of each subject; their median counts.
        iterations: calls in a turn; None: as many as take `seconds`.
        seconds: target length of a turn.
    """
    workload = Workload(case, group.rank)
    if group.backend.name == "simulated":
        turns, iterations = 1, 1  # virtual time has no noise
    wrong = [_count_wrong(group, workload, subject) for subject in subjects]
    calls = [subject.call(case, workload.input()) for subject in subjects]
    numbers = [_num_calls(group, call, iterations, seconds) for call in calls]
    times: list[list[float]] = [[] for _ in subjects]
    for _ in range(turns):
        # Every subject in each turn: other load of the machine hits all of them alike.
        for call, number, mine in zip(calls, numbers, times, strict=True):
            mine.append(_turn(group, call, number))
    legs = 2 if case.operation == "send_recv" else 1
    found = (
        Measured(subject.name, statistics.median(mine) / legs, count)
        for subject, mine, count in zip(subjects, times, wrong, strict=True)
    )
    return Row(case, tuple(found))


def _count_wrong(group: ProcessGroup, workload: Workload, subject: Subject) -> int:
    """Runs the operation once and returns the number of wrong elements on all ranks."""
    result = subject.call(workload.case, workload.input())()
    mine = torch.tensor([workload.count_wrong(result)])
    return int(group.all_reduce(mine).item())


def _num_calls(group: ProcessGroup, call: Call, iterations: int | None, seconds: float) -> int:
    """Warms up and returns the number of calls per turn, the same on all ranks."""
    if iterations is not None:
        call()
        return iterations
    # The last warm-up sets the number. It is a maximum over all ranks, so every rank computes the same one.
    for _ in range(_WARM_UPS):
        one = _turn(group, call, 1)
    return max(1, min(MOST_ITERATIONS, int(seconds / max(one, 1e-9))))


def _turn(group: ProcessGroup, call: Call, number: int) -> float:
    """Returns the seconds per call of the slowest rank."""
    group.barrier()  # ranks start together, so that no rank's time contains the lateness of another
    begin = group.backend.now()
    for _ in range(number):
        call()
    mine = torch.tensor([group.backend.now() - begin], dtype=torch.float64)
    return float(group.all_reduce(mine, "max").item()) / number
