"""Steps of recorded ranks timed on this machine, with real tensors: each rank alone in a process.

Strategy. As many processes run at once as ranks would on a host, because they share its memory and its caches. Each is
a copy of this process, keeps to one processor, and is answered by the recording instead of other ranks. Where each has
a processor of its own, seconds are wall time, because the operating system delays a real step as well. Otherwise they
are processor time. Optimizers of all ranks begin at once, as after the last collective of a real step, because they
share the memory's bandwidth. A step is only timed where that is safe: it writes no file, has enough memory, and is
ended when it takes too long.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle, islice
from os import _exit  # the original: for simulated ranks it is replaced
from typing import NamedTuple

from echelon.foresight.play.allocator import memory_of
from echelon.foresight.record.log.calls import Answers, OtherCalls
from echelon.foresight.record.ranks.processes import has_device_threads
from echelon.foresight.record.run import Request, record_in_turn
from echelon.foresight.record.steps import Timing
from echelon.foresight.trace import GIB, Kernel, Trace
from echelon.simulation.process.random_state import cores_here

_TIMING = Timing(steps=4, seconds=1.5)
_MEETING = b"."
"""Byte that a timed rank sends when it reaches an optimizer, and receives when all ranks may go on."""
_DEADLINE = 300.0
"""Seconds after which timed processes are ended."""
_MEMORY_SHARE = 0.8
"""Share of the free memory that the tensors of timed processes may take."""


def measured(
    request: Request, traces: Mapping[int, Trace], calls: Mapping[int, Answers], at_once: int
) -> dict[int, Trace]:
    """Returns recorded steps with the seconds that they take here. Runs each of them with real tensors.

    A step that cannot be timed, or whose calls differ with real tensors, is returned without seconds. Its assumptions
    say so.

    Args:
        request: the program.
        traces: recorded step of each rank to time, as it was recorded.
        calls: their calls.
        at_once: ranks that run at once.
    """
    found: dict[int, Trace] = {}
    ranks = list(traces)
    for first in range(0, len(ranks), at_once):
        some = ranks[first : first + at_once]
        together = list(islice(cycle(some), at_once))
        if reason := _obstacle(request, [traces[rank] for rank in together]):
            seconds: Mapping[int, list[float] | str] = dict.fromkeys(some, reason)
        else:
            seconds = _run(request, together, calls)
        found.update((rank, _timed(traces[rank], calls[rank], seconds[rank])) for rank in some)
    return found


def _obstacle(request: Request, traces: Sequence[Trace]) -> str:
    """Returns why ranks cannot be timed at once. Empty if they can."""
    if has_device_threads():
        return "this process cannot be copied"
    if request.until:
        return "the hook that sees the end of a function slows the program down"
    if any(type(entry) is Kernel and entry.is_compiled for trace in traces for entry in trace.entries):
        return "its compiled kernels are approximated"
    needed, free = sum(memory_of(trace).live_peak for trace in traces), _free_memory()
    if needed > _MEMORY_SHARE * free:
        return f"tensors of all ranks of a host take {needed / GIB:.2g} GiB, and {free / GIB:.2g} GiB are free"
    return ""


def _free_memory() -> float:
    """Returns the bytes that processes can take without swapping. Infinite if the system does not say."""
    with suppress(OSError, StopIteration), open("/proc/meminfo") as file:
        return 1024.0 * next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    return math.inf


def _timed(trace: Trace, calls: Answers, seconds: Sequence[float] | str) -> Trace:
    if isinstance(seconds, str):
        note = f"rank {trace.rank} could not be timed with real tensors, its kernels have their usual times: {seconds}"
        return replace(trace, assumptions=(*trace.assumptions, note))
    positions = [call.position for call in calls[-1]]
    return replace(trace, measured=tuple(zip(positions, seconds, strict=True)))


def _run(request: Request, ranks: Sequence[int], calls: Mapping[int, Answers]) -> dict[int, list[float] | str]:
    """Returns the seconds before each call of some ranks, which run at once, or why there are none.

    A rank may be given several times.
    """
    cores = sorted(cores_here())
    clock = time.perf_counter if len(ranks) <= len(cores) else time.thread_time
    children: list[_Child] = []
    try:
        for number, rank in enumerate(ranks):
            near, far = socket.socketpair()
            # Closed here after the fork: then the line ends with the child.
            with far:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which have ended
                    try:
                        pid = os.fork()
                    except OSError:
                        near.close()
                        raise
                if not pid:
                    for line in (near, *(each.line for each in children)):
                        line.close()  # else no rank would notice that the parent has ended
                    _be_rank(request, rank, calls[rank], cores[number % len(cores)], clock, far)
            children.append(_Child(rank, pid, near))
        return _reports(children)
    except OSError as error:
        return dict.fromkeys(ranks, f"this process cannot be copied: {error.strerror}")
    finally:
        for child in children:
            child.line.close()
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)


class _Child(NamedTuple):
    """Process in which a rank is timed."""

    rank: int
    pid: int
    line: socket.socket


def _reports(children: Sequence[_Child]) -> dict[int, list[float] | str]:
    """Returns the first report of each rank. Until then they wait for each other wherever an optimizer begins."""
    texts: dict[_Child, bytes] = dict.fromkeys(children, b"")
    waiting: set[_Child] = set()
    running = set(children)
    end = time.monotonic() + _DEADLINE
    found: dict[int, list[float] | str] = {}
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.line, selectors.EVENT_READ, child)
        while running and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                child = key.data
                if part := child.line.recv(1 << 16):
                    texts[child] += part
                    # It comes alone: a rank that has sent it waits for an answer.
                    if part == _MEETING:
                        waiting.add(child)
                    continue
                selector.unregister(child.line)
                running.remove(child)
                # The report comes after the bytes of all meetings.
                text = texts[child].lstrip(_MEETING)
                # A rank may run several times, and its first report counts.
                found.setdefault(child.rank, json.loads(text) if text else "it died")
            if waiting == running:
                for child in waiting:
                    with suppress(OSError):  # it has died meanwhile
                        child.line.send(_MEETING)
                waiting.clear()
    late = f"it had not ended after {_DEADLINE:g} s"
    return {child.rank: found.get(child.rank, late) for child in children}


def _be_rank(
    request: Request, rank: int, answers: Answers, core: int, clock: Callable[[], float], line: socket.socket
) -> None:
    """Runs a rank in a child process, and ends the process."""

    def meet() -> None:
        line.send(_MEETING)
        if not line.recv(1):
            _exit(1)  # the parent has ended

    try:
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out, this process is killed, not its parent
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        os.sched_setaffinity(0, {core})
        timing = _TIMING._replace(clock=clock, meet=meet)
        try:
            alone = request._replace(timing=timing, answers=answers, allow_writes=False)
            recorded = record_in_turn(alone, lambda traces: [] if traces else [rank])
            result: object = _medians(recorded.calls[rank], request.steps)
        except (Exception, OtherCalls) as error:
            result = f"{type(error).__name__}: {error}".partition("\n")[0]
        line.sendall(json.dumps(result).encode())
    finally:
        _exit(0)


def _medians(calls: Answers, warm_up: int) -> list[float]:
    """Returns the median seconds before each call, scaled so that they add up to the median step."""
    timed = calls[warm_up:] or calls[-1:]  # a program may end sooner
    found = [statistics.median(call.seconds for call in same) for same in zip(*timed, strict=True)]
    total = statistics.median(sum(call.seconds for call in step) for step in timed)
    return [seconds * total / (sum(found) or 1.0) for seconds in found]
