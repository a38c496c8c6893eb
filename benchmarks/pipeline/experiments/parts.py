"""Where does the time of a pipeline's step go that is not computing?

    python benchmarks/pipeline/experiments/parts.py

First what each part of a message takes alone, in one process; then a whole message between two ranks, again and again,
and where both have computed before it. Then what one rank that holds all stages adds to the
arithmetic, with no messages at all. Then steps of two ranks that look for 0.2, 2 or 20 ms at what the other writes
before they sleep, in turns.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import numpy
import torch

import echelon
from echelon.backends.formats import wire
from echelon.backends.formats.wire import Tag
from echelon.backends.tcp import poller
from echelon.backends.tcp.inbox import Head
from echelon.backends.tcp.messages import message_head
from echelon.backends.work import Work as Operation
from echelon.pipeline import Pipeline, keyed, schedules
from echelon.pipeline.run.transfer import Buffers
from echelon.pipeline.stage.nested import structure_of

sys.path.extend(map(str, Path(__file__).parents[1:3]))
from harness import in_turns, print_head, print_row
from run import RANKS, Alone, Work, equal_parts, loss_of, our_pipeline, our_step

TINY = Work(8, 16, 16, 8)
LOOKS = (0.2e-3, 2e-3, 20e-3)
"""Seconds."""
NAMES = ("gpipe", "1f1b", "zb-v", "interleaved-1f1b", "dualpipe-v")


def parts_of_a_message() -> dict[str, float]:
    """Returns microseconds."""
    tensor = torch.randn(TINY.samples, 512, requires_grad=True) * 1
    other = torch.empty_like(tensor).detach()
    numbers = itertools.count()
    head = message_head(Tag(7, 1 << 63), tensor.dtype, tensor.shape, "[true]")
    header, extra = head[: wire.HEADER_BYTES], head[wire.HEADER_BYTES :]
    buffers = Buffers()

    def draw() -> None:
        with keyed(1, 2, 3):
            pass

    found: dict[str, Callable[[], object]] = {
        "structure of the value": lambda: structure_of(tensor),
        "head, written": lambda: message_head(Tag(7, next(numbers)), tensor.dtype, tensor.shape, "[true]"),
        "head, read": lambda: Head.of(wire.decode(header, extra, 1 << 40)),
        "a Work": lambda: Operation(None, "a message", 1.0),  # type: ignore[arg-type]
        "a buffer": lambda: buffers.take(tensor.shape, tensor.dtype, tensor.device),
        "a copy of 32 KiB": lambda: other.copy_(tensor.detach()),
        "random numbers of a forward": draw,
    }
    return {name: min(timeit.repeat(part, number=2000, repeat=9)) / 2000 * 1e6 for name, part in found.items()}


def one_way(group: echelon.ProcessGroup, num_layers: int) -> list[float]:
    """Returns when this rank sent each message, or had it; both compute layers before, the sender twice as many."""
    torch.set_num_threads(1)
    weights = [torch.randn(512, 512) for _ in range(2 * num_layers)]
    tensor = torch.randn(TINY.samples, 512)
    times = []
    for number in range(200):
        sends = group.rank == number % 2
        for weight in weights[: 2 * num_layers if sends else num_layers]:
            tensor @ weight
        if sends:
            times.append(time.monotonic())
            group.send(tensor, 1 - group.rank)
        else:
            group.recv(1 - group.rank)
            times.append(time.monotonic())
    return times


def alone(name: str) -> tuple[int, float, float]:
    """Returns a rank's number of actions, and microseconds: of each beside its arithmetic, and around all of them."""
    with echelon.init() as group:
        schedule = schedules.build(name, num_ranks=1, num_microbatches=TINY.microbatches)
        pipe = Pipeline(list(equal_parts(TINY.model(), schedule.num_stages)), group, schedule, loss_fn=loss_of)
        step, bare = our_step(pipe, TINY), None
        inside, around = [], []
        for _ in range(60):
            began = time.perf_counter()
            step()
            seconds = time.perf_counter() - began
            bare = bare or Alone(pipe, TINY, 0)
            bare.step()
            count = len(pipe.schedule.orders[0])
            arithmetic = TINY.microbatches * sum(sum(row[1:]) for row in bare.rounds[-1])
            makespan = float(pipe.timeline.makespan)
            inside.append((makespan - arithmetic) / count)
            around.append(seconds - makespan)
        return count, statistics.median(inside[10:]) * 1e6, statistics.median(around[10:]) * 1e6


def looking(group: echelon.ProcessGroup) -> list[list[float]]:
    """Returns for each schedule the median milliseconds of a step with each of LOOKS."""
    torch.set_num_threads(1)
    rows = []
    for name in NAMES:
        step = our_step(our_pipeline(group, TINY, name), TINY)

        def stepping(seconds: float, step: Callable[[], None] = step) -> Callable[[], None]:
            def run() -> None:
                poller._MEMORY_SPIN_SECONDS = seconds
                step()

            return run

        taken = in_turns(group, {str(seconds): stepping(seconds) for seconds in LOOKS}, 25).seconds.values()
        rows.append([statistics.median(each) * 1e3 for each in taken])
    return rows


def main() -> None:
    torch.set_num_threads(1)
    print_head("part of a message | us")
    for part, microseconds in parts_of_a_message().items():
        print_row(part, f"{microseconds:.1f}")
    for layers in (0, 4):
        sent, came = (numpy.array(times) for times in echelon.spawn(one_way, RANKS, (layers,)))
        microseconds = float(numpy.median(abs(came - sent)[20:]) * 1e6)
        what = f"after {2 * layers} layers of 512" if layers else "again and again"
        print_row(f"from rank to rank, {what}", f"{microseconds:.1f}")
    print()
    print_head("one rank, no messages | actions | us per action | us around a step")
    for name in ("1f1b", "zb-v"):
        count, inside, around = alone(name)
        print_row(name, count, f"{inside:.0f}", f"{around:.0f}")
    print()
    print_head("ms, looking for | 0.2 ms | 2 ms | 20 ms")
    for name, row in zip(NAMES, echelon.spawn(looking, RANKS)[0], strict=True):
        print_row(name, *(f"{milliseconds:.2f}" for milliseconds in row))


if __name__ == "__main__":
    main()
