"""`echelon.spawn`, and pools of local processes that run one function after another as ranks.

Strategy. The parent waits for all workers at once. After the first failure the others get 3 s (`GRACE`) to report,
because the first failure that is noticed need not be the cause. Then the exception of the first cause is raised.
"""

from __future__ import annotations

import atexit
import os
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, NoReturn

from echelon.arguments import MAX_LOCAL_WORLD_SIZE, check_default_timeout, check_world_size, refuse_others
from echelon.backends.torch_distributed.engines import ENGINES, check_available
from echelon.backends.work import DEFAULT_TIMEOUT
from echelon.errors import LaunchError, PeerFailed, Timeout
from echelon.launch import environment
from echelon.launch.call import OF_OTHER_LAUNCHERS, check_no_keywords, rank_call
from echelon.launch.pickling import dumps
from echelon.launch.report import GRACE, are_alike, consequences, first_cause
from echelon.launch.variables import ReservedPort, threads_per_rank
from echelon.launch.worker import Job, Outcome, Worker, leave_if_imported
from echelon.wording import listed

_STARTUP = 60.0
"""Additional seconds for new workers, which import torch first."""

_PATIENCE = 2.0
"""Seconds for a worker to exit by itself when its pool closes."""


@refuse_others(**OF_OTHER_LAUNCHERS, start_method=" each process is a new interpreter: leave it out")
def spawn(
    fn: Callable[..., object],
    world_size: int,
    args: Sequence[object] = (),
    backend: str = "auto",
    timeout: float = DEFAULT_TIMEOUT,
) -> list[Any]:
    """Runs `fn(group, *args)` on `world_size` new local processes and returns the results in rank order. Blocks.

    A function that does not take the group is called as `fn(*args)`. Each process has RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, so that a program which calls
    `torch.distributed.init_process_group("gloo")` runs unchanged.

    Each process starts a new interpreter and imports the module of `fn`, so a script must guard the call with
    `if __name__ == "__main__":`. Arguments and results are pickled. No process outlives the call. Processes that a rank
    starts, such as the workers of a DataLoader, start as they would in this one.

    Args:
        fn: function at the top level of a module.
        world_size: number of processes, 1 to 4,096.
        args: arguments of `fn`, without the group.
        backend: as for `echelon.init`.
        timeout: default timeout of the group's blocking calls, seconds.

    Raises:
        InvalidWorldSize, LaunchError: an argument is invalid, or the backend is not available.
        PeerFailed: a process died, or left by `sys.exit` with an error status. It names the rank.
        Exception: the exception of the first failing rank, with a note that names the rank. The others then get 3 s
            to end.
    """
    leave_if_imported()
    with RankPool() as pool:
        return pool.run_job(fn, world_size, args, backend, timeout, is_limited=False)


class RankPool:
    """Pool of worker processes that run functions one after another, each as the ranks of a new group.

    Workers are started on first use. A worker that has died, was still busy at the end of its job, or has left torch's
    default group open, is replaced at the next call. Use the pool from one thread; make it a fixture of the whole
    session:

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

    @refuse_others(**OF_OTHER_LAUNCHERS, args=" give them by place, as run(fn, 2, first, second)")
    def run(
        self, fn: Callable[..., object], world_size: int, *args: object, backend: str = "auto", timeout: float = 30.0
    ) -> list[Any]:
        """Runs `fn(group, *args)` on `world_size` processes and returns the results in rank order. Blocks meanwhile.

        As by `spawn`, a function that does not take the group is called as `fn(*args)`, and the environment says to
        torch which rank this is. Afterwards a worker's environment is as before the job. Other state of its process
        stays for the next one, such as the working directory and torch's default dtype.

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
        return self.run_job(fn, world_size, args, backend, timeout, is_limited=True)

    def run_job(
        self,
        fn: Callable[..., object],
        world_size: int,
        args: Sequence[object],
        backend: str,
        timeout: float,
        *,
        is_limited: bool,
    ) -> list[Any]:
        """Runs a function as `run` does. Returns the results in rank order.

        Args:
            fn, world_size, args, backend, timeout: as of `run`. `args` is a sequence.
            is_limited: whether `timeout` is for the whole of `fn`, too.

        Raises:
            InvalidWorldSize, LaunchError, Timeout, PeerFailed, Exception: as `run`.
        """
        check_world_size(world_size, maximum=MAX_LOCAL_WORLD_SIZE)
        timeout = check_default_timeout(timeout, LaunchError)
        check_no_keywords("backend", backend)
        name = environment.read_backend(os.environ, backend)
        if name in ENGINES:
            check_available(name)
        if name == "simulated":
            raise LaunchError("backend='simulated' has no processes: call echelon.simulate(fn, world_size)")
        call = pickle_call(fn, args)
        workers = self._take(world_size)
        fresh = any(worker.is_fresh for worker in workers)  # the import of torch does not count as time of `fn`
        deadline = timeout + fresh * _STARTUP if is_limited else None
        try:
            return run_job(workers, call, backend=name, timeout=timeout, deadline=deadline)
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
        _end(workers, _PATIENCE)

    def _new_worker(self) -> Worker:
        return Worker()

    def _take(self, count: int) -> list[Worker]:
        """Removes `count` workers from the pool, starting new ones if there are too few."""
        if self._closed:
            raise LaunchError("this RankPool is closed: make a new one")
        idle, self._workers = self._workers, []
        self._give_back(idle)  # ends the ones that have died since
        while len(self._workers) < count:
            self._workers.append(self._new_worker())
        taken = self._workers[:count]
        del self._workers[:count]
        return taken

    def _give_back(self, workers: list[Worker]) -> None:
        """Returns usable workers to the front of the pool and ends the others."""
        usable = [worker for worker in workers if not (worker.is_busy or worker.is_spent or worker.is_dead())]
        _end([worker for worker in workers if worker.is_spent], _PATIENCE)
        _end([worker for worker in workers if worker not in usable and not worker.is_spent], 0.0)
        self._workers[:0] = usable

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RankPool: {'closed' if self._closed else f'{len(self._workers)} idle workers'}>"


def _end(workers: Sequence[Worker], patience: float) -> None:
    """Ends workers. Idle ones get `patience` seconds to exit by themselves."""
    for worker in workers:  # all first, so that they exit at the same time
        worker.dismiss()
    for worker in workers:
        worker.end(patience)


def pickle_call(function: Callable[..., object], args: Sequence[object]) -> bytes:
    """Returns the call that each rank makes, a `RankCall`, as bytes that another process can load.

    Raises:
        LaunchError: the function cannot be called with these arguments, the other process could not find it by its
            name, or an argument cannot be pickled.
    """
    # Refused here: every worker would fail while it imports the program, with a message about a file named <stdin>
    # for instance.
    call = rank_call(function, args)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if "<" in name:
        raise LaunchError(f"fn={name} cannot be found by name in another process: def it at the top level of a module")
    main = sys.modules["__main__"]
    path = None if main.__spec__ else getattr(main, "__file__", None)
    if path is None and main.__spec__ is None and getattr(function, "__module__", None) == "__main__":
        raise LaunchError(f"fn={name} was typed in, so no other process can import it: put it in a file")
    if path is not None and not os.path.exists(path):
        raise LaunchError(f"this program was read from {path}, so no other process can import it: put it in a file")
    try:
        return dumps(call)
    except Exception as error:  # an argument's class may raise anything here
        raise LaunchError(
            f"fn={name} and its arguments cannot be pickled ({error}): pass functions of a module and plain values"
        ) from error


def run_job(
    workers: Sequence[Worker], call: bytes, *, backend: str, timeout: float, deadline: float | None = None
) -> list[Any]:
    """Runs `call` on `workers`, as ranks 0, 1, ..., and returns their results in rank order. Blocks.

    Args:
        workers: one idle worker per rank.
        call: from `pickle_call`.
        backend: name of the group's backend.
        timeout: the group's default timeout, seconds.
        deadline: seconds after which the job is given up. None: never.

    Raises:
        Exception: the exception of the first failing rank, with a note that names the rank; PeerFailed if it died.
        Timeout: the deadline passed. Workers that have not reported are still running.
    """
    world_size = len(workers)
    # Two ports: torch's rendezvous may listen at its own while the function's module is imported, before ours does.
    with ReservedPort() as port, ReservedPort() as torch_port:
        job = Job(
            call=call,
            rank=0,
            world_size=world_size,
            address=port.address,
            master_addr=torch_port.host,
            master_port=torch_port.port,
            secret=secrets.token_hex(32).encode(),
            run_id=secrets.token_hex(4),
            backend=backend,
            timeout=timeout,
            # A value that the user has set counts; torch reads it when a worker starts.
            num_threads=None if "OMP_NUM_THREADS" in os.environ else threads_per_rank(world_size),
        )
        for rank, worker in enumerate(workers):
            worker.submit(job._replace(rank=rank))
        outcomes = _gather(workers, deadline)
    if any(outcome.failure for outcome in outcomes.values()):
        _raise_first(outcomes, world_size)
    missing = [rank for rank in range(world_size) if rank not in outcomes]
    if missing:
        raise Timeout(
            f"{listed(missing)} of {world_size} did not return within {deadline:g} s: "
            "see where it waits, or give it more time"
        )
    return [pickle.loads(outcomes[rank].result or b"") for rank in range(world_size)]


def _gather(workers: Sequence[Worker], deadline: float | None) -> dict[int, Outcome]:
    """Collects outcomes until all have come, the grace after a failure is over, or the deadline has passed."""
    until = None if deadline is None else time.monotonic() + deadline
    failed = False
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(workers):
        open_ranks = [rank for rank in range(len(workers)) if rank not in outcomes]
        # The pidfd too: a worker's death need not end its connection, which a child of the worker may keep open.
        sources = [source for rank in open_ranks for source in (workers[rank].connection, workers[rank].pidfd)]
        ready = wait(sources, None if until is None else max(0.0, until - time.monotonic()))
        for rank in open_ranks:
            outcome = workers[rank].outcome(rank)
            if outcome is not None:
                outcomes[rank] = outcome
                if outcome.failure and not failed:
                    failed, until = True, min(until or float("inf"), time.monotonic() + GRACE)
        if not ready:
            break
    return outcomes


def _raise_first(outcomes: dict[int, Outcome], world_size: int) -> NoReturn:
    failures = [outcome.failure for outcome in outcomes.values() if outcome.failure]
    cause = first_cause(failures)
    pickled = outcomes[cause.rank].error
    error: BaseException = pickle.loads(pickled) if pickled else PeerFailed(cause.rank, f"it {cause.summary}")
    # Pickling loses an exception's traceback, so the rank's comes along as a note.
    there = f":\n{cause.traceback.rstrip()}" if cause.traceback else ""
    if are_alike(failures, world_size):
        error.add_note(f"all {world_size} ranks raised this error, as rank {cause.rank}{there}")
        raise error
    error.add_note(f"rank {cause.rank} failed first{there}")
    for line in consequences(cause, (failure for failure in failures if failure is not cause)):
        error.add_note(f"then {line}")
    raise error
