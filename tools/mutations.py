"""Mutation testing: applies each mutation of tools/mutations.toml to a copy of the project and runs the nearest tests.

    python tools/mutations.py                    runs all mutations, one after the other
    python tools/mutations.py --jobs 2 reducer   two at a time; only mutations whose file or words contain "reducer"
    python tools/mutations.py --check            compares the list with the source, and runs nothing

A mutation is killed if a test fails, or if its tests do not end within the deadline. One that survives shows a gap in
the tests: add a test, or replace the mutation if it changes no behaviour. The exit status is 1 if a mutation survives,
if the list does not fit the source, if no mutation was chosen, or if the tests fail without a mutation.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
SOURCE = Path("src/echelon")
_NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "out", "*.egg-info")
_DEADLINE = 300.0
"""Seconds for the tests of one mutation. The slowest take a minute on two cores."""
_DEADLINE_WITHOUT = 3000.0
"""Seconds for all tests of the list without a mutation."""


class Mutation(NamedTuple):
    """Small mistake in one source file, and the test files that should find it."""

    breaks: str
    """Behaviour that the mutation breaks."""
    file: str
    """Path below src/echelon."""
    find: str
    """Text that occurs exactly once in the file."""
    replace: str
    tests: tuple[str, ...]
    """Nearest test files, below tests."""

    @property
    def path(self) -> Path:
        """Path of the source file in the project."""
        return SOURCE / self.file

    def applied(self, source: str) -> str:
        """Returns the mutated source."""
        return source.replace(self.find, self.replace)

    def __str__(self) -> str:
        return f"{self.file}: {self.breaks}"


def read() -> list[Mutation]:
    """Returns the mutations of the list."""
    rows = tomllib.loads(LIST.read_text())["mutation"]
    return [Mutation(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def problems(mutations: Sequence[Mutation]) -> Iterator[str]:
    """Yields the entries that do not fit the source any more."""
    for one in mutations:
        path = ROOT / one.path
        if not path.is_file():
            yield f"{one}: there is no file {one.path}"
            continue
        source = path.read_text()
        if (count := source.count(one.find)) != 1:
            yield f"{one}: its text occurs {count} times in {one.path}, not once"
        elif _dumped(one.applied(source)) == _dumped(source):
            yield f"{one}: it changes nothing"
        yield from (f"{one}: there is no tests/{test}" for test in one.tests if not (ROOT / "tests" / test).is_file())


# Most files have several mutations.
@functools.cache
def _dumped(source: str) -> str:
    return ast.dump(ast.parse(source))


class Outcome(NamedTuple):
    """Result of one run of tests."""

    passed: bool
    is_late: bool
    """Whether the tests did not end within the deadline."""
    seconds: float
    output: str

    @property
    def first_failure(self) -> str:
        """First failed test of the output. Empty if it names none."""
        lines = (line.split(" ", 1) for line in self.output.splitlines() if line.startswith(("FAILED ", "ERROR ")))
        return next((words[1].split(" - ")[0] for words in lines if len(words) == 2), "")


def run_tests(tree: Path, tests: Sequence[str], deadline: float, also: Sequence[str] = ()) -> Outcome:
    """Runs test files in a copy of the project. Blocks until they end, at most `deadline` seconds."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *also]
    files = [str(Path("tests", test)) for test in tests]
    # The copy's package comes before the installed one, in processes that tests start, too.
    environ = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *files], cwd=tree, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(deadline)
            is_late = False
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            # The whole session: ranks that the tests have started end with them.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        # Without a test nothing has failed: no file of the list has quick tests any more.
        passed = process.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        return Outcome(passed, is_late, time.monotonic() - began, output.read())


def copy_of_project(folder: Path) -> Path:
    """Copies the project into a folder and returns the copy's path."""
    tree = folder / "echelon"
    shutil.copytree(ROOT, tree, ignore=_NOT_COPIED, symlinks=True)
    return tree


def try_one(mutation: Mutation, trees: SimpleQueue[Path], deadline: float) -> tuple[Mutation, Outcome]:
    """Applies a mutation to a free copy, runs its tests and restores the copy."""
    tree = trees.get()
    path = tree / mutation.path
    source = path.read_text()
    try:
        path.write_text(mutation.applied(source))
        return mutation, run_tests(tree, mutation.tests, deadline)
    finally:
        path.write_text(source)
        trees.put(tree)


def verdict(outcome: Outcome) -> str:
    """Returns the word for an outcome."""
    if outcome.is_late:
        return "timeout"
    return "survived" if outcome.passed else "killed"


def main(arguments: Sequence[str]) -> int:
    """Runs the chosen mutations, prints a line for each, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run only mutations whose file or description contains a word")
    parser.add_argument("--jobs", type=int, default=1, help="number of mutations at a time")
    parser.add_argument("--deadline", type=float, default=_DEADLINE, help="seconds for the tests of one mutation")
    parser.add_argument("--check", action="store_true", help="only compare the list with the source")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests without a mutation first")
    given = parser.parse_args(arguments)
    # A shell starts background jobs with SIGINT ignored, and tests that send it would fail.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mutations = read()
    if stale := list(problems(mutations)):
        print(*stale, sep="\n")
        return 1
    if given.check:
        print(f"{len(mutations)} mutations fit the source")
        return 0
    chosen = [one for one in mutations if not given.words or any(word in str(one) for word in given.words)]
    if not chosen:
        print(f"no mutation's file or description contains {' or '.join(given.words)}")
        return 1
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(max(1, given.jobs)):
            trees.put(copy_of_project(Path(folder, str(number))))
        if not given.unchecked:
            tests = sorted({test for one in chosen for test in one.tests})
            tree = trees.get()
            without = run_tests(tree, tests, _DEADLINE_WITHOUT)
            trees.put(tree)
            if not without.passed:
                print(without.output, f"the tests fail without a mutation: {without.first_failure}", sep="\n")
                return 1
            print(f"{len(tests)} test files pass without a mutation ({without.seconds:.0f} s)", flush=True)
        counts = {"killed": 0, "timeout": 0, "survived": 0}
        with ThreadPoolExecutor(max(1, given.jobs)) as threads:
            for mutation, outcome in threads.map(lambda one: try_one(one, trees, given.deadline), chosen):
                word = verdict(outcome)
                counts[word] += 1
                by = f" ({outcome.first_failure})" if outcome.first_failure else ""
                print(f"{word:8} {outcome.seconds:4.0f} s  {mutation}{by}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return int(counts["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
