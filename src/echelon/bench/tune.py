"""Finds the best algorithms for the ranks that it is run with.

All ranks measure together: groups of the first 2, 4, 8, ... ranks and of all, every algorithm of every collective,
taking turns, on arrays of growing size; and messages between two ranks of one host, and of two. The times are those of
the slowest rank, agreed by a reduction. Rank 0 decides, and the others take what it tells them.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from echelon.bench.decide import Timing, decide
from echelon.bench.figures import Case
from echelon.bench.measure import measure_case
from echelon.bench.subject import EchelonSubject
from echelon.collectives.algorithms import OPERATIONS, algorithms_of
from echelon.collectives.algorithms.hosts import Hosts, is_nested
from echelon.collectives.select import Rule, Table
from echelon.collectives.tuning import from_text, to_text
from echelon.errors import LaunchError
from echelon.group import ProcessGroup

_SECONDS = 0.02
"""How long a turn is to last."""
_MESSAGE = 4 << 20
"""Bytes of the messages that bandwidth is measured with."""


class Tuned(NamedTuple):
    """What was found, the same on every rank."""

    table: Table
    text: str
    """The table as a file has it, with the times that it follows from."""


def tune(group: ProcessGroup, sizes: Sequence[int], turns: int, report: Callable[[str], None]) -> Tuned:
    """Measures and decides; every rank of the group calls it.

    Args:
        group: the ranks to measure with, at least 2.
        sizes: bytes of the arrays, growing.
        turns: how often each algorithm takes its turn; the median counts.
        report: called with a line on what was measured, on rank 0.

    Raises:
        LaunchError: a group of one.
    """
    if group.world_size < 2:
        raise LaunchError("tune: 1 rank has nothing to tune; give -n 2 or more, or start it on more")
    say: Callable[[str], None] = report if group.rank == 0 else lambda _: None
    links = _links(group, turns, say)
    timings: list[Timing] = []
    for count in _group_sizes(group.world_size):
        for timing in time_algorithms(group, count, sizes, turns):
            timings.append(timing)
            say(_line(timing))
        group.barrier()
    text = to_text(decide(timings), _measured(group, links, timings))
    told = group.broadcast_object(text, src=0)
    assert isinstance(told, str)
    return Tuned(from_text(told, "rank 0"), told)


def _group_sizes(world_size: int) -> list[int]:
    powers = (1 << number for number in range(1, world_size.bit_length()))
    return sorted({world_size, *(power for power in powers if power < world_size)})


def time_algorithms(
    group: ProcessGroup, count: int, sizes: Sequence[int], turns: int, operations: Sequence[str] = OPERATIONS
) -> Iterator[Timing]:
    """Measures every algorithm of operations that have several; all ranks of the group call it.

    Args:
        group: what the ranks that measure are taken from.
        count: how many of its first ranks measure; the others are given no timings.
        sizes: bytes of the arrays.
        turns: how often each algorithm takes its turn; the median counts.
        operations: which to measure.
    """
    hosts = group.hosts[:count]
    for operation in operations:
        names = _candidates(operation, hosts)
        if len(names) < 2:
            continue
        parts = [group.subgroup(range(count), name, table={operation: (Rule(name),)}) for name in names]
        subjects = [EchelonSubject(part, part.name) for part in parts if part is not None]
        if not subjects or parts[0] is None:
            continue
        cases = (Case.of(operation, count, size, "float32", 4, "sum", 0) for size in sizes)
        for case in dict.fromkeys(cases):
            row = measure_case(parts[0], case, subjects, turns, seconds=_SECONDS)
            yield Timing(operation, hosts, case.size, {each.subject: each.seconds for each in row.measured})


def _candidates(operation: str, hosts: Hosts) -> list[str]:
    nested = is_nested(hosts)
    return [algorithm.name for algorithm in algorithms_of(operation) if nested or not algorithm.goes_by_hosts]


def _links(group: ProcessGroup, turns: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures messages between rank 0 and the next on its host and on another, and what combining costs."""
    found: dict[str, Any] = {}
    for name, same in (("inside a host", True), ("between hosts", False)):
        others = [rank for rank in range(1, group.world_size) if (group.hosts[rank] == group.hosts[0]) == same]
        if not others:
            continue
        pair = group.subgroup([0, others[0]])
        if pair is None:
            continue
        small, large = (
            measure_case(pair, Case.of("send_recv", 2, size, "float32", 4, "sum", 0), [EchelonSubject(pair)], turns)
            .measured[0]
            .seconds
            for size in (8, _MESSAGE)
        )
        bandwidth = (_MESSAGE - 8) / max(large - small, 1e-12)
        found[name] = {"latency": small, "bandwidth": bandwidth}
        say(f"{name}: {small * 1e6:.4g} us a message, {bandwidth / 1e9:.4g} GB/s")
    found["combining"] = {"seconds_per_byte": _gamma(turns)}
    return found


def _gamma(turns: int) -> float:
    one, other = torch.ones(_MESSAGE // 4), torch.ones(_MESSAGE // 4)
    times = []
    for _ in range(turns + 1):
        begin = time.perf_counter()
        one.add_(other)
        times.append(time.perf_counter() - begin)
    return min(times) / _MESSAGE


def _measured(group: ProcessGroup, links: dict[str, Any], timings: Sequence[Timing]) -> dict[str, Any]:
    return {
        "backend": group.backend.name,
        "ranks": group.world_size,
        "hosts": list(group.hosts),
        "machine": f"{platform.node()}: {platform.platform()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "links": links,
        "seconds": [
            {"operation": each.operation, "ranks": len(each.hosts), "size": each.size, **each.seconds}
            for each in timings
        ],
    }


def _line(timing: Timing) -> str:
    ordered = sorted(timing.seconds.items(), key=lambda item: item[1])
    times = ", ".join(f"{name} {seconds * 1e6:.4g}" for name, seconds in ordered)
    return f"{timing.operation}, {len(timing.hosts)} ranks, {timing.size} bytes: us by {times}"
