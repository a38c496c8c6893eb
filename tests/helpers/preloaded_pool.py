"""Pool of ranks that are forked from servers which have imported torch, so that no rank takes seconds for imports."""

import contextlib
import multiprocessing
import os
import signal
from multiprocessing import forkserver

import pytest

from echelon.launch.worker import Worker
from echelon.testing import RankPool

PRELOADED = ["torch", "torch._dynamo", "torch.testing", "echelon.launch.worker", "echelon.pipeline", "pytest"]
"""Modules that most ranks of tests import. Optimizers of torch import torch._dynamo, which takes as long as torch."""


class Server(forkserver.ForkServer):
    """Process that has imported what ranks need, and becomes a rank at each fork."""

    def __init__(self):
        super().__init__()
        self.set_forkserver_preload(PRELOADED)
        self.ensure_running()  # it imports from now on

    def new_worker(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forkserver, "connect_to_new_process", self.connect_to_new_process)
            return Worker(multiprocessing.get_context("forkserver"))

    def end(self):
        # It has nothing to clean up, and torch takes a second to end.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._forkserver_pid, signal.SIGKILL)
        self._stop()


class PreloadedPool(RankPool):
    """Pool whose ranks come from two servers in turns.

    Two, because a forked process has its server's hash seed: ranks whose order of calls is that of a set of texts still
    differ, as ranks of users do.
    """

    def __init__(self):
        super().__init__()
        self._servers = [Server(), Server()]

    def _new_worker(self):
        self._servers.reverse()
        return self._servers[0].new_worker()

    def close(self):
        """Ends the servers, too."""
        super().close()
        while self._servers:
            self._servers.pop().end()
