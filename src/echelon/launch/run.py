"""Implementation of `echelon run`: runs a program as all the ranks of one host.

torch.distributed.elastic.multiprocessing is not used. It ends the other ranks as soon as it notices a failure, so the
cause may be a rank that was about to report. It polls once a second, and copies output through files that it polls. Its
ranks outlive it when it is killed. Importing it takes seconds.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.errors import InvalidWorldSize, LaunchError
from echelon.launch.environment import without_launcher
from echelon.launch.launcher import Console, Launcher
from echelon.launch.report import ERROR_FILE
from echelon.launch.variables import ReservedPort, threads_per_rank

MAX_RANKS = 1024
"""Most ranks on one host. A larger number is taken for a typing error."""

GRACE = 3.0
"""Seconds that the other ranks get to report after the first failure."""


@dataclass(frozen=True)
class Program:
    """Program that every rank runs: a script, or a module as with `python -m`."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    def command(self) -> list[str]:
        """Returns the command line."""
        return [sys.executable, *(["-m"] if self.is_module else []), self.name, *self.args]

    def check(self) -> None:
        """Raises LaunchError if there is no such script."""
        if not self.is_module and os.path.isdir(self.name):
            raise LaunchError(f"script {self.name!r} is a folder: name a file in it, or run a package with -m")
        if not self.is_module and not os.path.isfile(self.name):
            raise LaunchError(f"script {self.name!r} does not exist in {os.getcwd()}: check its path")


def run(program: Program, num_ranks: int, console: Console, environ: Mapping[str, str], grace: float = GRACE) -> int:
    """Runs `program` as `num_ranks` ranks on this host, blocks until all have ended, and returns the exit status.

    Call it from the main thread: it takes over SIGINT, SIGTERM and SIGHUP while it runs.

    Args:
        program: script or module to run.
        num_ranks: number of ranks, at least 1.
        console: destination of the output.
        environ: environment of the ranks, without their ranks and rendezvous.
        grace: seconds that the other ranks get to report after the first failure.

    Returns:
        0, or the status of the first rank that failed, or 128 + the number of the signal that ended that rank or the
        launcher.

    Raises:
        InvalidWorldSize, LaunchError: nothing was started.
    """
    if num_ranks < 1:
        raise InvalidWorldSize(f"-n {num_ranks}: a world has at least 1 rank: give -n 1 or more")
    if num_ranks > MAX_RANKS:
        raise InvalidWorldSize(f"-n {num_ranks}: one host starts at most {MAX_RANKS} ranks: give a smaller number")
    if grace < 0:
        raise LaunchError(f"--grace {grace:g}: use a number of seconds, 0 or more")
    program.check()
    with tempfile.TemporaryDirectory(prefix="echelon-") as folder, ReservedPort() as port:
        environs = rank_environs(num_ranks, port, environ)
        for rank, each in enumerate(environs):
            each[ERROR_FILE] = os.path.join(folder, f"rank{rank}.json")
        with Launcher(console, grace) as launcher:
            return launcher.run(program.command(), environs)


def rank_environs(num_ranks: int, port: ReservedPort, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the environment of every rank: `environ` with rank, world size, rendezvous and secret."""
    common = {
        # Before `environ`: the user's own values of these three count.
        "OMP_NUM_THREADS": str(threads_per_rank(num_ranks)),
        "PYTHONFAULTHANDLER": "1",  # a crash in C code prints where Python was
        "PYTHONUNBUFFERED": "1",  # the launcher marks lines as they are written
        **without_launcher(environ),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": port.host,
        "MASTER_PORT": str(port.port),
        # New ones for each start, so ranks of another job or of an earlier one are refused.
        "ECHELON_SECRET": secrets.token_hex(32),
        "ECHELON_RUN_ID": secrets.token_hex(4),
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
