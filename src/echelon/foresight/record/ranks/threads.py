"""Threads that a program starts: they run beside their rank, and end with it.

Strategy. A thread has no recording, so that a trace does not depend on its turns. Its rank may wait for it for ever. So
an error of torch in a thread ends the recording, and so does a rank that waits while nothing moves. At the end of its
rank a thread leaves: at its next call of torch, its next wait for a queue or an event, or its next instruction.
"""

from __future__ import annotations

import concurrent.futures.thread
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from echelon.call_site import calling_place, is_foreign, is_own, place_of_thread, source_line, source_of
from echelon.errors import DeadlockError, UnsupportedOp
from echelon.foresight.record.here import Recording, recording_here
from echelon.foresight.record.log.callers import is_of_torch
from echelon.foresight.record.ranks.thread_tensors import OfThread
from echelon.foresight.record.writer import in_writers, writer
from echelon.replacements import Replacement
from echelon.simulation.scheduler import raise_in

_SLICE = 0.1
"""Seconds after which a thread that waits looks whether its rank has ended."""
_PARTING = 0.5
"""Seconds that threads get to leave by themselves, and again once they are interrupted."""
_MODE = OfThread.__torch_function__.__code__.co_filename
"""File of the mode that sees all calls of torch in a thread."""
_ADVICE = (
    "threads of a recorded program make tensors and move them to the GPU, so do the rest in the thread that runs the "
    "program"
)


class Threads:
    """Threads that the program of one rank has started, and that have not ended."""

    def __init__(self, refuse: Callable[[UnsupportedOp], None]) -> None:
        """Takes a function that ends the recording with an error."""
        self.mode: Any = None
        """Mode of the rank's fake tensors. None before it has one, or where tensors are real."""
        self.line = ""
        """First line of a thread that uses the GPU. Empty without one."""
        self.has_ended = False
        """Whether threads have to leave."""
        self.have_started = False
        """Whether there has been one."""
        self._refuse = refuse
        self._failure = ""
        """First error of the program's own by which a thread has ended."""
        self._started: list[threading.Thread] = []
        self._lock = threading.Lock()
        """Held while a thread starts, so that none is missed at the end."""

    def refused(self, action: str) -> UnsupportedOp:
        """Returns the error for an action of the calling thread. The recording ends, also if the program catches it."""
        error = UnsupportedOp(
            f"thread {threading.current_thread().name!r} {action} at {source_of(calling_place())}: {_ADVICE}"
        )
        if not self.has_ended:
            self._refuse(error)
        return error

    def start(self, original: Callable[..., None], thread: threading.Thread, recording: Recording) -> None:
        """Starts a thread of the program."""
        self.have_started = True
        thread.run = partial(self._run, thread, thread.run, recording)  # type: ignore[method-assign]
        thread.daemon = True  # the end of the recording may be in the middle of its work
        with self._lock:
            if self.has_ended:
                raise SystemExit  # of the thread that starts it
            self._started = [each for each in self._started if each.is_alive()]
            self._started.append(thread)
            original(thread)

    def _run(self, thread: threading.Thread, run: Callable[[], None], recording: Recording) -> None:
        try:
            with OfThread(recording):
                run()
        except SystemExit:
            pass  # as Python has it, but a program's hook of threads would see it
        except Exception as error:
            if self.has_ended:
                return
            if isinstance(error, UnsupportedOp):
                raise
            frames = traceback.extract_tb(error.__traceback__)
            own = [each for each in frames if not is_foreign(each.filename)]
            line = source_line(own[-1].filename, own[-1].lineno or 0) if own else "an unknown line"
            first = next(iter(str(error).splitlines()), "")
            failure = f"thread {thread.name!r} has failed at {line}: {type(error).__name__}: {first}"
            if recording.placement is None or not any(_is_call_of_torch(each.filename) for each in frames):
                self._failure = self._failure or failure
                raise  # Python prints it
            raise UnsupportedOp(f"{failure}: {_ADVICE}") from error
        finally:
            del thread.run  # a cycle

    def never_woken(self, rank: int, ident: int) -> DeadlockError:
        """Returns the error for a rank whose thread waits for another one, while nothing moves."""
        line = source_of(place_of_thread(ident)) or "an unknown line"
        return DeadlockError(
            f"rank {rank} waits for another thread at {line}, and no thread has done anything for some seconds"
            f"{self._failure and f'; {self._failure}'}: let each thread for which the program waits end its work, or "
            "pass its error on"
        )

    def leave(self) -> None:
        """Makes threads leave at their next call or wait. No more threads start."""
        with self._lock:
            self.has_ended = True

    def end(self) -> None:
        """Makes threads leave that run code of the program itself. Blocks for a moment at most."""
        self.leave()
        if not self._started:
            return
        for each in self._started:
            if isinstance(each, threading.Timer):
                each.cancel()
        for is_last in (False, True):
            left = [each for each in self._started if each.is_alive() and _is_of_program(each)]
            if is_last:
                raise_in([each.ident for each in left if each.ident is not None], SystemExit)
            deadline = time.monotonic() + _PARTING
            for each in left:
                each.join(max(0.0, deadline - time.monotonic()))
        for each in self._started:
            # In C code for ever, perhaps. At the end of Python a pool would wait for it.
            if each.is_alive() and _is_of_program(each):
                vars(concurrent.futures.thread).get("_threads_queues", {}).pop(each, None)
        self._started.clear()


def _is_call_of_torch(path: str) -> bool:
    """Whether code of a file calls torch, or is called by it. Functions of torch in C have no frame of their own."""
    return path == _MODE or (is_of_torch(path) and not is_own(path))


def _is_of_program(thread: threading.Thread) -> bool:
    """Whether a thread runs code of the program itself, or will after some time."""
    return isinstance(thread, threading.Timer) or _is_in_program(sys._current_frames().get(thread.ident or 0))


def _is_in_program(frame: FrameType | None) -> bool:
    """Whether a frame, or one that it returns to, is of the program's own code."""
    while frame is not None:
        if not is_foreign(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def threads_of_ranks() -> list[Replacement]:
    """Lets threads that recorded ranks start find the GPU of their rank, and leave at its end."""
    return [
        Replacement(threading.Thread, "start", in_writers(_start)),
        Replacement(threading.Event, "wait", in_writers(_wait)),
        Replacement(queue.Queue, "get", in_writers(_get)),
        Replacement(queue.Queue, "put", in_writers(_put)),
    ]


def _start(recording: Recording, original: Callable[..., None], thread: threading.Thread) -> None:
    threads = recording.threads
    # Frames between: this function and its wrapper. Lanes and the scheduler have threads of their own.
    if threads is None or threads.mode is None or is_own(sys._getframe(2).f_code.co_filename):
        original(thread)
    else:
        threads.start(original, thread, recording)


# A thread that waits for ever could not be made to leave: its wait is one of many short ones.


def _wait(
    recording: Recording, original: Callable[..., bool], event: threading.Event, timeout: float | None = None
) -> bool:
    if timeout is not None or not _may_leave(recording):
        return original(event, timeout)
    while not original(event, _SLICE):
        _leave_after(recording)
    return True


def _get(
    recording: Recording,
    original: Callable[..., Any],
    waiting: queue.Queue[Any],
    block: bool = True,
    timeout: float | None = None,
) -> Any:
    if not block or timeout is not None or not _may_leave(recording):
        return original(waiting, block, timeout)
    while True:
        try:
            return original(waiting, True, _SLICE)
        except queue.Empty:
            _leave_after(recording)


def _put(
    recording: Recording,
    original: Callable[..., None],
    waiting: queue.Queue[Any],
    item: Any,
    block: bool = True,
    timeout: float | None = None,
) -> None:
    if not block or timeout is not None or not _may_leave(recording):
        original(waiting, item, block, timeout)
        return
    while True:
        try:
            original(waiting, item, True, _SLICE)
        except queue.Full:
            _leave_after(recording)
        else:
            return


def _may_leave(recording: Recording) -> bool:
    """Whether the calling thread is one that the program has started."""
    return recording_here() is None and recording.threads is not None


def _leave_after(recording: Recording) -> None:
    """Ends the calling thread if its rank has ended, and it runs code of the program itself."""
    assert recording.threads is not None
    # Frames between: this function and those of the wait.
    if recording.threads.has_ended and _is_in_program(sys._getframe(1)):
        raise SystemExit


def refuse_in_thread(action: str) -> None:
    """Raises UnsupportedOp in a thread that a recorded rank has started. No effect in other threads.

    Args:
        action: its present action, as "steps an optimizer".
    """
    if recording_here() is None and (recording := writer()) is not None and recording.threads is not None:
        raise recording.threads.refused(action)
