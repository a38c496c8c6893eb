"""Runs a function on several local processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from echelon.arguments import MAX_LOCAL_WORLD_SIZE, check_default_timeout, check_world_size
from echelon.backends.torch_distributed.engine_names import ENGINES
from echelon.backends.torch_distributed.engines import check_available
from echelon.backends.work import DEFAULT_TIMEOUT
from echelon.errors import LaunchError
from echelon.launch import environment
from echelon.launch.job import pickle_call, run_job
from echelon.launch.worker import Worker, leave_if_imported

_PATIENCE = 2.0
"""Seconds that a worker gets to leave by itself after its work."""


def spawn(
    fn: Callable[..., object],
    world_size: int,
    args: Sequence[object] = (),
    backend: str = "auto",
    timeout: float = DEFAULT_TIMEOUT,
) -> list[Any]:
    """Runs `fn(group, *args)` on `world_size` new local processes and returns the results in rank order.

    Each process starts afresh and imports the module of `fn`, so a script that calls this guards the call with
    `if __name__ == "__main__":`. Arguments and results are pickled. No process is left behind, whatever happens.

    Args:
        fn: a function at the top level of a module.
        world_size: the number of processes, 1 to 4,096.
        args: what `fn` gets after the group.
        backend: as for `echelon.init`.
        timeout: seconds that a blocking call of the group waits unless told otherwise.

    Raises:
        InvalidWorldSize, LaunchError: what was asked for cannot be. PeerFailed: a process died, or left by
            `sys.exit` with an error status; it is named.
        Exception: what the first failing rank raised, with a note that names the rank. The others then get 3 s to
        end.
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
        for worker in workers:
            worker.dismiss()
        for worker in workers:
            worker.end(patience)
