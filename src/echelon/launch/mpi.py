"""What mpirun tells a rank: Open MPI's, and the MPICH family's (Intel MPI too), which speaks PMI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from echelon.launch.translation import Translation, renamed

_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_PMI = {
    "RANK": "PMI_RANK",
    "WORLD_SIZE": "PMI_SIZE",
    "LOCAL_RANK": "MPI_LOCALRANKID",
    "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
}


def from_open_mpi(environ: Mapping[str, str]) -> Translation | None:
    """Returns what Open MPI's mpirun said; None if it did not start this rank."""
    if not environ.get("OMPI_COMM_WORLD_RANK"):
        return None
    namespace = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return _translation("mpirun", environ, _OPEN_MPI, f"openmpi-{namespace}" if namespace else "")


def from_pmi(environ: Mapping[str, str]) -> Translation | None:
    """Returns what MPICH's or Intel MPI's mpiexec said; None if it did not start this rank.

    It gives a job no name. On one host the number of the process that started all the ranks serves as one.
    """
    if not environ.get("PMI_RANK"):
        return None
    translation = _translation("mpiexec", environ, _PMI, f"pmi-{_starter()}")
    return translation if translation.is_one_host else replace(translation, job="")


def _starter() -> int:
    """Returns the number of the nearest process above this one that is not part of a rank, as a wrapping script is."""
    pid = os.getppid()
    with suppress(OSError):  # not ours to read: not part of a rank
        while b"\0PMI_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def _translation(launcher: str, environ: Mapping[str, str], names: Mapping[str, str], job: str) -> Translation:
    variables = renamed(environ, names)
    local = variables.text("LOCAL_WORLD_SIZE")
    return Translation(launcher, variables, job, bool(local) and local == variables.text("WORLD_SIZE"))
