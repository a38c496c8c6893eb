"""Measures a link between two processes in the way in which a program uses it.

What is found is a `Network` on which moving a tensor takes simulated ranks as long as it took these two. Data
parallelism moves by all-reduces beside its backward, so those are timed beside computing: a message then waits for the
core, and for the interpreter, until what computes lets go of them. The ranks of a pipeline wait for what they move.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from steps import ACTIVATIONS, BUCKET, computing, timed

import echelon
from echelon import Network, ProcessGroup

SIZES = (ACTIVATIONS, BUCKET)
"""Bytes that are moved to find latency and bandwidth."""
BATCH = 10
"""Moves that are timed together: over a slow link the ranks take turns in being late."""


class Probe(NamedTuple):
    """How a program moves bytes: each rank sends and receives a tensor's bytes once."""

    move: Callable[[ProcessGroup, torch.Tensor], None]
    is_beside: bool
    """Whether while it computes."""


def exchange(group: ProcessGroup, tensor: torch.Tensor) -> None:
    sent = group.isend(tensor, 1 - group.rank)
    group.recv(1 - group.rank)
    sent.wait()


def all_reduce(group: ProcessGroup, tensor: torch.Tensor) -> None:
    group.all_reduce(tensor)


def figures(group: ProcessGroup, probe: Probe) -> dict[str, float]:
    """Returns what `Network` takes: latency and bandwidth, both ranks sending at once, and overhead."""
    alone = [_alone(group, probe.move, size) for size in SIZES]
    beside = [_beside(group, probe.move, size, seconds) for size, seconds in zip(SIZES, alone, strict=True)]
    small, large = [move.seconds for move in beside] if probe.is_beside else alone
    rounds = [_rounds(probe.move, size) for size in SIZES]
    share = SIZES[0] / SIZES[1]
    latency = (small - share * large) / (rounds[0] - share * rounds[1])
    latency = min(max(latency, 0.0), small / rounds[0])
    rest = large - latency * rounds[1]
    return {
        "latency": latency,
        "bandwidth": SIZES[1] / rest if rest > 0 else math.inf,
        "overhead": beside[1].overhead / (2 * SIZES[1]),
    }


class _Beside(NamedTuple):
    """What a move takes beside computing."""

    seconds: float
    overhead: float
    """Seconds by which it makes computing longer."""


def _alone(group: ProcessGroup, move: Callable[[ProcessGroup, torch.Tensor], None], num_bytes: int) -> float:
    tensor = torch.zeros(num_bytes // 4)

    def some() -> None:
        for _ in range(BATCH):
            move(group, tensor)

    return statistics.median(timed(group, some)) / BATCH


def _beside(
    group: ProcessGroup, move: Callable[[ProcessGroup, torch.Tensor], None], num_bytes: int, alone: float
) -> _Beside:
    """Times as many moves as fill two thirds of three computations, which they take alone."""
    tensor = torch.zeros(num_bytes // 4)
    one = computing(group)

    def compute() -> float:
        began = group.backend.now()
        for _ in range(3):
            one()
        return group.backend.now() - began

    count = int(str(group.broadcast_object(max(1, int(compute() / alone * 2 / 3)))))

    def moves() -> float:
        began = group.backend.now()
        for _ in range(count):
            move(group, tensor)
        return group.backend.now() - began

    seconds, longer = [], []
    for _ in range(9):
        group.barrier()
        without = compute()
        group.barrier()
        moving = group.backend.lanes.start(moves, "messages")
        longer.append(compute() - without)
        seconds.append(moving.wait())
    return _Beside(statistics.median(seconds) / count, max(0.0, statistics.median(longer)) / count)


def _rounds(move: Callable[[ProcessGroup, torch.Tensor], None], num_bytes: int) -> float:
    """Returns how many latencies one move takes simulated ranks."""

    def once(group: ProcessGroup) -> float:
        return statistics.median(timed(group, lambda: move(group, torch.zeros(num_bytes // 4))))

    return float(echelon.simulate(once, 2, network=Network(1.0, math.inf)).results[0])
