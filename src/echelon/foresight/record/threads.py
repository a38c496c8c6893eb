"""Threads that a program starts: they compute with real tensors, and find the GPU of the rank that has started them.

Strategy. The threads run beside the rank, without a recording, so that a trace does not depend on their turns. Tensors
of the host have values there. A tensor that a thread makes on the GPU, or moves there, is fake from then on. The rank
allocates it where it first uses it. Fake tensors share one mode, which keeps a state for each thread. The rank may wait
for a thread for ever. So an error in a thread ends the recording, and a call by a thread after the end ends the thread.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from echelon._torch_private.tensors import NO_FAKE_RESULT, FakeTensor, as_fake, default_device_of, shared_fake_mode
from echelon.call_site import (
    calling_place,
    is_foreign,
    is_own,
    line_of,
    place_of_thread,
    shortened,
    source_line,
    source_of,
)
from echelon.errors import DeadlockError, UnsupportedOp
from echelon.foresight.record.callers import is_of_torch
from echelon.foresight.record.device import OnDevice
from echelon.foresight.record.here import Recording, recording_here
from echelon.foresight.record.placement import is_gpu
from echelon.foresight.record.writer import in_writers, writer
from echelon.replacements import Replacement


def threads_of_ranks() -> list[Replacement]:
    """Lets threads that recorded ranks start find the GPU of their rank."""
    return [Replacement(threading.Thread, "start", in_writers(_start))]


@contextmanager
def ending_threads(recording: Recording) -> Iterator[None]:
    """Ends threads of a rank at their next call of torch after it. Lists the first line of theirs that uses the GPU."""
    try:
        yield
    finally:
        recording.log.has_ended = True
        for line in recording.log.lines_of_threads:
            recording.log.assumptions.of(
                f"kernels and copies in threads of the program take no time, as those at {line}"
            )


def _start(recording: Recording, original: Callable[..., None], thread: threading.Thread) -> None:
    # None where ranks are timed, with real tensors.
    mode = shared_fake_mode() if recording_here() is not None else recording.log.fake_mode
    # Frames between: this function and its wrapper. Lanes and the scheduler have threads of their own.
    if mode is None or is_own(sys._getframe(2).f_code.co_filename):
        original(thread)
        return
    recording.log.fake_mode = mode
    thread.run = partial(_run, thread, thread.run, recording)  # type: ignore[method-assign]
    thread.daemon = True  # the end of the recording may be in the middle of its work
    original(thread)


def _run(thread: threading.Thread, run: Callable[[], None], recording: Recording) -> None:
    """Runs the function of a thread. Raises UnsupportedOp if it fails in torch, by which the recording ends."""
    try:
        with ExitStack() as stack:
            if recording.placement is not None:
                stack.enter_context(_OfThread(recording))
            run()
    except UnsupportedOp:
        if not recording.log.has_ended:
            raise
    except SystemExit:
        pass  # as Python has it, but a program's hook of threads would see it
    except Exception as error:
        if recording.log.has_ended:
            return
        frames = traceback.extract_tb(error.__traceback__)
        if not any(is_of_torch(each.filename) for each in frames[1:]):
            raise  # of the program itself, which Python prints
        own = [each for each in frames if not is_foreign(each.filename)]
        line = source_line(own[-1].filename, own[-1].lineno or 0) if own else "an unknown line"
        raise UnsupportedOp(
            f"thread {thread.name!r} has failed at {line}: {type(error).__name__}: {error}: threads of a recorded "
            "program make tensors and move them, so do the rest in the thread that runs the program"
        ) from error
    finally:
        del thread.run  # a cycle


class _OfThread(OnDevice):
    """Maps devices of CUDA in a thread of the program, and makes tensors of the GPU fake."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._log = recording.log

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._log.has_ended:
            raise SystemExit  # of this thread alone
        try:
            out = super().__torch_function__(func, types, args, kwargs)
        except NO_FAKE_RESULT:
            raise UnsupportedOp(
                f"{getattr(func, '__name__', 'a read')} at {source_of(calling_place())} reads a tensor of the GPU in a "
                "thread of the program, where no value is known: read it in the thread that runs the program"
            ) from None
        if not isinstance(out, Tensor) or isinstance(out, FakeTensor) or not _names_gpu(func, args, kwargs or {}):
            return out
        # A program finds its tensors on a GPU from now on.
        self._log.gpus.has_tensors = True
        if not self._log.lines_of_threads:
            self._log.lines_of_threads.append(shortened(line_of(calling_place())))
        return as_fake(self._log.fake_mode, out)


def _names_gpu(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call makes a tensor on the GPU, or moves one there."""
    name = getattr(func, "__name__", "")
    if name == "cuda" or any(map(is_gpu, (*args, *kwargs.values()))):
        return True
    if name == "to" and len(args) > 1 and (type(args[1]) is int or isinstance(args[1], FakeTensor)):
        return True
    device = kwargs.get("device")
    return type(device) is int or (device is None and is_gpu(default_device_of(func)))


def never_woken(rank: int, ident: int) -> DeadlockError:
    """Returns the error for a rank whose thread waits for another one, while nothing moves."""
    line = source_of(place_of_thread(ident)) or "an unknown line"
    return DeadlockError(
        f"rank {rank} waits for another thread at {line}, and no thread has done anything for some seconds: let each "
        "thread for which the program waits end its work, or pass its error on"
    )


def refuse_in_thread(action: str) -> None:
    """Raises UnsupportedOp in a thread that a recorded rank has started. No effect in other threads.

    Args:
        action: its present action, as "an optimizer steps".
    """
    if recording_here() is not None or writer() is None:
        return
    line, name = source_of(calling_place()), threading.current_thread().name
    raise UnsupportedOp(
        f"{action} in thread {name!r} at {line}: kernels of threads are not recorded, so train in the thread that runs "
        "the program"
    )
