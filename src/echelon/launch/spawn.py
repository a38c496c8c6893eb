"""`echelon.spawn`: runs a function on several local processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from echelon.arguments import MAX_LOCAL_WORLD_SIZE, check_default_timeout, check_world_size
from echelon.backends.torch_distributed.engines import ENGINES, check_available
from echelon.backends.work import DEFAULT_TIMEOUT
from echelon.errors import LaunchError
from echelon.launch import environment
from echelon.launch.job import pickle_call, run_job
from echelon.launch.worker import Worker, leave_if_imported

_PATIENCE = 2.0
"""Seconds that a worker gets to exit by itself after a job that succeeded. After a failure workers are killed."""


def spawn(
    fn: Callable[..., object],
    world_size: int,
    args: Sequence[object] = (),
    backend: str = "auto",
    timeout: float = DEFAULT_TIMEOUT,
) -> list[Any]:
    """Runs `fn(group, *args)` on `world_size` new local processes and returns the results in rank order. Blocks.

    Each process starts a new interpreter and imports the module of `fn`, so a script must guard the call with
    `if __name__ == "__main__":`. Arguments and results are pickled. No process outlives the call.

    Args:
        fn: function at the top level of a module.
        world_size: number of processes, 1 to 4,096.
        args: arguments of `fn` after the group.
        backend: as for `echelon.init`.
        timeout: default timeout of the group's blocking calls, seconds.

    Raises:
        InvalidWorldSize, LaunchError: an argument is invalid, or the backend is not available.
        PeerFailed: a process died, or left by `sys.exit` with an error status. It names the rank.
        Exception: the exception of the first failing rank, with a note that names the rank. The others then get 3 s
            to end.
    """
    leave_if_imported()
    check_world_size(world_size, maximum=MAX_LOCAL_WORLD_SIZE)
    timeout = check_default_timeout(timeout, LaunchError)
    name = environment.read_backend(os.environ, backend)
    if name in ENGINES:
        check_available(name)
    if name == "simulated":
        raise LaunchError("backend='simulated' has no processes: call echelon.simulate(fn, world_size)")
    call = pickle_call(fn, args)
    workers: list[Worker] = []
    patience = 0.0
    try:
        for _ in range(world_size):
            workers.append(Worker())
        results = run_job(workers, call, backend=name, timeout=timeout)
        patience = _PATIENCE
        return results
    finally:
        # All are asked before the first is waited for, so that they exit at the same time.
        for worker in workers:
            worker.dismiss()
        for worker in workers:
            worker.end(patience)
