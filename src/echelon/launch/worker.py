"""Worker: a local process that runs jobs of its parent, each as one rank of a group.

Strategy. The main thread of a worker runs jobs, one after another. A second thread only reads the connection to the
parent. If the connection ends without a last word, the parent is gone, and the thread ends the process at once, in the
middle of a job too. The parent detects the death of a worker by its pidfd. A child of the worker, such as a
DataLoader's, may keep the connection open.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import NamedTuple

import torch
import torch.distributed as dist

from echelon.arguments import named
from echelon.backends.tcp.backend import TcpBackend
from echelon.errors import LaunchError, fails
from echelon.group.group import ProcessGroup
from echelon.launch import report
from echelon.launch.backends import OWN_NAMES
from echelon.launch.call import RankCall
from echelon.launch.environment import on_one_host, without_launcher
from echelon.launch.init import CONNECT_TIMEOUT, carry, provide
from echelon.launch.pickling import dumps
from echelon.launch.report import RankFailure, describe_exit, exit_status, unwrapped
from echelon.launch.tuned import agreed_table

_NEW_INTERPRETER = multiprocessing.get_context("spawn")
_FAREWELL = b""
_UNGUARDED = 87
"""Exit status of a worker in which importing the program started further workers."""
_ADVICE = (
    "the program calls echelon.spawn (or a RankPool) whenever it is imported, and every new process imports it: put "
    'the call under `if __name__ == "__main__":`'
)


class Job(NamedTuple):
    """Job of one worker: the pickled `call` to run as `rank` of `world_size`, with the rendezvous at `address`.

    call: a `RankCall`, pickled. master_addr, master_port: address for torch's own rendezvous. backend: one of
    `backends.NAMES`. num_threads: number of torch's threads; None leaves torch's default. timeout: the group's default
    timeout, seconds.
    """

    call: bytes
    rank: int
    world_size: int
    address: str
    master_addr: str
    master_port: int
    secret: bytes
    run_id: str
    backend: str
    timeout: float
    num_threads: int | None


class Outcome(NamedTuple):
    """Outcome of a job: the pickled result, or a failure and, if it can be pickled, its exception.

    is_last: the worker cannot run another job.
    """

    result: bytes | None
    failure: RankFailure | None = None
    error: bytes | None = None
    is_last: bool = False


def leave_if_imported() -> None:
    """Exits a worker whose program starts workers while it is imported, without a `__main__` guard.

    Otherwise each worker would start others without end. The parent reports the exit status.
    """
    # multiprocessing runs the program's main module as `__mp_main__`, and makes it `__main__` when it has been run to
    # its end. In between this process is still importing the program.
    imported = sys.modules.get("__mp_main__")
    if imported is not None and imported is not sys.modules["__main__"]:
        raise SystemExit(_UNGUARDED)


class Worker:
    """Parent's handle of one worker process.

    is_fresh: it has had no job yet, and may still be importing torch. is_busy: it has a job without a known outcome.
    is_spent: it cannot run another job.
    """

    def __init__(self, context: SpawnContext | ForkServerContext = _NEW_INTERPRETER) -> None:
        """Starts the process.

        Args:
            context: way to start it. With a fork server the time of imports is that of the server.
        """
        leave_if_imported()
        self.connection, theirs = context.Pipe()
        method = multiprocessing.get_start_method(allow_none=True)
        # Inherited by the worker and its children, such as a DataLoader's. One that is killed leaves its sockets, and
        # would leave a folder of its own; this process removes the one folder at its end.
        with contextlib.suppress(OSError):  # no folder can be written
            util.get_temp_dir()
        self._process = context.Process(target=_serve, args=(theirs, method), name="echelon rank")
        # Ctrl-C reaches all processes of a terminal. One that still imports torch would print where that broke off.
        resource_tracker.ensure_running()  # by itself, `start` would start it first, and unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if method is None:
            # The start has fixed the default one. This program and later ranks may still choose.
            multiprocessing.set_start_method(None, force=True)
        # With an open copy here, the connection would not end when the worker dies.
        theirs.close()
        self.pid = self._process.pid or 0
        self.pidfd = os.pidfd_open(self.pid)
        self.is_fresh = True
        self.is_busy = False
        self.is_spent = False
        self._is_reaped = False

    def submit(self, job: Job) -> None:
        """Sends `job`. If the worker is dead already, `outcome` returns its death."""
        self.is_fresh, self.is_busy = False, True
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps(job))

    def outcome(self, rank: int) -> Outcome | None:
        """Returns the outcome of the job of `rank`. None while it runs. Never blocks on a running job."""
        # Before the connection is read: an outcome that was sent before the death can still be received after it.
        dead = self.is_dead()
        try:
            if self.connection.poll():
                outcome: Outcome = pickle.loads(self.connection.recv_bytes())
                self.is_busy, self.is_spent = False, outcome.is_last
                return outcome
        except (EOFError, OSError):
            dead = True
        if not dead:
            return None
        self._exits_within(None)  # the connection may have ended just before
        self._reap()
        return self._death(rank)

    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return self._exits_within(0)

    def dismiss(self) -> None:
        """Asks an idle worker to exit. Does not wait for it."""
        with contextlib.suppress(OSError):  # it may be gone already
            self.connection.send_bytes(_FAREWELL)

    def end(self, patience: float = 0.0) -> None:
        """Waits up to `patience` seconds for the process to exit, then kills it and its children. To be called once."""
        self._exits_within(patience)
        self._reap()
        self._process.close()
        self.connection.close()
        os.close(self.pidfd)

    def _exits_within(self, seconds: float | None) -> bool:
        """Blocks until the process has ended. False if `seconds` pass first. None: for ever."""
        # Not `select`, which takes no descriptor above 1,023.
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def _reap(self) -> None:
        """Kills the process and its children, and takes its exit status."""
        if self._is_reaped:
            return
        self._is_reaped = True
        # Before `join`, after which another process may get the number. A worker that still imports leads no group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()

    def _death(self, rank: int) -> Outcome:
        code = self._process.exitcode or 0
        failure = RankFailure(
            rank=rank,
            at=time.monotonic(),
            summary=f"{describe_exit(code)} before it returned",
            status=exit_status(code) or 1,
        )
        return Outcome(None, failure, _pickled(LaunchError(_ADVICE)) if code == _UNGUARDED else None)


def _serve(connection: Connection, start_method: str | None) -> None:
    # Of processes that the program starts, as in its parent: with the worker's own a DataLoader's would import torch.
    multiprocessing.set_start_method(start_method, force=True)
    # A group of its own, with its children, such as the workers of a DataLoader. These look for the death of the rank
    # only when they have imported torch, and would then stay for ever.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, which ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, messages), daemon=True).start()
    while message := messages.get():
        connection.send_bytes(pickle.dumps(_perform(pickle.loads(message))))


def _read(connection: Connection, messages: queue.SimpleQueue[bytes]) -> None:
    message = None
    while message != _FAREWELL:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # the parent is gone, which would have ended this process and its children
        else:
            messages.put(message)


def _perform(job: Job) -> Outcome:
    if job.num_threads is not None:
        torch.set_num_threads(job.num_threads)
    try:
        with rank_variables(job):
            outcome = _run(job)
    finally:
        sys.stdout.flush()  # the worker may be killed later, with its buffers
    # The next job could not make torch's default group again. To destroy it here could block: Gloo's destructor joins
    # threads that may wait for other ranks.
    return outcome._replace(is_last=dist.is_available() and dist.is_initialized())


@contextlib.contextmanager
def rank_variables(job: Job) -> Iterator[None]:
    """Inside, the environment has the variables by which torch knows its rank. Afterwards it is as before."""
    before = dict(os.environ)
    # A launcher of this program, such as torchrun, would say another rank, and that its agent serves the store.
    inside = without_launcher(before) | {
        **on_one_host(job.rank, job.world_size),
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": str(job.master_port),
    }
    if job.backend in OWN_NAMES:
        inside["ECHELON_BACKEND"] = job.backend  # for a program that calls torch.distributed with "echelon"
    _change_environment(inside)
    try:
        yield
    finally:
        _change_environment(before)


def _change_environment(target: Mapping[str, str]) -> None:
    for name in os.environ.keys() - target.keys():
        del os.environ[name]
    for name, value in target.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _run(job: Job) -> Outcome:
    try:
        call: RankCall = pickle.loads(job.call)
        tcp = TcpBackend(
            job.rank,
            job.world_size,
            job.address,
            timeout=job.timeout,
            secret=job.secret,
            run_id=job.run_id,
            connect_timeout=CONNECT_TIMEOUT,
        )
        table = agreed_table(tcp, CONNECT_TIMEOUT)
        backend = carry(tcp, job.backend, CONNECT_TIMEOUT)
        with ProcessGroup(backend, table=table) as group, provide(group):
            result = call.run(group)
        return Outcome(_sent(result))
    except SystemExit as error:
        return Outcome(None, report.describe(job.rank, error)) if fails(error) else Outcome(pickle.dumps(None))
    except BaseException as error:
        cause = unwrapped(error)
        return Outcome(None, report.describe(job.rank, cause), _pickled(cause))


def _sent(result: object) -> bytes:
    try:
        return dumps(result)
    except (TypeError, AttributeError, RecursionError, pickle.PicklingError) as error:
        raise LaunchError(
            f"the result of this rank, {named(result)}, cannot be sent to the parent ({error}): return tensors, "
            "numbers, text, and lists and dicts of them"
        ) from error


def _pickled(error: BaseException) -> bytes | None:
    # Loaded once as a check: a class whose constructor takes other arguments can be pickled, but not loaded.
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # an exception's class may raise anything here
        return None
    return pickled
