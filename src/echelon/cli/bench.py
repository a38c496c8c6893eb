"""`echelon bench` and `echelon tune`: speed of collectives, as nccl-tests measures it, and a table of the fastest."""

from __future__ import annotations

from echelon.bench.request import Request, Tuning


def bench(request: Request) -> int:
    """Measures a collective on new ranks of this host, or as one rank of a launcher's job.

    Prints the columns of nccl-tests. algbw is size / time, busbw the bus bandwidth (comparable to the hardware's
    peak), wrong the number of wrong elements on all ranks. Exits with status 1 if any element was wrong.
    """
    request = request.checked()
    # Imports torch, which takes seconds: a wrong option is reported before.
    from echelon.bench.measure import run

    return 1 if run(request) else 0  # the number of wrong values may not fit a status


def tune(tuning: Tuning) -> None:
    """Measures every collective algorithm and writes a table of the fastest.

    Run it on the ranks that jobs will have: -n on this host, or under a launcher on several hosts. A job uses the
    table on all its ranks if rank 0 finds the file. ECHELON_TUNED names another file, or is "off".
    """
    tuning.check()
    # Imports torch, which takes seconds: a wrong option is reported before.
    from echelon.bench.tune import run

    run(tuning)
