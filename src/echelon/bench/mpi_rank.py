"""Rank of `echelon bench --vs mpi`, started by mpirun: python -m echelon.bench.mpi_rank BACKEND REQUEST."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from mpi4py import MPI  # type: ignore[import-not-found,unused-ignore]

from echelon.bench.measure import measure_and_print
from echelon.bench.mpi import MpiSubject
from echelon.bench.request import Request
from echelon.errors import EchelonError
from echelon.group.group import ProcessGroup
from echelon.launch.init import init
from echelon.launch.variables import ReservedPort


def join(world: Any, backend: str) -> ProcessGroup:
    """Connects all ranks of an MPI program and returns their group. `world` is mpi4py's COMM_WORLD."""
    with ReservedPort() as port:
        number = world.bcast(port.port, 0)  # rank 0's port; the others reserve one too, and drop it
        where = {"RANK": world.rank, "WORLD_SIZE": world.size, "MASTER_ADDR": port.host, "MASTER_PORT": number}
        os.environ.update({name: str(value) for name, value in where.items()})
        return init(backend)


def main(backend: str, text: str) -> int:
    """Measures a request, given as JSON in `text`. Returns 1 if a value was wrong, else 0."""
    values = json.loads(text)
    request = Request(**{**values, "sizes": tuple(values["sizes"])})
    with join(MPI.COMM_WORLD, backend) as group:
        wrong = measure_and_print(group, request, lambda _: MpiSubject(MPI.COMM_WORLD, MPI))
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except EchelonError as error:
        print(f"echelon: {error}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(2)  # ends the other ranks too
