"""Tuning of collective algorithms: times on the given ranks, and the rules that follow from them.

All ranks measure together: groups of the first 2, 4, 8, ... ranks and of all, every algorithm of every collective in
turns, on arrays of growing size; then messages within a host and between two. A time is that of the slowest rank,
agreed by a reduction. Rank 0 decides and broadcasts its table.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from echelon.arguments import writing
from echelon.bench.measure import measure_case, network_of, print_above, progress
from echelon.bench.request import DEFAULT_RANKS, Case, Tuning, is_launched
from echelon.bench.subject import EchelonSubject
from echelon.collectives.plans.algorithms import OPERATIONS, algorithms_of
from echelon.collectives.plans.algorithms.hosts import Hosts, is_nested
from echelon.collectives.plans.select import ANY_SIZE, SIZED, Rule, Table, Where, choose, variable_of
from echelon.collectives.plans.tuning import from_text, to_text
from echelon.errors import LaunchError
from echelon.group.group import ProcessGroup
from echelon.launch.init import init
from echelon.launch.spawn import spawn
from echelon.launch.status_line import columns_of_text
from echelon.launch.tuned import VARIABLE, default_path
from echelon.simulation import simulate


def run(tuning: Tuning) -> None:
    """Tunes on new ranks, or as a launched rank. Writes and prints the table.

    Raises:
        LaunchError: a variable fixes an algorithm, or the table cannot be written.
    """
    for variable in map(variable_of, OPERATIONS):
        if os.environ.get(variable):
            raise LaunchError(f"{variable} is set and would override the measured algorithms: unset it")
    path = _path(tuning)
    # Checked first, since the measurement takes minutes.
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise LaunchError(f"cannot write {path}: give a file in a folder that can be written to, with --output")
    num_ranks = tuning.num_ranks or DEFAULT_RANKS
    if is_launched(tuning):
        with init(tuning.backend) as group:
            _tune_and_write(group, tuning)
    elif tuning.backend == "simulated":
        simulate(_tune_and_write, num_ranks, (tuning,), network=network_of(tuning))
    else:
        spawn(_tune_and_write, num_ranks, (tuning,), tuning.backend)


def _path(tuning: Tuning) -> Path:
    return default_path(os.environ) if tuning.output is None else Path(tuning.output)


def _tune_and_write(group: ProcessGroup, tuning: Tuning) -> None:
    shown = progress(tuning.as_json)

    def report(line: str) -> None:
        if shown is not None:
            print_above(line, shown)

    text = tune(group, tuning.sizes(), tuning.turns, report)
    if group.rank != 0:
        return
    path = _path(tuning)
    _write(path, text)
    if tuning.as_json:
        print_above(text.rstrip("\n"), sys.stdout)
        return
    rules = (
        textwrap.fill(line, columns_of_text(), subsequent_indent="  ")
        for line in _sentences(from_text(text, str(path)))
    )
    print_above("\n" + "\n".join(rules), sys.stdout)
    reads = "" if tuning.output is None else f" where {VARIABLE}={path} is set"
    print_above(f"\nwrote {path}: new jobs whose rank 0 is on this host use it{reads}", sys.stdout)


def _write(path: Path, text: str) -> None:
    """Writes a file atomically: jobs that start meanwhile read the old table or the new one."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, since os.replace is atomic only within one file system.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)


def _sentences(table: Table) -> Iterator[str]:
    for operation, rules in table.items():
        for (num_ranks, where), group in groupby(rules, lambda rule: (rule.ranks, rule.where)):
            yield f"{operation}, {num_ranks} ranks or more, {where}: {', '.join(map(_words, group))}"


def _words(rule: Rule) -> str:
    if (rule.first, rule.last) == (0, ANY_SIZE):
        return rule.name
    return f"{rule.name} " + ("above" if rule.last == ANY_SIZE else f"up to {rule.last} bytes")


# The default algorithm is kept up to 1.05 times the best time: a smaller difference may be noise.
_MARGIN = 1.05
# Seconds. Lower bound before a logarithm, since an operation of simulated ranks may take no time.
_LEAST = 1e-12


class Timing(NamedTuple):
    """Times of all algorithms of an operation, for one size on one group of ranks."""

    operation: str
    hosts: Hosts
    size: int
    seconds: Mapping[str, float]

    @property
    def where(self) -> Where:
        """Kind of groups that a rule from this timing is for."""
        return "several hosts" if max(self.hosts) else "one host"


def decide(timings: Iterable[Timing]) -> Table:
    """Returns rules from timings: the fastest algorithm, or the default one if it is within `_MARGIN`.

    Timings of one operation and group are consecutive, sorted by size. A rule applies from its number of ranks up to
    the next measured number.
    """
    table: dict[str, list[Rule]] = {}
    for (operation, hosts), group in groupby(timings, lambda timing: (timing.operation, timing.hosts)):
        decided = _by_size if operation in SIZED else _for_all_sizes
        found = decided(list(group))
        table.setdefault(operation, []).extend(rule._replace(ranks=len(hosts)) for rule in found)
    return {operation: tuple(sorted(rules, key=lambda rule: -rule.ranks)) for operation, rules in table.items()}


def _by_size(timings: Sequence[Timing]) -> list[Rule]:
    best = _without_islands([_best(timing, timing.seconds) for timing in timings])
    by_name = groupby(zip(best, timings, strict=True), lambda each: each[0])
    runs = [(name, [timing.size for _, timing in run]) for name, run in by_name]
    rules, first = [], 0
    for index, (name, sizes) in enumerate(runs):
        # The boundary is the geometric mean of the sizes on both sides, as sizes grow by a factor.
        last = ANY_SIZE if index + 1 == len(runs) else math.isqrt(sizes[-1] * runs[index + 1][1][0])
        rules.append(Rule(name, first, last, where=timings[0].where))
        first = last + 1
    return rules


def _without_islands(names: Sequence[str]) -> list[str]:
    """Replaces a best algorithm of a single size by that of both neighbours, as noise."""
    inner = (
        before if before == after else name for before, name, after in zip(names, names[1:], names[2:], strict=False)
    )
    return [*names[:1], *inner, *names[1:][-1:]]


def _for_all_sizes(timings: Sequence[Timing]) -> list[Rule]:
    """Returns one rule, by the least geometric mean over all sizes: ranks do not know each other's sizes."""
    logarithms = {
        name: sum(math.log(max(timing.seconds[name], _LEAST)) for timing in timings) for name in timings[0].seconds
    }
    means = {name: math.exp(total / len(timings)) for name, total in logarithms.items()}
    return [Rule(_best(timings[0], means), where=timings[0].where)]


def _best(timing: Timing, seconds: Mapping[str, float]) -> str:
    # A default that was not measured here counts as infinitely slow.
    usual = choose(timing.operation, timing.size, timing.hosts)
    fastest = min(seconds, key=lambda name: (seconds[name], name))
    return usual if seconds.get(usual, math.inf) <= seconds[fastest] * _MARGIN else fastest


_SECONDS = 0.02  # of a turn; shorter than in bench, as there are hundreds of cases
_MESSAGE = 4 << 20  # bytes of the messages that measure bandwidth


def tune(group: ProcessGroup, sizes: Sequence[int], turns: int, report: Callable[[str], None]) -> str:
    """Measures all algorithms and decides on rules. Collective: every rank of the group calls it.

    Returns the content of the table's file, with the measured times. It is the same on every rank.

    Args:
        group: the ranks to measure on, at least 2.
        sizes: bytes of the arrays, growing.
        turns: turns of each algorithm; their median counts.
        report: called on rank 0 with a line for each measurement.

    Raises:
        LaunchError: a group of one rank.
    """
    if group.world_size < 2:
        raise LaunchError("tune: 1 rank has nothing to tune; give -n 2 or more, or start it on more")
    say: Callable[[str], None] = report if group.rank == 0 else lambda _: None
    links = _links(group, turns, say)
    say(_TITLES)
    timings: list[Timing] = []
    for count in _group_sizes(group.world_size):
        for timing in time_algorithms(group, count, sizes, turns):
            timings.append(timing)
            say(_line(timing))
        group.barrier()  # ranks outside of a small group wait here, and not in the next measurement
    # Rank 0's text for all: it names the machine, and the cost of combining is measured by each rank.
    return str(group.broadcast_object(to_text(decide(timings), _measured(group, links, timings)), src=0))


def _group_sizes(world_size: int) -> list[int]:
    powers = (1 << number for number in range(1, world_size.bit_length()))
    return sorted({world_size, *(power for power in powers if power < world_size)})


def time_algorithms(
    group: ProcessGroup, count: int, sizes: Sequence[int], turns: int, operations: Sequence[str] = OPERATIONS
) -> Iterator[Timing]:
    """Times every algorithm of operations that have several. Collective: all ranks of the group call it.

    Args:
        group: all ranks.
        count: number of its first ranks that measure; the others get no timings.
        sizes: bytes of the arrays.
        turns: turns of each algorithm; their median counts.
        operations: operations to measure.
    """
    hosts = group.hosts[:count]
    for operation in operations:
        names = _candidates(operation, hosts)
        if len(names) < 2:
            continue
        # One group per algorithm. Every rank calls `subgroup`, members or not.
        parts = [group.subgroup(range(count), name, table={operation: (Rule(name),)}) for name in names]
        subjects = [EchelonSubject(part, part.name) for part in parts if part is not None]
        if not subjects or parts[0] is None:
            continue
        cases = (Case.of(operation, count, size) for size in sizes)
        for case in dict.fromkeys(cases):
            row = measure_case(parts[0], case, subjects, turns, seconds=_SECONDS)
            yield Timing(operation, hosts, case.size, {each.subject: each.seconds for each in row.measured})


def _candidates(operation: str, hosts: Hosts) -> list[str]:
    # Without several hosts, one of them with several ranks, a hierarchical algorithm is another one.
    nested = is_nested(hosts)
    return [algorithm.name for algorithm in algorithms_of(operation) if nested or not algorithm.goes_by_hosts]


def _links(group: ProcessGroup, turns: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures messages from rank 0 within its host and to another host, and the cost of a reduction per byte."""
    found: dict[str, Any] = {}
    for name, same in (("inside a host", True), ("between hosts", False)):
        other = next((rank for rank in range(1, group.world_size) if (group.hosts[rank] == group.hosts[0]) == same), 0)
        pair = group.subgroup([0, other]) if other else None
        if pair is None:
            continue
        subjects = [EchelonSubject(pair)]
        cases = (Case.of("send_recv", 2, size) for size in (8, _MESSAGE))
        small, large = (measure_case(pair, case, subjects, turns).measured[0].seconds for case in cases)
        bandwidth = (_MESSAGE - 8) / max(large - small, _LEAST)
        found[name] = {"latency": small, "bandwidth": bandwidth}
        say(f"{name}: {small * 1e6:.4g} us a message, {bandwidth / 1e9:.4g} GB/s")
    return {**found, "combining": {"seconds_per_byte": _gamma(turns)}}


def _gamma(turns: int) -> float:
    one, other = torch.ones(_MESSAGE // 4), torch.ones(_MESSAGE // 4)
    times = []
    for _ in range(turns + 1):
        begin = time.perf_counter()
        one.add_(other)
        times.append(time.perf_counter() - begin)
    # The least time: the first call maps memory, and other load only adds.
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


_COLUMNS = "{:14}  {:>5}  {:>10}  "
_TITLES = _COLUMNS.format("operation", "ranks", "bytes") + "us by algorithm, the fastest first"


def _line(timing: Timing) -> str:
    """Returns a row, in several lines if need be."""
    columns = _COLUMNS.format(timing.operation, len(timing.hosts), timing.size)
    ordered = sorted(timing.seconds.items(), key=lambda item: item[1])
    # A space that does not break keeps a time beside its name.
    times = ", ".join(f"{name}\xa0{seconds * 1e6:.4g}" for name, seconds in ordered)
    width, indent = columns_of_text(), " " * len(columns)
    wrapped = textwrap.fill(times, width, initial_indent=columns, subsequent_indent=indent)
    return wrapped.replace("\xa0", " ")
