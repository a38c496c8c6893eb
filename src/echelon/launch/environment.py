"""Environment of a rank: rank, world size and rendezvous, read from the launcher's environment variables.

torchrun, a Kubernetes PyTorchJob and `echelon run` all set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The rest is
optional: LOCAL_RANK, LOCAL_WORLD_SIZE, ECHELON_SECRET, ECHELON_RUN_ID, and torchrun's variables about its agent. srun,
Open MPI's mpirun and PMI's mpiexec have other names (`slurm`, `from_open_mpi`, `from_pmi`); there MASTER_ADDR and
MASTER_PORT override the rendezvous address. Of nested launchers the innermost counts: the one that set the four
variables, then mpirun or mpiexec, then srun.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from echelon.arguments import MAX_LOCAL_WORLD_SIZE, choices
from echelon.backends.connect.members import join_address
from echelon.errors import LaunchError
from echelon.launch import backends
from echelon.launch.slurm import check_alone, from_slurm
from echelon.launch.variables import Translation, Variables, loopback, renamed

# The variables of two families: Open MPI's mpirun, and mpiexec of MPICH and Intel MPI, which use PMI.
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
    """Translates the variables of Open MPI's mpirun. None if it did not start this rank."""
    if not environ.get("OMPI_COMM_WORLD_RANK"):
        return None
    namespace = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return _mpi_translation("mpirun", environ, _OPEN_MPI, f"openmpi-{namespace}" if namespace else "")


def from_pmi(environ: Mapping[str, str]) -> Translation | None:
    """Translates the variables of MPICH's or Intel MPI's mpiexec. None if it did not start this rank.

    mpiexec gives a job no name. On one host, the pid of the process that started all ranks serves as the name.
    """
    if not environ.get("PMI_RANK"):
        return None
    translation = _mpi_translation("mpiexec", environ, _PMI, f"pmi-{_starter()}")
    # Between hosts the pids differ, so ranks would compute different names.
    return translation if translation.is_one_host else replace(translation, job="")


def _starter() -> int:
    """Returns the pid of the nearest ancestor that is not part of a rank. A script around the program is part of it."""
    pid = os.getppid()
    with suppress(OSError):  # another user's process cannot be read, and is no part of a rank
        while b"\0PMI_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def _mpi_translation(launcher: str, environ: Mapping[str, str], names: Mapping[str, str], job: str) -> Translation:
    variables = renamed(environ, names)
    local = variables.text("LOCAL_WORLD_SIZE")
    return Translation(launcher, variables, job, bool(local) and local == variables.text("WORLD_SIZE"))


REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of which all four or none are set, unless a launcher has its own. With none the world size is 1."""

MIN_SECRET_LENGTH = 16
"""Characters. Shorter secrets can be guessed."""


_LAUNCHERS = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_RANK", "SLURM_PROCID")
"""Prefixes of the variables by which a rank recognises its launcher."""
_WHO = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Environment:
    """Rank, world size and rendezvous of this process, as its launcher gave them.

    rank, world_size: among all ranks. local_rank, local_world_size: among the ranks of this host. master_addr,
    master_port: rendezvous address. secret: shared by the ranks of this job, None if the launcher gave none. run_id,
    restart: the job and the attempt at it. elastic: torchrun started this rank. agent_store: torchrun's agent already
    listens on master_port with a torch store, of which every rank is a client. is_one_host: all ranks are certainly on
    this host. job: name of the job, the same on all of its ranks. local_address: address at which the ranks of other
    hosts reach this one; None: the address of the route to rank 0 (`interface` chooses it).
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    secret: bytes | None = None
    run_id: str = ""
    restart: int = 0
    elastic: bool = False
    agent_store: bool = False
    is_one_host: bool = False
    job: str = ""
    local_address: str | None = None

    @property
    def address(self) -> str:
        """Rendezvous address as "host:port". An IPv6 address is put in brackets."""
        return join_address(self.master_addr, self.master_port)

    def check_secret(self) -> None:
        """Raises LaunchError if there is no secret, and no file or store in which ranks could share one."""
        if self.secret is None and not self.is_one_host and not self.elastic:
            raise LaunchError(
                "ECHELON_SECRET is not set, and not all ranks are on one host: set it on every rank to the same random "
                "text, such as the output of `openssl rand -hex 32`"
            )

    def __repr__(self) -> str:
        # Written to logs, so it never shows the secret.
        secret = "none" if self.secret is None else "given"
        return f"<Environment rank {self.rank} of {self.world_size} at {self.address}, secret {secret}>"


def read(environ: Mapping[str, str]) -> Environment | None:
    """Reads the launcher's variables from `environ`. None if there was no launcher.

    Raises:
        LaunchError: only some of the variables are set, two contradict each other, or one has an invalid value.
        InvalidWorldSize, InvalidRank: a number of ranks, or a rank, is out of range.
    """
    present = [name for name in REQUIRED if environ.get(name)]
    # Before the check for contradictions: srun or mpirun may have started torchrun's agent, and its ranks inherit the
    # variables of the agent.
    if len(present) == len(REQUIRED) and "TORCHELASTIC_RUN_ID" in environ:
        return _read_common(environ)
    launched = _translation(environ)
    if launched is not None:
        _check_agreement(Variables(environ), launched.variables, _WHO)
    if len(present) == len(REQUIRED):
        return _read_common(environ)
    if launched is not None:
        return _read_translated(environ, launched)
    if not present:
        check_alone(environ)
        return None
    missing = [name for name in REQUIRED if name not in present]
    raise LaunchError(
        f"{' and '.join(present)} set without {' and '.join(missing)}: "
        "set all four (a launcher such as `echelon run` does), or none for a world size of 1"
    )


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as a rank."""
    return bool(environ.get("RANK")) or _translation(environ) is not None


def on_one_host(rank: int, world_size: int) -> dict[str, str]:
    """Returns the variables that torchrun sets for a rank of one host, without the variables of its agent."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), world_size)
    return {"ROLE_NAME": "default"} | {name: str(value) for name, value in (ranks | sizes).items()}


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns `environ` for ranks that this process starts: without the variables of its own launcher."""
    return {name: value for name, value in environ.items() if not name.startswith(_LAUNCHERS)}


def read_secret(environ: Mapping[str, str]) -> bytes | None:
    """Returns ECHELON_SECRET. None if it is not set.

    Raises:
        LaunchError: it is too short to be a secret.
    """
    secret = environ.get("ECHELON_SECRET")
    if not secret:
        return None
    if len(secret) < MIN_SECRET_LENGTH:
        raise LaunchError(
            f"ECHELON_SECRET has {len(secret)} characters: use {MIN_SECRET_LENGTH} or more random ones, "
            "such as the output of `openssl rand -hex 32`"
        )
    return secret.encode()


def read_backend(environ: Mapping[str, str], backend: str) -> str:
    """Returns the backend to use: `backend`, or ECHELON_BACKEND if `backend` is "auto" and the variable is set.

    Raises:
        LaunchError: there is no backend of that name.
    """
    overruled = backend == "auto" and environ.get("ECHELON_BACKEND")
    name, source = (overruled, "ECHELON_BACKEND") if overruled else (backend, "backend")
    if isinstance(name, str) and name.partition(":")[0] in ("cpu", "cuda"):
        raise LaunchError(f"{source}={name!r} is a device: give it as echelon.init(device={name!r})")
    if name not in backends.NAMES:
        raise LaunchError(f"{source}={name!r} is unknown: {choices(name, backends.NAMES)}")
    return name


def _translation(environ: Mapping[str, str]) -> Translation | None:
    """Translates the variables of the innermost of mpirun, mpiexec and srun. None without one, or for a single rank."""
    open_mpi, pmi = from_open_mpi(environ), from_pmi(environ)
    if open_mpi is not None and pmi is not None:
        _check_agreement(open_mpi.variables, pmi.variables, _WHO[:2])
    launched = open_mpi or pmi
    # srun speaks PMI, too: without MPI_LOCALRANKID its own variables come first.
    if launched is None or (launched is pmi and not pmi.variables.text("LOCAL_RANK")):
        launched = from_slurm(environ) or launched
    return None if launched is None or launched.variables.text("WORLD_SIZE") == "1" else launched


def _check_agreement(ours: Variables, theirs: Variables, names: tuple[str, ...]) -> None:
    for name in names:
        mine, other = ours.text(name), theirs.text(name)
        if mine and other and mine != other:
            raise LaunchError(
                f"{ours.alias(name)}={mine} contradicts {theirs.alias(name)}={other}: "
                "two launchers, or one and a variable set by hand; unset the wrong one"
            )


class _Ranks(NamedTuple):
    """First fields of an Environment."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def _ranks(variables: Variables) -> _Ranks:
    world_size = variables.world_size("WORLD_SIZE")
    most = min(world_size, MAX_LOCAL_WORLD_SIZE)
    local_world_size = variables.world_size("LOCAL_WORLD_SIZE", default=world_size, maximum=most)
    rank = variables.rank("RANK", world_size)
    local_rank = variables.rank("LOCAL_RANK", local_world_size, default=rank % local_world_size)
    return _Ranks(rank, world_size, local_rank, local_world_size)


def _read_common(environ: Mapping[str, str]) -> Environment:
    variables = Variables(environ)
    ranks = _ranks(variables)
    host = variables.text("MASTER_ADDR").strip("[]")
    port = variables.number("MASTER_PORT", "a port, 1 to 65535", minimum=1, maximum=65535)
    run_id = variables.text("ECHELON_RUN_ID") or variables.text("TORCHELASTIC_RUN_ID")
    restart = variables.number("TORCHELASTIC_RESTART_COUNT", "a number of restarts", default=0)
    return Environment(
        *ranks,
        master_addr=host,
        master_port=port,
        secret=read_secret(environ),
        run_id=run_id,
        restart=restart,
        elastic="TORCHELASTIC_RUN_ID" in environ,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        # Only then may ranks share a secret in a file. LOCAL_WORLD_SIZE has a default, so it must really be set.
        is_one_host=_is_loopback(host)
        or (bool(variables.text("LOCAL_WORLD_SIZE")) and ranks.local_world_size == ranks.world_size),
        job=f"{join_address(host, port)}-{run_id}-{restart}",
    )


def _read_translated(environ: Mapping[str, str], launched: Translation) -> Environment:
    said = launched.variables
    ranks = _ranks(said)
    overruling = Variables(environ)  # MASTER_ADDR and MASTER_PORT, set by the user beside mpirun, mpiexec or srun
    host = overruling.text("MASTER_ADDR").strip("[]") or (
        loopback() if launched.is_one_host else said.text("MASTER_ADDR")
    )
    if not host:
        raise LaunchError(
            f"{launched.launcher} does not say on which host rank 0 is: set MASTER_ADDR to its address on every rank"
        )
    if launched.port is None and not overruling.text("MASTER_PORT"):
        raise LaunchError(
            f"{launched.launcher} gives the job no name to take a port from: set MASTER_PORT to a free port of rank "
            "0's host on every rank"
        )
    return Environment(
        *ranks,
        master_addr=host,
        master_port=overruling.number(
            "MASTER_PORT", "a port, 1 to 65535", default=launched.port, minimum=1, maximum=65535
        ),
        secret=read_secret(environ),
        run_id=overruling.text("ECHELON_RUN_ID") or launched.job,
        restart=said.number("RESTART", "a number of restarts", default=0),
        is_one_host=launched.is_one_host,
        job=launched.job or join_address(host, overruling.number("MASTER_PORT", "a port")),
    )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
