"""Ranks of mpirun for `echelon bench --vs mpi`: python -m echelon.bench.mpi REQUEST is one of them."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from echelon.bench.request import Request
from echelon.bench.subject import MpiSubject
from echelon.errors import EchelonError, LaunchError
from echelon.group.group import ProcessGroup
from echelon.launch.init import init
from echelon.launch.variables import ReservedPort, threads_per_rank


def measure_under_mpi(request: Request, num_ranks: int) -> int:
    """Measures on new ranks of mpirun. Returns 1 if a value was wrong, else 0."""
    return run_under_mpi(["-m", "echelon.bench.mpi", json.dumps(asdict(request))], num_ranks)


def has_mpi4py() -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def run_under_mpi(arguments: Sequence[str], num_ranks: int) -> int:
    """Runs Python with `arguments` on ranks of mpirun, which can call `join`. Blocks until they end.

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


def join(world: Any, backend: str) -> ProcessGroup:
    """Connects all ranks of an MPI program and returns their group. `world` is mpi4py's COMM_WORLD."""
    with ReservedPort() as port:
        number = world.bcast(port.port, 0)  # rank 0's port; the others reserve one too, and drop it
        where = {"RANK": world.rank, "WORLD_SIZE": world.size, "MASTER_ADDR": port.host, "MASTER_PORT": number}
        os.environ.update({name: str(value) for name, value in where.items()})
        return init(backend)


def _measure_as_rank(text: str) -> int:
    """Measures a request, given as JSON. Returns 1 if a value was wrong, else 0."""
    # Late: importing MPI initializes it, and the module that starts mpirun imports this one.
    from mpi4py import MPI  # type: ignore[import-not-found,unused-ignore]

    from echelon.bench.measure import measure_and_print

    try:
        request = Request(**json.loads(text))
        with join(MPI.COMM_WORLD, request.backend) as group:
            return 1 if measure_and_print(group, request, lambda _: MpiSubject(MPI.COMM_WORLD, MPI)) else 0
    except EchelonError as error:
        print(f"echelon: {error}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(2)  # ends the other ranks too
        raise


if __name__ == "__main__":
    sys.exit(_measure_as_rank(sys.argv[1]))
