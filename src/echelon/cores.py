"""Number of cores that this process may use."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    # By affinity, not by os.cpu_count(), which also counts cores that this process may not use.
    return len(os.sched_getaffinity(0))
