"""Filter of the standard logging module that adds the rank to each record."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

from echelon.arguments import is_count, is_iterable, shown
from echelon.errors import InvalidArgument
from echelon.group.group import ProcessGroup, check_group
from echelon.launch import environment
from echelon.launch.init import current_group


class RankFilter(logging.Filter):
    """Filter that gives each record `rank` and `world_size`, and drops records of ranks outside of `ranks`.

    `logging.Formatter("%(asctime)s [%(rank)d/%(world_size)d] %(message)s")` shows them. On a handler it serves all
    loggers; on a logger only this one.
    """

    def __init__(self, group: ProcessGroup | None = None, ranks: Collection[int] | None = None) -> None:
        """Makes a filter.

        Args:
            group: the ranks. None: at each record, that of `echelon.init()` or of the simulated rank; before there is
                one, the launcher's; without a launcher rank 0 of 1.
            ranks: ranks whose records pass, such as [0]. None: all.

        Raises:
            InvalidArgument: an argument has a wrong type.
        """
        super().__init__()
        chosen = list(ranks) if is_iterable(ranks) else [] if ranks is None else [-1]
        if not all(map(is_count, chosen)):
            raise InvalidArgument(f"ranks={shown(ranks)}: give a list of ranks, such as [0], or None for all")
        self._group = None if group is None else check_group(group)
        self._ranks = None if ranks is None else frozenset(chosen)

    def filter(self, record: logging.LogRecord) -> bool:
        """Sets the fields of a record. Returns whether it passes.

        Raises:
            LaunchError, InvalidWorldSize, InvalidRank: there is no group, and variables of a launcher are wrong.
        """
        group = self._group if self._group is not None else current_group()
        if group is not None:
            rank, world_size = group.rank, group.world_size
        else:
            launched = environment.read(os.environ)
            rank, world_size = (0, 1) if launched is None else (launched.rank, launched.world_size)
        vars(record).update(rank=rank, world_size=world_size)
        return self._ranks is None or rank in self._ranks
