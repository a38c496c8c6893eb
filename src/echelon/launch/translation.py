"""What a launcher that has variables of its own told a rank, in the words of torchrun."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.launch.variables import Variables

PORTS = range(20000, 30000)
"""Those that Linux gives to nobody by itself: it takes them from 32768 on."""


@dataclass(frozen=True)
class Translation:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of a rank, and what is known of where ranks can meet.

    launcher: as users know it. variables: the four; MASTER_ADDR, where the launcher says on which other host rank 0
    may be; RESTART, which attempt at the job this is. job: a name that all ranks of this job have and no other job;
    empty if the launcher gives none. is_one_host: it is certain that all ranks are on this host.
    """

    launcher: str
    variables: Variables
    job: str
    is_one_host: bool

    @property
    def port(self) -> int | None:
        """A port that follows from the name of the job, so that no rank has to be told; None without a name."""
        return PORTS[zlib.crc32(self.job.encode()) % len(PORTS)] if self.job else None


def renamed(environ: Mapping[str, str], names: Mapping[str, str]) -> Variables:
    """Returns the variables that are torchrun's keys of `names`, as their values of `names` are set in `environ`."""
    return Variables({common: environ.get(own, "") for common, own in names.items()}, names)
