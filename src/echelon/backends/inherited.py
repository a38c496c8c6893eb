"""The error of communication in a process that was forked from a rank.

A forked child has neither the threads nor the connections of its parent, so groups and backends that it inherits cannot
be used there.
"""

from __future__ import annotations

import os

from echelon.errors import Closed


def inherited_error(what: str, owner: int) -> Closed:
    """Makes the error for the use of a group or backend of process `owner` in its forked child."""
    return Closed(
        f"{what} belongs to process {owner}, and this is its forked child {os.getpid()}: communicate in the parent, "
        "start the child by 'spawn', or make a group of the child's own with echelon.init()"
    )
