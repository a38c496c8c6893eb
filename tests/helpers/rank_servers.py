"""Servers that have imported torch and become ranks by forks. All processes of a run of the tests share two of them.

Two, because a forked process has its server's hash seed: ranks whose order of calls is that of a set of texts still
differ, as ranks of users do. It imports no torch: the process that shares the tests out to others starts the servers.
"""

import contextlib
import os
import signal
from multiprocessing import forkserver

PRELOADED = ["torch", "torch._dynamo", "torch.testing", "echelon.launch.worker", "echelon.pipeline", "pytest"]
"""Modules that most ranks of tests import. Optimizers of torch import torch._dynamo, which takes as long as torch."""


class Server(forkserver.ForkServer):
    """Process that has imported what ranks need, and becomes a rank at each fork."""

    def __init__(self):
        super().__init__()
        self.set_forkserver_preload(PRELOADED)
        with _silent():
            self.ensure_running()  # it imports from now on

    def address(self):
        """Returns what another process makes a `DistantServer` from. Since Python 3.14 a key is part of it."""
        return self._forkserver_address, getattr(self, "_forkserver_authkey", None)

    def end(self):
        # It has nothing to clean up, and torch takes a second to end.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._forkserver_pid, signal.SIGKILL)
        self._stop()


class DistantServer(forkserver.ForkServer):
    """Server that another process has started, and ends."""

    def __init__(self, address):
        super().__init__()
        self._forkserver_address, self._forkserver_authkey = address
        _, self._forkserver_alive_fd = os.pipe()  # for its children, which keep their server alive by it

    def ensure_running(self):
        """Starts nothing."""


@contextlib.contextmanager
def _silent():
    """Gives processes that are started meanwhile no standard output. Ranks would write between the dots of pytest."""
    kept = [os.dup(1), os.dup(2)]
    with open(os.devnull, "w") as nowhere:
        for number in (1, 2):
            os.dup2(nowhere.fileno(), number)
    try:
        yield
    finally:
        for number, each in enumerate(kept, 1):
            os.dup2(each, number)
            os.close(each)
