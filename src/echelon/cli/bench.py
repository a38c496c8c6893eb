"""`echelon bench`: speed of a collective, measured as nccl-tests does."""

from __future__ import annotations

from echelon.bench.request import Request


def bench(request: Request) -> int:
    """Measures a collective on new ranks of this host, or as one rank of a launcher's job.

    Prints the columns of nccl-tests. algbw is size / time, busbw the bus bandwidth (comparable to the hardware's
    peak), wrong the number of wrong elements on all ranks. Exits with status 1 if any element was wrong.
    """
    request = request.checked()
    # Imports torch, which takes seconds: a wrong option is reported before.
    from echelon.bench.measure import run

    return 1 if run(request) else 0  # the number of wrong values may not fit a status
