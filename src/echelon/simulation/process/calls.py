"""Calls that concern the whole process: done for one rank where that is possible, else refused with one line.

Strategy. The functions are replaced while the simulation runs. A replacement asks which rank the calling thread is. In
a thread of no rank, and in a child process of a rank, it calls the original.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing.context
import multiprocessing.process
import os
import signal
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed.rpc
import torch.multiprocessing

from echelon.call_site import calling_place, is_foreign, source_line, source_of
from echelon.errors import LaunchError, UnsupportedOp
from echelon.replacements import Replacement, calling, replaced
from echelon.simulation.process.operators import Operators, Rank
from echelon.simulation.process.precision import AutocastCache
from echelon.simulation.process.random_state import cores_here, cores_of_thread

_IN_CHILD = "simulated ranks are threads of one process"
NEEDS_CUDA = (
    "simulated ranks compute on the CPU: choose the device by torch.cuda.is_available(), which is False for them, or "
    "foresee the program on GPUs that are not there: echelon foresee --gpu h100, in Python echelon.foresee"
)
"""Reason and advice for a program that needs CUDA."""
_CUDA_FOLDERS = tuple(os.path.join(os.path.dirname(torch.__file__), name, "") for name in ("cuda", "accelerator"))

_REFUSED: Sequence[tuple[Any, str, str]] = (
    (os, "abort", f"{_IN_CHILD}, which it would end: use sys.exit"),
    (os, "execv", f"{_IN_CHILD}, which it would replace: use subprocess"),
    (os, "execve", f"{_IN_CHILD}, which it would replace: use subprocess"),
    (signal, "alarm", f"no signal reaches a rank, because {_IN_CHILD}: use a timeout of the call"),
    (signal, "setitimer", f"no signal reaches a rank, because {_IN_CHILD}: use a timeout of the call"),
    (signal, "pause", f"no signal reaches a rank, because {_IN_CHILD}"),
    (signal, "sigwait", f"no signal reaches a rank, because {_IN_CHILD}"),
    (signal, "raise_signal", f"{_IN_CHILD}, which would get it: to end a rank, use sys.exit or the fault Kill"),
    (torch.distributed.rpc, "init_rpc", "the rpc package has connections of its own, which are not simulated"),
    (torch.cuda, "_lazy_init", NEEDS_CUDA),
)
"""Functions that a rank cannot call: owner, name, reason and advice."""


class ProcessCalls:
    """Replacements of functions of the process, for all ranks of a simulation."""

    def __init__(self, rank_here: Rank, world_size: int, has_own_modules: bool) -> None:
        """Takes a function that returns the calling rank, and whether each rank has modules of its own."""
        self._rank_here = rank_here
        self._world_size = world_size
        self._operators = Operators(rank_here, has_own_modules)
        self.cores = cores_here()
        """Cores of the process before the simulation, which keeps to one."""
        self._exit_calls: defaultdict[int, list[functools.partial[Any]]] = defaultdict(list)
        self._handlers: dict[tuple[int, int], Any] = {}
        """Handlers of signals, by rank and signal. No signal calls them."""
        self._counted_gpus: dict[int, str] = {}
        """Line of the program at which each rank has counted GPUs."""
        self.thread_error: UnsupportedOp | None = None
        """First refusal of a call in a thread of the program's own."""

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Inside, the functions act for the calling rank."""
        for_ranks = [
            Replacement(owner, name, functools.partial(self._for_ranks, make))
            for owner, name, make, _ in self._replacements()
        ]
        on_error = functools.partial(functools.partial, self._on_thread_error)
        try:
            with replaced([*for_ranks, Replacement(threading, "excepthook", on_error)]):
                yield
        finally:
            self._operators.forget()

    def at_exit(self, rank: int) -> None:
        """Calls the functions that a rank has registered with `atexit`, the last one first."""
        calls = self._exit_calls[rank]
        while calls:
            call = calls.pop()
            try:
                call()
            except Exception as error:
                trace = error.__traceback__
                print(f"Exception ignored in atexit callback: {call.func!r}", file=sys.stderr)  # as Python does
                traceback.print_exception(error.with_traceback(trace and trace.tb_next))

    def needs_cuda(self, rank: int, error: BaseException) -> UnsupportedOp | None:
        """Returns the error for one that a rank raised for want of a GPU. None for others."""
        trace = error.__traceback__
        if isinstance(error, UnsupportedOp) or trace is None:
            return None
        while trace.tb_next is not None:
            trace = trace.tb_next
        frame = trace.tb_frame
        # A build of torch without CUDA refuses the device in `init_process_group` itself.
        wants_device = frame.f_code.co_name == "init_process_group" and frame.f_locals.get("device_id") is not None
        # A rank chooses its GPU by `rank % torch.cuda.device_count()`.
        divides = isinstance(error, ZeroDivisionError) and rank in self._counted_gpus
        if not frame.f_code.co_filename.startswith(_CUDA_FOLDERS) and not wants_device and not divides:
            return None
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not is_foreign(frame.filename)]
        line = source_line(own[-1].filename, own[-1].lineno or 0) if own else "an unknown line"
        what = f"CUDA at {line}"
        if divides:
            what = f"{error} at {line}, and torch.cuda.device_count() was 0 at {self._counted_gpus[rank]}"
        found = UnsupportedOp(f"{what}: {NEEDS_CUDA}")
        found.__cause__ = error
        return found.with_traceback(error.__traceback__)

    def _count_gpus(self) -> int:
        if _is_called_by_user():
            self._counted_gpus[self._here()] = source_of(calling_place())
        return 0

    def _replacements(self) -> list[Replacement]:
        """Returns the functions that act for the calling rank."""
        spawner = sys.modules["torch.multiprocessing.spawn"]  # the package has a function of this name
        return [
            *(Replacement(owner, name, functools.partial(_refused, name, reason)) for owner, name, reason in _REFUSED),
            *(
                Replacement(module, name, lambda _: self._spawn)
                for module in (torch.multiprocessing, spawner)
                for name in ("spawn", "start_processes")
            ),
            # It would end all ranks, and sys.exit ends one.
            Replacement(os, "_exit", lambda _: sys.exit),
            Replacement(os, "sched_getaffinity", calling(self._affinity)),
            Replacement(os, "kill", calling(_kill)),
            Replacement(os, "killpg", calling(_killpg)),
            Replacement(os, "fork", calling(_fork)),
            Replacement(os, "forkpty", calling(_fork)),
            Replacement(signal, "signal", lambda _: self._signal),
            Replacement(signal, "getsignal", calling(self._getsignal)),
            Replacement(atexit, "register", calling(self._register)),
            Replacement(atexit, "unregister", calling(self._unregister)),
            *self._operators.replacements(),
            *AutocastCache(self._rank_here).replacements(),
            Replacement(torch.cuda, "is_available", lambda _: lambda: False),
            Replacement(torch.cuda, "device_count", lambda _: self._count_gpus),
            Replacement(torch.cuda.nccl, "version", calling(_nccl_version)),
            Replacement(multiprocessing.process.BaseProcess, "start", calling(self._start)),
        ]

    def _for_ranks(self, make: Callable[[Any], Any], original: Any) -> Any:
        """Returns a function that calls the replacement in the thread of a rank, else the original."""
        replacement = make(original)

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            return (original if self._rank_here() is None else replacement)(*args, **kwargs)

        return function

    def _on_thread_error(self, previous: Callable[[Any], object], raised: threading.ExceptHookArgs) -> None:
        # Python would go on. Here the thread's call works, or would, on real ranks.
        if isinstance(raised.exc_value, UnsupportedOp):
            self.fail(raised.exc_value)
        else:
            previous(raised)

    def fail(self, error: UnsupportedOp) -> None:
        """Ends the simulation with the refusal of a call in a thread of the program's own. The first one counts."""
        self.thread_error = self.thread_error or error

    def _here(self) -> int:
        rank = self._rank_here()
        assert rank is not None, "checked by the caller"
        return rank

    def _spawn(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        nprocs: int = 1,
        join: bool = True,
        *_: object,
        **__: object,
    ) -> _Joined | None:
        """Runs the function as the calling rank, in place of starting a process for each rank."""
        if nprocs != self._world_size:
            raise LaunchError(
                f"torch.multiprocessing.spawn(nprocs={nprocs}) on {self._world_size} simulated ranks, each of which "
                f"runs the function once: simulate {max(nprocs, 1)} ranks, or change nprocs"
            )
        fn(self._here(), *args)
        return None if join else _Joined()

    def _signal(self, number: int, handler: Any) -> Any:
        before = signal.getsignal(number)
        self._handlers[self._here(), int(number)] = handler
        return before

    def _getsignal(self, original: Callable[[int], Any], number: int) -> Any:
        key = self._here(), int(number)
        return self._handlers[key] if key in self._handlers else original(number)

    def _affinity(self, original: Callable[[int], set[int]], pid: int) -> set[int]:
        # A DataLoader compares its number of workers with it.
        return set(self.cores) if pid in (0, os.getpid()) else original(pid)

    def _start(self, original: Callable[[Any], None], process: Any) -> None:
        _check_process(process)
        if isinstance(process, multiprocessing.context.ForkServerProcess):
            # Ranks would share one server, whose processes have the environment of the rank that started it.
            vars(process)["_Popen"] = multiprocessing.context.SpawnProcess._Popen
        # A process inherits the cores of the thread that starts it.
        with cores_of_thread(self.cores):
            original(process)

    def _register(self, original: Callable[..., Any], function: Any, *args: object, **kwargs: object) -> Any:
        # An installed package, which all ranks share, registers for the end of the process.
        if _is_called_by_user():
            self._exit_calls[self._here()].append(functools.partial(function, *args, **kwargs))
        else:
            original(function, *args, **kwargs)
        return function

    def _unregister(self, original: Callable[..., Any], function: object) -> None:
        calls = self._exit_calls[self._here()]
        calls[:] = [call for call in calls if call.func != function]
        original(function)


class _Joined:
    """Handle of processes that have ended."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:  # noqa: ARG002
        """Returns True: all have ended."""
        return True


def _refused(name: str, reason: str, original: Callable[..., Any]) -> Callable[..., NoReturn]:
    module = getattr(original, "__module__", "") or ""
    what = "CUDA" if reason is NEEDS_CUDA else f"{module.removeprefix('_')}.{name}".replace("posix.", "os.")

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UnsupportedOp(f"{what} at {source_of(calling_place())}: {reason}")

    return refuse


def _kill(original: Callable[[int, int], None], pid: int, number: int) -> None:
    # 0 and negative numbers stand for groups of processes, -1 for all.
    if number != 0 and pid in (0, -1, os.getpid(), -os.getpgrp()):
        raise _would_end("os.kill")
    original(pid, number)


def _killpg(original: Callable[[int, int], None], group: int, number: int) -> None:
    if number != 0 and group in (0, os.getpgrp()):
        raise _would_end("os.killpg")
    original(group, number)


def _would_end(call: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"{call} of the process at {source_of(calling_place())}: {_IN_CHILD}, which it would end: use sys.exit, "
        "or the fault Kill"
    )


def _fork(original: Callable[[], Any]) -> Any:
    # By multiprocessing, whose processes `_check_process` has seen.
    if not _is_called_by_user():
        return original()
    raise UnsupportedOp(
        f"os.fork at {source_of(calling_place())}: {_IN_CHILD}, and a forked child is none of them: use subprocess, or "
        "echelon run"
    )


def _nccl_version(original: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    # torch's log of an error asks for it. A build without CUDA fails then, and its error would hide the first one.
    return original() if _is_called_by_user() else (0, 0, 0)


def _check_process(process: Any) -> None:
    target = process._target
    while isinstance(target, functools.partial):
        target = target.func
    # Workers of a DataLoader or a pool run functions of a library. They compute, and take part in no collective.
    code = getattr(target or type(process).run, "__code__", None)
    if code is not None and not is_foreign(code.co_filename):
        raise UnsupportedOp(
            f"a process of {code.co_name} is started at {source_of(calling_place())}: {_IN_CHILD}, and a process of "
            "its own could not talk to them: call the function on each rank, or use echelon run"
        )


def _is_called_by_user() -> bool:
    """Whether the user's code itself called the replaced function."""
    frame = sys._getframe(1)
    own = os.path.dirname(os.path.abspath(__file__))
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == own:
        frame = frame.f_back
    return not is_foreign(frame.f_code.co_filename)
