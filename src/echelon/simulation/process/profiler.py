"""torch's profiler on simulated ranks: a process has one session, so one rank records at a time."""

from __future__ import annotations

from collections.abc import Callable

from echelon._torch_private.modules import profilers_that_ask
from echelon.errors import UnsupportedOp
from echelon.replacements import Replacement


def one_session_at_a_time(rank_here: Callable[[], int | None]) -> list[Replacement]:
    """Raises UnsupportedOp on a rank that starts torch's profiler while another rank uses it.

    torch counts on a single session, and the second end of one ends the process.

    Args:
        rank_here: Returns the rank of the calling thread. None in threads that are no rank's.
    """
    owner: int | None = None

    def begin() -> None:
        nonlocal owner
        rank = rank_here()
        if owner is not None and rank is not None and owner != rank:
            raise UnsupportedOp(
                f"torch's profiler on rank {rank}, while rank {owner} uses it: simulated ranks share one process, "
                "which has one session of it: profile a single rank, as in `if rank == 0:`"
            )
        owner = rank

    def end() -> None:
        nonlocal owner
        if owner == rank_here():
            owner = None

    return profilers_that_ask(begin, end)
