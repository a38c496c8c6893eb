"""Link between two ranks, measured as a `Network` by collectives or messages: alone, between computations, beside them.

A link is measured in the way in which a program uses it: as a `Network` on which moving a tensor takes simulated ranks
as long as it took these two. A program that moves beside its backward is predicted by moves beside computing: a message
then waits for the core, and for the interpreter, until what computes lets go of them. A program that computes, moves,
waits and computes again is predicted by moves between computations: the ranks come apart there, so that bytes move
while one of them computes, and computing leaves the caches cold.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

import echelon
from echelon import Network, ProcessGroup

sys.path.append(str(Path(__file__).parents[1]))
from harness import Act

WARM_UP, STEPS = 2, 6
BATCH = 10
"""Moves that are timed together: over a slow link the ranks take turns in being late."""
COMPUTATIONS = 3
"""Computations in a row beside which is moved."""

Use: TypeAlias = Literal["alone", "between", "beside"]
"""How a program moves: without computing, between computations for which it waits, or beside computing."""

Move: TypeAlias = Callable[[ProcessGroup, torch.Tensor], None]
"""Movement of a tensor's bytes: each rank sends and receives them once."""


def timed(group: ProcessGroup, step: Callable[[], object], count: int = WARM_UP + STEPS) -> list[float]:
    """Returns how long each step took but the first, one upon the other as in training, on the clock of the group.

    That clock is virtual on simulated ranks. No barrier stands between steps: over a slow link one rank would leave it
    later than the other, and begin its step so much nearer to the other's first message.
    """
    group.barrier()
    times = [group.backend.now()]
    for _ in range(count):
        step()
        times.append(group.backend.now())
    return [end - start for start, end in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]


def exchange(group: ProcessGroup, tensor: torch.Tensor) -> None:
    sent = group.isend(tensor, 1 - group.rank)
    group.recv(1 - group.rank)
    sent.wait()


def all_reduce(group: ProcessGroup, tensor: torch.Tensor) -> None:
    group.all_reduce(tensor)


def all_reduce_by_thread(group: ProcessGroup, tensor: torch.Tensor) -> None:
    """Starts an asynchronous all-reduce and waits for it: two threads hand over to each other."""
    group.all_reduce(tensor, async_op=True).wait()


class Beside(NamedTuple):
    """Costs of a move beside computing."""

    seconds: float
    overhead: float
    """Seconds by which it makes computing longer."""


class Moves(NamedTuple):
    """Seconds of a move, for each of two numbers of bytes."""

    alone: tuple[float, float]
    between: tuple[float, float]
    beside: tuple[Beside, Beside]

    @classmethod
    def of(cls, lists: Sequence[Sequence[Any]]) -> Moves:
        """Makes them of lists, as JSON has them."""
        alone, between, (small, large) = lists
        return cls((alone[0], alone[1]), (between[0], between[1]), (Beside(*small), Beside(*large)))

    def seconds(self, use: Use) -> tuple[float, float]:
        """Returns the seconds of a move, for each of the numbers of bytes."""
        if use == "beside":
            return self.beside[0].seconds, self.beside[1].seconds
        return self.alone if use == "alone" else self.between


def measure(group: ProcessGroup, move: Move, compute: Act, piece: Act, sizes: tuple[int, int], pairs: int) -> Moves:
    """Measures a link. Collective: both ranks call it.

    Args:
        group: two ranks.
        move: moves bytes as the program does.
        compute: computes as the program does in a step.
        piece: computes about as much as the program does between two moves.
        sizes: numbers of bytes to move, the smaller first.
        pairs: how often it computes, without moves and with them in turns.
    """
    small, large = (_alone(group, move, size) for size in sizes)
    between = (_between(group, move, piece, size, pairs) for size in sizes)
    beside = (_beside(group, move, compute, *each, pairs) for each in zip(sizes, (small, large), strict=True))
    return Moves((small, large), (next(between), next(between)), (next(beside), next(beside)))


def network_of(moves: Sequence[Moves], move: Move, sizes: tuple[int, int], use: Use) -> Network:
    """Returns the network on which moves take the median of measurements, with both ranks sending at once.

    Args:
        moves: Measurements.
        move: Move that was measured.
        sizes: Its numbers of bytes.
        use: How the program moves.
    """
    small, large = map(statistics.median, zip(*(each.seconds(use) for each in moves), strict=True))
    rounds = [_rounds(move, size) for size in sizes]
    share = sizes[0] / sizes[1]
    latency = (small - share * large) / (rounds[0] - share * rounds[1])
    latency = min(max(latency, 0.0), small / rounds[0])
    rest = large - latency * rounds[1]
    overhead = statistics.median(each.beside[1].overhead for each in moves)
    return Network(
        latency=latency, bandwidth=sizes[1] / rest if rest > 0 else math.inf, overhead=overhead / (2 * sizes[1])
    )


def _alone(group: ProcessGroup, move: Move, num_bytes: int) -> float:
    tensor = torch.zeros(num_bytes // 4)

    def some() -> None:
        for _ in range(BATCH):
            move(group, tensor)

    return statistics.median(timed(group, some)) / BATCH


def _between(group: ProcessGroup, move: Move, piece: Act, num_bytes: int, pairs: int) -> float:
    """Times moves between pieces of computing, less what the pieces take."""
    tensor = torch.zeros(num_bytes // 4)

    def pieces(and_move: bool) -> float:
        group.barrier()
        began = group.backend.now()
        for _ in range(BATCH):
            piece()
            if and_move:
                move(group, tensor)
        return group.backend.now() - began

    seconds = []
    for _ in range(pairs):
        without = pieces(and_move=False)
        seconds.append(pieces(and_move=True) - without)
    return max(0.0, statistics.median(seconds)) / BATCH


def _beside(group: ProcessGroup, move: Move, compute: Act, num_bytes: int, alone: float, pairs: int) -> Beside:
    """Times as many moves as fill two thirds of the computations, which they take alone."""
    tensor = torch.zeros(num_bytes // 4)

    def computations() -> float:
        began = group.backend.now()
        for _ in range(COMPUTATIONS):
            compute()
        return group.backend.now() - began

    count = int(str(group.broadcast_object(max(1, int(computations() / alone * 2 / 3)))))

    def moves() -> float:
        began = group.backend.now()
        for _ in range(count):
            move(group, tensor)
        return group.backend.now() - began

    seconds, longer = [], []
    for _ in range(pairs):
        group.barrier()
        without = computations()
        group.barrier()
        moving = group.backend.lanes.start(moves, "messages")
        longer.append(computations() - without)
        seconds.append(moving.wait())
    return Beside(statistics.median(seconds) / count, max(0.0, statistics.median(longer)) / count)


def _rounds(move: Move, num_bytes: int) -> float:
    """Returns how many latencies one move takes simulated ranks."""

    def once(group: ProcessGroup) -> float:
        return statistics.median(timed(group, lambda: move(group, torch.zeros(num_bytes // 4))))

    return float(echelon.simulate(once, 2, network=Network(1.0, math.inf)).results[0])
