"""Pool of ranks that are forked from servers which have imported torch, so that no rank takes seconds for imports."""

import itertools
import multiprocessing
from multiprocessing import forkserver

import pytest

from echelon.launch.worker import Worker
from echelon.testing import RankPool


def new_worker(server):
    """Returns a process for ranks that this server forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
        return Worker(multiprocessing.get_context("forkserver"))


class PreloadedPool(RankPool):
    """Pool whose ranks come from these servers in turns."""

    def __init__(self, servers):
        super().__init__()
        self._servers = itertools.cycle(servers)

    def _new_worker(self):
        return new_worker(next(self._servers))
