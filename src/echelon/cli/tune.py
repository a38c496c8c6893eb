"""`echelon tune`: table of the fastest algorithms on this system."""

from __future__ import annotations

from echelon.bench.request import Tuning


def tune(tuning: Tuning) -> None:
    """Measures every collective algorithm and writes a table of the fastest.

    Run it on the ranks that jobs will have: -n on this host, or under a launcher on several hosts. A job uses the
    table on all its ranks if rank 0 finds the file. ECHELON_TUNED names another file, or is "off".
    """
    tuning.check()
    # Imports torch, which takes seconds: a wrong option is reported before.
    from echelon.bench.tune import run

    run(tuning)
