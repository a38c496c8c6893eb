"""Pool of processes that are ranks of tests, kept between tests: importing torch costs seconds per process."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any

from echelon.arguments import MAX_LOCAL_WORLD_SIZE, check_default_timeout, check_world_size
from echelon.errors import LaunchError
from echelon.launch import environment
from echelon.launch.spawn import pickle_call, run_job
from echelon.launch.worker import Worker

_STARTUP = 60.0
"""Additional seconds for new workers, which import torch first."""

_PATIENCE = 2.0
"""Seconds for a worker to exit by itself when the pool closes."""


class RankPool:
    """Pool of worker processes that run functions one after another, each as the ranks of a new group.

    Workers are started on first use. A worker that has died, or was still busy at the end of its job, is replaced at
    the next call. Use the pool from one thread; make it a fixture of the whole session:

        @pytest.fixture(scope="session")
        def pool():
            with RankPool() as pool:
                yield pool
    """

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._closed = False
        self._process = os.getpid()
        atexit.register(self.close)

    def run(
        self, fn: Callable[..., object], world_size: int, *args: object, backend: str = "auto", timeout: float = 30.0
    ) -> list[Any]:
        """Runs `fn(group, *args)` on `world_size` processes and returns the results in rank order. Blocks meanwhile.

        Args:
            fn: a function at the top level of a module that the workers can import.
            world_size: the number of ranks; rank r is the same process each time, while it lives.
            args: further arguments of `fn`; pickled.
            backend: as for `spawn`.
            timeout: seconds, for every blocking call of the group and for the whole of `fn`.

        Raises:
            InvalidWorldSize, LaunchError: a wrong argument, or a closed pool.
            Timeout: some ranks did not return in time; the message names them.
            PeerFailed: a process died; the message names it.
            Exception: the exception of the first failing rank, with a note that names the rank.
        """
        check_world_size(world_size, maximum=MAX_LOCAL_WORLD_SIZE)
        timeout = check_default_timeout(timeout, LaunchError)
        name = environment.read_backend(os.environ, backend)
        call = pickle_call(fn, args)
        workers = self._take(world_size)
        fresh = any(worker.is_fresh for worker in workers)  # the import of torch does not count as time of `fn`
        try:
            return run_job(workers, call, backend=name, timeout=timeout, deadline=timeout + fresh * _STARTUP)
        finally:
            self._give_back(workers)

    def close(self) -> None:
        """Ends all workers. Idempotent; called at the end of the program too.

        Does nothing in a forked child, since the workers belong to the parent.
        """
        self._closed = True
        atexit.unregister(self.close)
        if os.getpid() != self._process:  # a forked child
            return
        workers, self._workers = self._workers, []
        for worker in workers:  # all first, so that they exit at the same time
            worker.dismiss()
        for worker in workers:
            worker.end(_PATIENCE)

    def _take(self, count: int) -> list[Worker]:
        """Removes `count` workers from the pool, starting new ones if there are too few."""
        if self._closed:
            raise LaunchError("this RankPool is closed: make a new one")
        idle, self._workers = self._workers, []
        self._give_back(idle)  # ends the ones that have died since
        while len(self._workers) < count:
            self._workers.append(Worker())
        taken = self._workers[:count]
        del self._workers[:count]
        return taken

    def _give_back(self, workers: list[Worker]) -> None:
        """Returns usable workers to the front of the pool and ends the others."""
        usable = [worker for worker in workers if not worker.is_busy and not worker.is_dead()]
        for worker in workers:
            if worker not in usable:
                worker.end()
        self._workers[:0] = usable

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RankPool: {'closed' if self._closed else f'{len(self._workers)} idle workers'}>"
