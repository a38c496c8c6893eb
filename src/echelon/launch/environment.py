"""Reads what a launcher tells a rank through environment variables.

torchrun, a Kubernetes PyTorchJob and `echelon run` all set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The rest is
optional: LOCAL_RANK, LOCAL_WORLD_SIZE, ECHELON_SECRET, ECHELON_RUN_ID, and what torchrun adds about its agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.errors import InvalidRank, InvalidWorldSize, LaunchError

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""All four or none: without them a program is a world of one."""

BACKENDS = ("auto", "shm", "tcp", "simulated")
"""The names that a program may ask for."""

MIN_SECRET_LENGTH = 16
"""Characters. Shorter ones can be guessed."""


@dataclass(frozen=True)
class Environment:
    """What a launcher told this rank.

    rank, world_size: among all ranks; local_rank, local_world_size: among those of this host. master_addr,
    master_port: where ranks meet. secret: shared by the ranks of this job, None if the launcher gave none. run_id,
    restart: which job, and which attempt at it. elastic: torchrun started this rank. agent_store: torchrun's agent
    already listens on master_port with a torch store, and every rank is a client of it.
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

    @property
    def address(self) -> str:
        """Where ranks meet, as "host:port"; an IPv6 address is put in brackets."""
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"{host}:{self.master_port}"

    def __repr__(self) -> str:
        # Ends up in logs, so it never shows the secret.
        secret = "none" if self.secret is None else "given"
        return f"<Environment rank {self.rank} of {self.world_size} at {self.address}, secret {secret}>"


def read(environ: Mapping[str, str]) -> Environment | None:
    """Returns what the launcher said in `environ`; None if there was no launcher.

    Raises:
        LaunchError: only some of the variables are set, or one is not what it should be.
        InvalidWorldSize, InvalidRank: WORLD_SIZE or RANK is out of range.
    """
    present = [name for name in REQUIRED if environ.get(name)]
    if not present:
        return None
    if len(present) < len(REQUIRED):
        missing = [name for name in REQUIRED if name not in present]
        raise LaunchError(
            f"{' and '.join(present)} set without {' and '.join(missing)}: "
            "set all four (a launcher such as `echelon run` does), or none for a world of one"
        )
    world_size = _world_size(environ, "WORLD_SIZE")
    local_world_size = _world_size(environ, "LOCAL_WORLD_SIZE", default=world_size, maximum=world_size)
    rank = _rank(environ, "RANK", world_size)
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=_rank(environ, "LOCAL_RANK", local_world_size, default=rank % local_world_size),
        local_world_size=local_world_size,
        master_addr=environ["MASTER_ADDR"].strip("[]"),
        master_port=_number(environ, "MASTER_PORT", "a port, 1 to 65535", minimum=1, maximum=65535),
        secret=read_secret(environ),
        run_id=environ.get("ECHELON_RUN_ID") or environ.get("TORCHELASTIC_RUN_ID", ""),
        restart=_number(environ, "TORCHELASTIC_RESTART_COUNT", "a number of restarts", default=0),
        elastic="TORCHELASTIC_RUN_ID" in environ,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def read_secret(environ: Mapping[str, str]) -> bytes | None:
    """Returns ECHELON_SECRET, None if it is not set.

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
    """Returns the backend to use: `backend`, or ECHELON_BACKEND if it is "auto".

    Raises:
        LaunchError: there is no backend of that name.
    """
    overruled = backend == "auto" and environ.get("ECHELON_BACKEND")
    name, source = (overruled, "ECHELON_BACKEND") if overruled else (backend, "backend")
    if name not in BACKENDS:
        raise LaunchError(f"{source}={name!r} is unknown: use one of {', '.join(BACKENDS)}")
    return name


def _world_size(environ: Mapping[str, str], name: str, default: int | None = None, maximum: int | None = None) -> int:
    text = environ.get(name)
    if not text and default is not None:
        return default
    value = _parse(text or "")
    if value is None or value < 1 or (maximum is not None and value > maximum):
        upper = "or more" if maximum is None else f"to {maximum}"
        raise InvalidWorldSize(f"{name}={text!r}: set it to a number of ranks, 1 {upper}")
    return value


def _rank(environ: Mapping[str, str], name: str, world_size: int, default: int | None = None) -> int:
    text = environ.get(name)
    if not text and default is not None:
        return default
    value = _parse(text or "")
    if value is None:
        raise InvalidRank(text, world_size, name)
    if not 0 <= value < world_size:
        raise InvalidRank(value, world_size, name)
    return value


def _number(
    environ: Mapping[str, str],
    name: str,
    what: str,
    *,
    default: int | None = None,
    minimum: int = 0,
    maximum: int | None = None,
) -> int:
    text = environ.get(name)
    if not text and default is not None:
        return default
    value = _parse(text or "")
    if value is None or value < minimum or (maximum is not None and value > maximum):
        raise LaunchError(f"{name}={text!r} is not {what}: correct it")
    return value


def _parse(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
