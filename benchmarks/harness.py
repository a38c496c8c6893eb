"""Parts that the benchmarks share: turns, medians, tables, the line about the machine, and Gloo beside Echelon.

Contestants take turns in changing order, all ranks together, so that other load of the machine hits all of them alike.
A turn counts as the time of the slowest rank. Ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from echelon import ProcessGroup

WARMUP = 3
"""Rounds that do not count."""
Act = Callable[[], object]


def options_of(doc: str | None, rounds: int | None = None, ranks: int | None = None) -> argparse.ArgumentParser:
    """Returns a parser with the first line of a file's docstring, and options for rounds and ranks if given."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    if ranks is not None:
        parser.add_argument("--ranks", type=int, default=ranks)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def print_environment(details: str = "") -> None:
    """Prints the machine, the versions, and how the figures below were taken."""
    print(
        f"{platform.platform()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, torch {version('torch')}"
    )
    print(f"{details}\n" if details else "", flush=True)


def print_head(titles: str) -> None:
    """Prints the head of a table, from titles with bars between them."""
    print(f"| {titles} |\n|{'---|' * (titles.count('|') + 1)}", flush=True)


def print_row(*cells: object) -> None:
    """Prints a line of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


class Rounds(NamedTuple):
    """Seconds of each contestant by round."""

    seconds: dict[str, list[float]]
    """Of the slowest rank."""
    busy: dict[str, list[float]]
    """Of the processors of all ranks, which other work on the machine disturbs less."""


def in_turns(
    group: ProcessGroup, acts: Mapping[str, Act], rounds: int, repeat: int = 1, warmup: int = WARMUP, before: Act = int
) -> Rounds:
    """Measures contestants in turns. Collective: all ranks of the group call it and get the same.

    Args:
        group: the ranks that measure.
        acts: contestants by name.
        rounds: number of turns of each.
        repeat: calls in a turn; a turn counts as their mean.
        warmup: rounds before, which do not count.
        before: called before each turn; it is not timed.
    """
    import torch  # late: some benchmarks count the memory of processes without it

    names = list(acts)
    taken = torch.zeros(2, len(names), warmup + rounds, dtype=torch.float64)
    for number in range(warmup + rounds):
        # Another begins in each round, since who comes after whom counts.
        for index in (*range(number % len(names), len(names)), *range(number % len(names))):
            before()
            group.barrier()
            start, start_busy = time.perf_counter(), time.process_time()
            for _ in range(repeat):
                acts[names[index]]()
            taken[0, index, number] = (time.perf_counter() - start) / repeat
            taken[1, index, number] = (time.process_time() - start_busy) / repeat
    slowest, of_all = group.all_reduce(taken[0].clone(), "max"), group.all_reduce(taken[1].clone(), "sum")
    return Rounds(
        *({name: row[warmup:] for name, row in zip(names, each.tolist(), strict=True)} for each in (slowest, of_all))
    )


def ratio(values: Iterable[float], others: Iterable[float]) -> float:
    """Returns the median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(values, others, strict=True))


def difference(values: Iterable[float], others: Iterable[float]) -> float:
    """Returns the median of the rounds' differences."""
    return statistics.median(one - other for one, other in zip(values, others, strict=True))


def ms(values: Sequence[float], digits: int = 2) -> str:
    """Returns the median of seconds, in milliseconds."""
    return f"{statistics.median(values) * 1e3:.{digits}f}"


@contextlib.contextmanager
def gloo(group: ProcessGroup, store: str) -> Iterator[None]:
    """Opens torch.distributed's default group over Gloo beside `group`. `store`: file that all ranks start by."""
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=group.rank, world_size=group.world_size
    )
    yield
    torch.distributed.destroy_process_group()
