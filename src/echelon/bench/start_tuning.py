"""Starts the ranks that tune, or is one of them already; and writes what they found."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from echelon.bench.tune import tune
from echelon.collectives.plans.algorithms import OPERATIONS
from echelon.collectives.plans.select import ANY_SIZE, Rule, Table, variable_of
from echelon.errors import LaunchError
from echelon.group.group import ProcessGroup
from echelon.launch.init import init
from echelon.launch.spawn import spawn
from echelon.launch.tuned import VARIABLE, default_path
from echelon.simulation import Network, simulate


class Tuning(NamedTuple):
    """What to tune: array sizes in bytes, turns of each algorithm, and where to write (None: the default path)."""

    sizes: tuple[int, ...]
    turns: int
    output: str | None
    as_json: bool

    @property
    def path(self) -> Path:
        """Where the table goes."""
        return default_path(os.environ) if self.output is None else Path(self.output)

    def check(self) -> None:
        """Finds what would spoil the measurement, before it starts.

        Raises:
            LaunchError: there is such.
        """
        if self.turns < 1:
            raise LaunchError(f"--turns {self.turns}: nothing would be measured; give 1 or more")
        for variable in map(variable_of, OPERATIONS):
            if os.environ.get(variable):
                raise LaunchError(f"{variable} overrules what is to be measured: unset it")
        folder = next(parent for parent in self.path.absolute().parents if parent.exists())
        if self.path.is_dir() or not os.access(folder, os.W_OK):
            raise LaunchError(
                f"cannot write {self.path}: give a file in a folder that can be written to, with --output"
            )


def run(tuning: Tuning, num_ranks: int, backend: str, network: Network | None) -> None:
    """Tunes on `num_ranks` new ranks: processes, or simulated ones over `network`.

    Raises:
        LaunchError: what cannot be tuned.
    """
    tuning.check()
    if backend == "simulated":
        simulate(_tune_and_write, num_ranks, (tuning,), network=network)
    else:
        spawn(_tune_and_write, num_ranks, (tuning,), backend)


def run_as_rank(tuning: Tuning, backend: str) -> None:
    """Tunes as one of the ranks that a launcher has started."""
    tuning.check()
    with init(backend) as group:
        _tune_and_write(group, tuning)


def _tune_and_write(group: ProcessGroup, tuning: Tuning) -> None:
    report = _ignore if tuning.as_json else _print
    found = tune(group, tuning.sizes, tuning.turns, report)
    if group.rank != 0:
        return
    _write(tuning.path, found.text)
    if tuning.as_json:
        print(found.text, end="", flush=True)
        return
    print("\n" + "\n".join(_sentences(found.table)))
    reads = "" if tuning.output is None else f" where {VARIABLE}={tuning.path} is set"
    print(f"\nwrote {tuning.path}: new jobs whose rank 0 is on this host go by it{reads}", flush=True)


def _write(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error.strerror}; give another place with --output") from None


def _sentences(table: Table) -> Iterator[str]:
    for operation, rules in table.items():
        for (num_ranks, where), group in groupby(rules, lambda rule: (rule.ranks, rule.where)):
            yield f"{operation}, {num_ranks} ranks or more, {where}: {', '.join(map(_words, group))}"


def _words(rule: Rule) -> str:
    if (rule.first, rule.last) == (0, ANY_SIZE):
        return rule.algorithm
    return f"{rule.algorithm} " + ("above" if rule.last == ANY_SIZE else f"up to {rule.last} bytes")


def _print(line: str) -> None:
    print(line, flush=True)


def _ignore(_: str) -> None:
    pass
