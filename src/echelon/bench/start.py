"""Start of the ranks of `echelon bench`: as processes, as simulated ranks, by mpirun or by another launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import groupby

from echelon.bench.measure import measure_and_print
from echelon.bench.request import Request
from echelon.bench.subject import GlooSubject
from echelon.collectives.plans.select import variable_of
from echelon.errors import LaunchError
from echelon.group.group import ProcessGroup
from echelon.launch import environment
from echelon.launch.init import init
from echelon.launch.spawn import spawn
from echelon.launch.variables import threads_per_rank
from echelon.simulation import Network, simulate


def network_of(between: str, inside: str, hosts: Sequence[str] | None) -> Network:
    """Returns a simulated network: preset `between` between hosts, preset `inside` within each.

    Args:
        between, inside: names of presets.
        hosts: host of each rank; None: no hosts, `between` everywhere.

    Raises:
        LaunchError: an unknown name, or a host whose ranks are not consecutive.
    """
    network = Network.named(between)
    if hosts is None:
        return network
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    if len({host for host, _ in runs}) < len(runs):
        raise LaunchError(f"--hosts {','.join(hosts)}: simulated hosts have ranks in a row; give them as a,a,b,b")
    local = Network.named(inside)
    sizes = tuple(count for _, count in runs)
    return replace(network, hosts=sizes, local_latency=local.latency, local_bandwidth=local.bandwidth)


def run(request: Request, num_ranks: int, backend: str, network: Network | None) -> int:
    """Measures on `num_ranks` new ranks and prints the table. Returns the number of wrong values.

    Args:
        request: the operation, sizes and turns.
        num_ranks: number of ranks to start.
        backend: as for `echelon.spawn`, or "simulated".
        network: between simulated ranks.

    Raises:
        LaunchError: the request cannot be measured that way.
    """
    request.check(num_ranks)
    with _overruled(request):
        if backend == "simulated":
            if request.vs is not None:
                raise LaunchError(f"--vs {request.vs} needs processes: leave out --backend simulated")
            results: list[int] = simulate(measure_and_print, num_ranks, (request,), network=network).results
        elif request.vs == "mpi":
            return _run_under_mpi(request, num_ranks, backend)
        else:
            results = spawn(_measure_on_process, num_ranks, (request,), backend)
    return results[0]


def run_as_rank(request: Request, backend: str) -> int:
    """Measures as one rank of a launcher's job. Returns the number of wrong values."""
    if request.vs == "mpi":
        raise LaunchError("--vs mpi starts its ranks by mpirun: run it without another launcher")
    launched = environment.read(os.environ)
    request.check(1 if launched is None else launched.world_size)
    with _overruled(request), init(backend) as group:
        return _measure_on_process(group, request)


def _measure_on_process(group: ProcessGroup, request: Request) -> int:
    return measure_and_print(group, request, GlooSubject if request.vs == "gloo" else None)


@contextmanager
def _overruled(request: Request) -> Iterator[None]:
    """Sets the variable of the requested algorithm, for this process and its children, inside the with block."""
    if request.algorithm is None:
        yield
        return
    variable = variable_of(request.operation)
    before = os.environ.get(variable)
    os.environ[variable] = request.algorithm
    try:
        yield
    finally:
        del os.environ[variable]
        if before is not None:
            os.environ[variable] = before


def has_mpi4py() -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def _run_under_mpi(request: Request, num_ranks: int, backend: str) -> int:
    return run_under_mpi(["-m", "echelon.bench.mpi_rank", backend, json.dumps(asdict(request))], num_ranks)


def run_under_mpi(arguments: Sequence[str], num_ranks: int) -> int:
    """Runs Python with `arguments` on ranks of mpirun, which can call `mpi_rank.join`. Blocks until they end.

    Returns:
        Exit status of mpirun: 0, or 1 if a value was wrong.

    Raises:
        LaunchError: mpirun or mpi4py is missing, or the status is another.
    """
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise LaunchError("--vs mpi: mpirun was not found; install it: apt-get install openmpi-bin libopenmpi-dev")
    if not has_mpi4py():
        raise LaunchError("--vs mpi: mpi4py is not installed; install it: pip install mpi4py")
    # Ranks may outnumber the cores.
    options = ["-n", str(num_ranks), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")  # Open MPI refuses root otherwise
    environ = {"OMP_NUM_THREADS": str(threads_per_rank(num_ranks)), **os.environ}
    environ |= {"ECHELON_SECRET": secrets.token_hex(32), "ECHELON_RUN_ID": secrets.token_hex(4)}
    status = subprocess.run([mpirun, *options, sys.executable, *arguments], env=environ, check=False).returncode
    if status not in (0, 1):
        raise LaunchError(f"--vs mpi: mpirun ended with status {status}; see its output above")
    return status
