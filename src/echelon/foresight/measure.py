"""Steps of recorded ranks timed on this machine, with real tensors: each rank alone in a process.

Strategy. As many processes run at once as ranks would on a host, because they share its memory and its caches. Each is
a copy of this process, keeps to one processor, and is answered by the recording instead of other ranks. Where each has
a processor of its own, seconds are those of the clock, as the kernel's work in between delays a real step as well.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle, islice

from echelon.foresight.record.calls import Answers, OtherCalls
from echelon.foresight.record.processes import has_device_threads
from echelon.foresight.record.run import Request, record_in_turn
from echelon.foresight.record.steps import Timing
from echelon.foresight.trace import Trace

_TIMING = Timing(steps=4, seconds=1.5)


def measured(
    request: Request, traces: Mapping[int, Trace], calls: Mapping[int, Answers], at_once: int
) -> dict[int, Trace]:
    """Returns recorded steps with the seconds that they take here. Runs each of them with real tensors.

    A step that calls something else where its tensors are real is returned without seconds, and says so.

    Args:
        request: the program.
        traces: recorded step of each rank to time.
        calls: their calls.
        at_once: ranks that run at once.
    """
    if not hasattr(os, "fork") or has_device_threads():
        reason = "this process cannot be copied"
        return {rank: _timed(trace, calls[rank], reason) for rank, trace in traces.items()}
    found: dict[int, Trace] = {}
    ranks = list(traces)
    for first in range(0, len(ranks), at_once):
        together = list(islice(cycle(ranks[first : first + at_once]), at_once))
        for rank, seconds in _run(request, together, calls).items():
            found[rank] = _timed(traces[rank], calls[rank], seconds)
    return found


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
    cores = sorted(os.sched_getaffinity(0))
    clock = time.perf_counter if len(ranks) <= len(cores) else time.thread_time
    children: list[tuple[int, int, int]] = []
    try:
        for number, rank in enumerate(ranks):
            ready, report = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which have ended
                child = os.fork()
            if not child:
                _be_rank(request, rank, calls[rank], cores[number % len(cores)], clock, report)
            os.close(report)
            children.append((rank, child, ready))
        found: dict[int, list[float] | str] = {}
        for rank, _, ready in children:
            with open(ready, "rb", closefd=False) as file:
                text = file.read()
            found.setdefault(rank, json.loads(text) if text else "it died")
        return found
    finally:
        for _, child, ready in children:
            os.close(ready)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _be_rank(request: Request, rank: int, answers: Answers, core: int, clock: Callable[[], float], report: int) -> None:
    """Runs a rank in a child process, and ends the process."""
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        os.sched_setaffinity(0, {core})
        try:
            alone = request._replace(timing=_TIMING._replace(clock=clock), answers=answers)
            recorded = record_in_turn(alone, lambda traces: [] if traces else [rank])
            result: object = _medians(recorded.calls[rank], request.steps)
        except (Exception, OtherCalls) as error:
            result = f"{type(error).__name__}: {error}".partition("\n")[0]
        with open(report, "w") as file:
            json.dump(result, file)
    finally:
        os._exit(0)


def _medians(calls: Answers, warm_up: int) -> list[float]:
    """Returns the median seconds before each call, of a step that takes the median of all steps."""
    timed = calls[warm_up:] or calls[-1:]  # a program may end before
    found = [statistics.median(call.seconds for call in same) for same in zip(*timed, strict=True)]
    total = statistics.median(sum(call.seconds for call in step) for step in timed)
    return [seconds * total / sum(found) for seconds in found]
