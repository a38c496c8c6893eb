"""Start of the ranks of `echelon tune`, and the file that holds their table."""

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
    """Request of `echelon tune`: array sizes in bytes, turns per algorithm, output file (None: the default path)."""

    sizes: tuple[int, ...]
    turns: int
    output: str | None
    as_json: bool

    @property
    def path(self) -> Path:
        """Path of the table's file."""
        return default_path(os.environ) if self.output is None else Path(self.output)

    def check(self) -> None:
        """Checks the request, the environment and the output path, before any rank is started.

        Raises:
            LaunchError: too few turns, a variable that fixes an algorithm, or a path that cannot be written.
        """
        if self.turns < 1:
            raise LaunchError(f"--turns {self.turns}: nothing would be measured; give 1 or more")
        for variable in map(variable_of, OPERATIONS):
            if os.environ.get(variable):
                raise LaunchError(f"{variable} is set and would override the measured algorithms: unset it")
        folder = next(parent for parent in self.path.absolute().parents if parent.exists())
        if self.path.is_dir() or not os.access(folder, os.W_OK):
            raise LaunchError(
                f"cannot write {self.path}: give a file in a folder that can be written to, with --output"
            )


def run(tuning: Tuning, num_ranks: int, backend: str, network: Network | None) -> None:
    """Tunes on `num_ranks` new ranks (processes, or simulated over `network`) and writes the table.

    Raises:
        LaunchError: the request cannot be tuned.
    """
    tuning.check()
    if backend == "simulated":
        simulate(_tune_and_write, num_ranks, (tuning,), network=network)
    else:
        spawn(_tune_and_write, num_ranks, (tuning,), backend)


def run_as_rank(tuning: Tuning, backend: str) -> None:
    """Tunes as one rank of a launcher's job; rank 0 writes the table."""
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
    print(f"\nwrote {tuning.path}: new jobs whose rank 0 is on this host use it{reads}", flush=True)


def _write(path: Path, text: str) -> None:
    """Writes a file atomically: jobs that start meanwhile read the old table or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, since os.replace is atomic only within one file system.
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
