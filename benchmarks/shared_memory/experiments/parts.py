"""What is each microsecond of a small all-reduce spent on?

    python benchmarks/shared_memory/experiments/parts.py
    python benchmarks/shared_memory/experiments/parts.py --ranks 4 --bytes 16K

The same ranks do less and less of the same operation, in turns: the whole call, the call without the checks of its
arguments, without its number and its record, and so on, down to two ranks that only count and look at each other's
count. Each way leaves out what one layer of Echelon does, through that layer's own interface, so the difference of two
is what that layer costs. The last lines are single calls, repeated by one rank while the other waits.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import torch

import echelon
from echelon.backends.collective import Collective
from echelon.backends.formats import memory_layout
from echelon.backends.shared.collectives.rank_region import RankRegions
from echelon.backends.shared.collectives.sync_block import SyncBlock
from echelon.bench.request import read_size
from echelon.collectives.plans.select import STATIC, Selector
from echelon.group.runner import CollectiveRunner
from echelon.operation_records import FlightRecorder, OperationRecord

sys.path.append(str(Path(__file__).parents[2]))
from harness import in_turns, options_of, print_environment, print_head, print_row

TURNS = 21
CALLS = 1000
_SECONDS = 600.0
LEFT_OUT = (
    "the checks of the arguments, the operation as a value",
    "its number, its record, its time",
    "its turn, whether all are alive, where the tensor is",
    "writing, reading and adding the values",
    "the announcement and its comparison, who sleeps",
)
"""What each way leaves out of the one before."""


class Nobody:
    """Looks into no operation."""

    next_check_at = float("inf")

    def look(self, peer: int, has_come: Callable[[], bool]) -> None:
        """Does nothing."""


def call_of(number: int, note: str, deadline: float = float("inf")) -> OperationRecord:
    """Returns a call as a group would hand it to an executor."""
    record = FlightRecorder().begin("parts", 1001, number, 7, note, watched_by=lambda _: Nobody())
    record.deadline = deadline
    return record


def numbered_calls(note: str) -> Iterator[OperationRecord]:
    """Returns calls as ranks would make them that call the same over and over. Only their numbers are new."""
    record = call_of(0, note)
    for record.sequence in count(1):
        yield record


def all_ways(group: echelon.ProcessGroup, num_bytes: int) -> dict[str, Callable[[], object]]:
    """Returns the ways to all-reduce a tensor of so many bytes, each doing less than the one before."""
    backend, ranks = group.backend, group.ranks
    tensor = torch.zeros(max(1, num_bytes // 4))
    selector = Selector(group.hosts, STATIC)
    runner = CollectiveRunner(backend, ranks, 1001, "parts", selector, _SECONDS)
    collective = Collective("all_reduce", tensor.shape, tensor.dtype, "sum")
    made = runner.prepare(collective)
    executor = backend.executor(1002, ranks)
    assert executor is not None, "these ranks share no memory"
    run = executor.prepare(collective)
    calls, marks = numbered_calls(made.note), numbered_calls(made.note)
    board, rooms = _board(group)

    def combined() -> None:
        call = next(marks)
        small = rooms.small(call.sequence, tensor.shape, tensor.dtype)
        small.write(tensor)
        board.meet(call)
        first, second, *others = small.places
        torch.add(first, second, out=tensor)
        for other in others:
            tensor.add_(other)

    return {
        "`group.all_reduce`": lambda: group.all_reduce(tensor),
        "of a collective that is prepared": lambda: runner.start(made, tensor, None, False, None),
        "of a call that is there": lambda: run(next(calls), tensor, None),
        "by board and rooms": combined,
        "the meeting alone": lambda: board.meet(next(marks)),
        "counting alone": _counting(group),
    }


def _board(group: echelon.ProcessGroup) -> tuple[SyncBlock, RankRegions]:
    """Returns a board and rooms of their own, that nobody looks around from."""
    backend, size = group.backend, group.world_size * memory_layout.ROOM_BYTES
    call = call_of(1, "map", time.monotonic() + _SECONDS)
    region = backend.map_region(call, 1003, group.ranks)  # type: ignore[attr-defined] # of shared memory
    assert region.data.numel() >= size
    board = SyncBlock(region, group.ranks, group.rank, backend.waiter, lambda *_: None)  # type: ignore[attr-defined]
    return board, RankRegions(region, group.world_size, group.rank)


def _counting(group: echelon.ProcessGroup) -> Callable[[], None]:
    """Returns a function that counts in shared memory, and waits until all others have counted as far."""
    backend, line = group.backend, 64
    call = call_of(1, "map", time.monotonic() + _SECONDS)
    region = backend.map_region(call, 1004, group.ranks)  # type: ignore[attr-defined] # of shared memory
    words = memoryview(region.memory).cast("Q")
    own, others = group.rank * line, [rank * line for rank in range(group.world_size) if rank != group.rank]
    give_way = os.sched_yield if backend.waiter.is_oversubscribed else lambda: None  # type: ignore[attr-defined]

    def act() -> None:
        words[own] = now = words[own] + 1
        for other in others:
            while words[other] < now:
                give_way()

    return act


def single_calls(group: echelon.ProcessGroup, num_bytes: int) -> dict[str, Callable[[], object]]:
    """Returns calls that an all-reduce is made of, which need no other rank."""
    here, there, tensor = (torch.zeros(max(1, num_bytes // 4)) for _ in range(3))
    source, target = here.data_ptr(), there.data_ptr()
    recorder = group.backend.flight_recorder
    words = memoryview(bytearray(64)).cast("Q")
    return {
        "an empty Python function": lambda: None,
        "`words[i] >= level`, a look at a count": lambda: words[0] >= 1,
        "`os.sched_yield()`": os.sched_yield,
        "`tensor.is_contiguous()`": tensor.is_contiguous,
        "`ctypes.memmove`": lambda: ctypes.memmove(target, source, num_bytes),
        "`tensor.copy_`": lambda: there.copy_(here),
        "`torch.add(out=)`": lambda: torch.add(here, there, out=tensor),
        "the collective as a value": lambda: Collective("all_reduce", tensor.shape, tensor.dtype, "sum").note,
        "its record, begun and ended": lambda: recorder.begin("parts", 1005, 1, 0, "note").end(),
    }


def measure(group: echelon.ProcessGroup, num_bytes: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns microseconds by way, then rank 0's by single call: medians over turns."""
    torch.set_num_threads(1)
    ways = in_turns(group, all_ways(group, num_bytes), TURNS, repeat=CALLS).seconds
    # Only rank 0 makes the single calls; the others wait at the barriers.
    alone = single_calls(group, num_bytes) if group.rank == 0 else dict.fromkeys(single_calls(group, num_bytes), int)
    calls = in_turns(group, alone, TURNS, repeat=CALLS if group.rank == 0 else 1).seconds
    return tuple({name: statistics.median(taken) * 1e6 for name, taken in each.items()} for each in (ways, calls))


def main() -> None:
    parser = options_of(__doc__, ranks=2)
    parser.add_argument("--bytes", type=lambda text: read_size("--bytes", text), default=8)
    options = parser.parse_args()
    ways, calls = echelon.spawn(measure, options.ranks, (options.bytes,), backend="shm")[0]
    print_environment(f"all_reduce of {options.bytes} bytes, {options.ranks} ranks, medians of {TURNS} turns")
    print_head("call | us | left out by the next line | us")
    names, times = list(ways), list(ways.values())
    for number, (name, left_out) in enumerate(zip(names, (*LEFT_OUT, ""), strict=False)):
        less = f"{times[number] - times[number + 1]:.1f}" if number + 1 < len(names) else ""
        print_row(name, f"{times[number]:.1f}", left_out if less else "", less)
    print()
    print_head("one call, by one rank | us")
    for name, microseconds in calls.items():
        print_row(name, f"{microseconds:.2f}")


if __name__ == "__main__":
    main()
