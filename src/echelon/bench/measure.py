"""Measurement of collectives on new ranks or on a launcher's, run by all ranks together.

Subjects take turns, so that other load of the machine hits all of them alike. A turn is several calls in a row after a
barrier; its time is that of the slowest rank, divided by the calls. The median of the turns counts. On simulated ranks
one call is enough.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any, TextIO

import torch

from echelon.bench import mpi, table
from echelon.bench.request import DEFAULT_RANKS, REDUCTIONS, ROOTED, Case, Request, Tuning, is_launched, read_hosts
from echelon.bench.subject import Call, EchelonSubject, GlooSubject, Subject
from echelon.bench.table import Measured, Row
from echelon.bench.workload import Workload
from echelon.collectives.plans.select import STATIC, variable_of
from echelon.errors import LaunchError
from echelon.group.group import ProcessGroup
from echelon.launch.init import init
from echelon.launch.spawn import spawn
from echelon.launch.status_line import columns_of_text, is_terminal
from echelon.simulation import Network, simulate
from echelon.wording import counted

DEFAULT_NETWORK, DEFAULT_LOCAL_NETWORK = "10GbE", "shared-memory"


def run(request: Request) -> int:
    """Measures a checked request on new ranks, or as a launched rank. Returns the number of wrong values.

    Raises:
        LaunchError: ranks cannot be started that way.
    """
    num_ranks = request.num_ranks or DEFAULT_RANKS
    with _fixed_algorithm(request):
        if is_launched(request):
            with init(request.backend) as group:
                return measure_and_print(group, request)
        # mpirun starts its own processes, since MPI cannot join those that exist.
        if request.vs == "mpi":
            return mpi.measure_under_mpi(request, num_ranks)
        if request.backend == "simulated":
            results: list[int] = simulate(
                measure_and_print, num_ranks, (request,), network=network_of(request, request.local_network)
            ).results
        else:
            results = spawn(measure_and_print, num_ranks, (request,), request.backend)
    return results[0]  # all ranks have the same number


@contextmanager
def _fixed_algorithm(request: Request) -> Iterator[None]:
    """Sets the variable of the requested algorithm, for this process and its children, inside the with block."""
    # By the environment and not by the group's table: the ranks are other processes.
    variable = variable_of(request.operation)
    before = os.environ.get(variable)
    if request.algorithm is not None:
        os.environ[variable] = request.algorithm
    try:
        yield
    finally:
        os.environ.pop(variable, None)
        if before is not None:
            os.environ[variable] = before


def network_of(options: Request | Tuning, local_network: str | None = None) -> Network:
    """Returns the simulated network of the options, with a preset inside the hosts if there are any.

    Raises:
        LaunchError: an unknown name, or a host whose ranks are not consecutive.
        PlanError: hosts for another number of ranks.
    """
    network = Network.named(options.network or DEFAULT_NETWORK)
    if options.hosts is None:
        return network
    names = read_hosts(options.hosts, options.num_ranks or DEFAULT_RANKS)
    runs = [(host, len(list(ranks))) for host, ranks in groupby(names)]
    if len({host for host, _ in runs}) < len(runs):
        raise LaunchError(f"--hosts {','.join(names)}: simulated hosts have ranks in a row; give them as a,a,b,b")
    local = Network.named(local_network or DEFAULT_LOCAL_NETWORK)
    sizes = tuple(count for _, count in runs)
    return replace(network, hosts=sizes, local_latency=local.latency, local_bandwidth=local.bandwidth)


def measure_and_print(
    group: ProcessGroup, request: Request, peer: Callable[[ProcessGroup], Subject] | None = None
) -> int:
    """Measures a request on all ranks and prints the table on rank 0. Returns the number of wrong values.

    Args:
        group: all ranks.
        request: the operation, sizes and turns.
        peer: makes a second subject to measure against; None: Gloo if the request has it, else only Echelon.
    """
    # A launched rank learns the number of ranks from its group only.
    request.check_num_ranks(group.world_size)
    peer = GlooSubject if request.vs == "gloo" else peer
    # The title is the backend's name, unless the peer has the same.
    subjects: list[Subject] = [EchelonSubject(group, "ours" if group.backend.name == request.vs else None)]
    if peer is not None:
        subjects.append(peer(group))
    prints = group.rank == 0
    shown = progress(request.as_json) if prints else None
    try:
        about = textwrap.fill(
            _head(group, request), columns_of_text(), subsequent_indent="#   ", break_long_words=False
        )
        head = f"{about}\n{table.titles([subject.name for subject in subjects])}\n"

        def report(row: Row) -> None:
            nonlocal head
            # The head goes with the first row, so that a refused operation prints its error alone.
            if shown is not None:
                print_above(head + table.line(row), shown)
                head = ""

        rows = measure(group, request, subjects, report)
    finally:
        # After an error, too: the connections of Gloo are not the group's.
        for subject in subjects:
            subject.close()
    if prints:
        print_above(
            table.to_json(_values(group, request), rows) if request.as_json else table.summary(rows), sys.stdout
        )
    return table.wrong_values(rows)


def progress(as_json: bool) -> TextIO | None:
    """Returns the stream for lines that are printed while more is measured. None if nobody sees them.

    With JSON on stdout, the lines go to stderr if that is a terminal.
    """
    if not as_json:
        return sys.stdout
    return sys.stderr if is_terminal(sys.stderr) else None


def print_above(text: str, stream: TextIO) -> None:
    """Prints lines at once, above the line of progress if the command shows one on the terminal."""
    # This may be a process of its own. It removes the line, and the command draws it again below.
    is_shown = is_terminal(stream) and is_terminal(sys.stderr)
    print(("\r\x1b[2K" if is_shown else "") + text, file=stream, flush=True)


def _head(group: ProcessGroup, request: Request) -> str:
    where = f"{counted(group.world_size, 'rank')} on {counted(max(group.hosts) + 1, 'host')}"
    what = request.operation if request.algorithm is None else f"{request.operation} by {request.algorithm}"
    if request.vs is not None:  # a table of two subjects has no room for these columns
        what += f" of {request.dtype}"
        what += f", {request.op}" if request.operation in REDUCTIONS else ""
        what += f", root {request.root}" if request.operation in ROOTED else ""
    if group.backend.name == "simulated":
        return f"# {what}: {where}, simulated over {_network_text(request)}, in virtual time"
    machine = f"{counted(os.cpu_count() or 1, 'core')}, torch {torch.__version__}, {platform.system()}"
    tuned = "" if group.table is STATIC else ", tuned"
    return f"# {what}: {where} over {group.backend.name}{tuned}, median of {counted(request.turns, 'turn')}; {machine}"


def _network_text(request: Request) -> str:
    between, inside = request.network or DEFAULT_NETWORK, request.local_network or DEFAULT_LOCAL_NETWORK
    return between if request.hosts is None else f"{between}, {inside} inside hosts"


def _values(group: ProcessGroup, request: Request) -> dict[str, Any]:
    return {
        "operation": request.operation,
        "algorithm": request.algorithm,
        "num_ranks": group.world_size,
        "hosts": list(group.hosts),
        "backend": group.backend.name,
        "tuned": group.table is not STATIC,
        "network": _network_text(request) if group.backend.name == "simulated" else None,
        "turns": request.turns,
        "environment": {"cores": os.cpu_count(), "torch": torch.__version__, "platform": platform.platform()},
    }


_SECONDS = 0.05
"""Target length of a turn."""
_WARM_UPS = 2  # the first call also opens connections and maps memory
MOST_ITERATIONS = 1000


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
    # Results are allocated before the timing starts, as peers do. The kernel takes longer to map a new result than to
    # move it: a 64 MiB all-gather took five times as long as Open MPI's.
    calls = [subject.call(case, workload.input(), workload.output()) for subject in subjects]
    numbers = [_num_calls(group, call, iterations, seconds) for call in calls]
    times: list[list[float]] = [[] for _ in subjects]
    for _ in range(turns):
        # Every subject in each turn: other load of the machine hits all of them alike.
        for call, number, mine in zip(calls, numbers, times, strict=True):
            mine.append(_turn(group, call, number))
    # A ping-pong is two messages, and the time is that of one.
    legs = 2 if case.operation == "send_recv" else 1
    found = (
        Measured(subject.name, statistics.median(mine) / legs, count)
        for subject, mine, count in zip(subjects, times, wrong, strict=True)
    )
    return Row(case, tuple(found))


def _count_wrong(group: ProcessGroup, workload: Workload, subject: Subject) -> int:
    """Runs the operation once and returns the number of wrong elements on all ranks."""
    result = subject.call(workload.case, workload.input(), workload.output())()
    # Summed over ranks, so that all return the same and rank 0 may print it.
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
    begin = group.backend.now()  # virtual on simulated ranks
    for _ in range(number):
        call()
    mine = torch.tensor([group.backend.now() - begin], dtype=torch.float64)
    return float(group.all_reduce(mine, "max").item()) / number
