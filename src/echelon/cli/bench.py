"""`echelon bench` and `echelon tune`: speed of collectives, as nccl-tests measures it, and a table of the fastest."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from echelon.bench.request import Request, Tuning, is_launched
from echelon.cli.completion import NETWORKS
from echelon.cli.options import check_name
from echelon.cli.output import working
from echelon.launch.backends import NAMES as BACKENDS

_PER_SECOND = 1.0
"""How often the progress is drawn: more often would take time of the ranks that are measured."""


def bench(request: Request) -> int:
    """Measures a collective on new ranks of this host, or as one rank of a launcher's job.

    Prints the columns of nccl-tests. algbw is size / time, busbw the bus bandwidth (comparable to the hardware's
    peak), wrong the number of wrong elements on all ranks. Exits with status 1 if any element was wrong.
    """
    request = request.checked()
    check_name("--backend", request.backend, BACKENDS)
    check_name("--network", request.network, NETWORKS)
    check_name("--local-network", request.local_network, NETWORKS)
    # Imports torch, which takes seconds: a wrong option is reported before.
    from echelon.bench.measure import run

    # Ranks of a launcher, mpirun among them, do not know whether a line of progress is on their terminal.
    shown = nullcontext() if is_launched(request) or request.vs == "mpi" else _shown(f"measuring {request.operation}")
    with shown:
        return 1 if run(request) else 0  # the number of wrong values may not fit a status


def tune(tuning: Tuning) -> None:
    """Measures every collective algorithm and writes a table of the fastest.

    Run it on the ranks that jobs will have: -n on this host, or under a launcher on several hosts. A job uses the
    table on all its ranks if rank 0 finds the file. ECHELON_TUNED names another file, or is "off".
    """
    tuning.check()
    check_name("--network", tuning.network, NETWORKS)
    # Imports torch, which takes seconds: a wrong option is reported before.
    from echelon.bench.tune import run

    with nullcontext() if is_launched(tuning) else _shown("measuring algorithms"):
        run(tuning)


def _shown(what: str) -> AbstractContextManager[None]:
    return working(what, per_second=_PER_SECOND)
