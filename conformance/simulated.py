"""Runs PyTorch's own tests of torch.distributed on processes over Gloo and on simulated ranks, and compares both.

    python conformance/simulated.py                  # downloads the tests at the tag of the installed torch
    python conformance/simulated.py --source FOLDER  # takes them from a source tree of PyTorch
    python conformance/simulated.py test_dtensor.py --tests test_from_local

Prints a table of all files, and each test that passes on processes only, with the reason. Ends with status 1 if such a
test has no reason in `differences.toml`, if less than 90 % pass, or if no test passes over Gloo. Ends with a line and
status 0 if the tests cannot be downloaded.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch_source

HERE = Path(__file__).parent
OUT = HERE.parent / "out" / "conformance"
SECONDS = 7200.0
"""Most seconds for one file."""
GOAL = 0.9
"""Least share of the tests passing over Gloo that must pass on simulated ranks."""


class Part(NamedTuple):
    """Part of torch.distributed, and the files that test it."""

    name: str
    patterns: tuple[str, ...]
    on_cpu: bool = False
    """Whether the files were written for GPUs, and have "cpu" put in the place of "cuda"."""


PARTS = (
    Part("functional collectives", ("test_functional_api.py",)),
    Part("functional collectives", ("test_c10d_functional_native.py",), on_cpu=True),
    Part("DTensor", ("tensor/**/test_*.py", "_tensor/**/test_*.py", "test_device_mesh.py")),
    Part("FSDP2", ("_composable/fsdp/test_*.py", "_composable/test_composability/test_2d*.py"), on_cpu=True),
    Part(
        "DDP and collectives",
        (
            "test_distributed_spawn.py",
            "test_c10d_gloo.py",
            "test_c10d_common.py",
            "test_c10d_spawn_gloo.py",
            "test_c10d_object_collectives.py",
            "_composable/test_replicate*.py",
            "algorithms/**/test_*.py",
        ),
    ),
)


class File(NamedTuple):
    """File of tests."""

    of: Part
    path: Path
    name: str
    """Path inside of the folder of tests."""


class Compared(NamedTuple):
    """Tests of a file that pass on processes."""

    file: File
    passing: frozenset[str]
    """Names of these tests."""
    failing: Mapping[str, str]
    """Problems of these tests on simulated ranks. The others pass there, too."""


def files_in(tree: Path) -> Iterator[File]:
    """Yields the files of all parts, in order."""
    folder = tree / torch_source.FOLDER
    for part in PARTS:
        for path in sorted({path for pattern in part.patterns for path in folder.glob(pattern)}):
            yield File(part, path, str(path.relative_to(folder)))


def run(how: str, file: File, tests: Sequence[str], keeps: bool) -> dict[str, str | None]:
    """Runs the tests of a file one way. Returns the problem of each: empty if it passed, None if it was skipped.

    With `keeps`, results of an earlier run are returned if there are some. The output goes to a log.
    """
    stem = OUT / "simulated" / f"{file.name.replace('/', '-').removesuffix('.py')}-{how}"
    results = stem.with_suffix(".jsonl")
    if not (keeps and results.exists()):
        stem.parent.mkdir(parents=True, exist_ok=True)
        results.write_text("")
        command = [sys.executable, str(HERE / "file_of_tests.py"), *(["--on-cpu"] if file.of.on_cpu else [])]
        command += [how, str(file.path), str(results), *tests, "--without", *(pattern for pattern, _ in left_out(file))]
        with tempfile.TemporaryDirectory() as folder, open(stem.with_suffix(".log"), "w") as log:
            (Path(folder) / "barrier").touch()
            environ = os.environ | {"TEMP_DIR": folder, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environ, stdout=log, stderr=log, timeout=SECONDS, check=False)
        if done.returncode:
            print(f"{file.name}, {how}: ended with status {done.returncode} before its last test: see {log.name}")
    told = [json.loads(line) for line in results.read_text().splitlines()]
    return {each["test"]: each["problem"] for each in told}


def compare(file: File, tests: Sequence[str], kept: Sequence[str]) -> Compared:
    """Runs the tests of a file both ways. Results of an earlier run are taken for the ways in `kept`."""
    gloo = run("gloo", file, tests, "gloo" in kept)
    passing = frozenset(name for name, problem in gloo.items() if problem == "")
    ours = run("simulated", file, sorted(passing), "simulated" in kept) if passing else {}
    problems = {name: ours.get(name, "it did not run") for name in passing}
    failing = {
        name: "it was skipped" if problem is None else problem for name, problem in problems.items() if problem != ""
    }
    return Compared(file, passing, failing)


def read(kind: str) -> list[tuple[str, str, str]]:
    """Returns the entries of a kind in `differences.toml`: patterns of a file, patterns of its tests, and reasons."""
    with open(HERE / "differences.toml", "rb") as file:
        found = tomllib.load(file)[kind]
    return [(*tests.split("::"), each["reason"]) for each in found for tests in each["tests"]]


def left_out(file: File) -> list[tuple[str, str]]:
    """Returns patterns of tests that are no programs of torch.distributed, and reasons."""
    return [(tests, reason) for path, tests, reason in read("left_out") if fnmatch.fnmatch(file.name, path)]


def reason_for(file: File, test: str) -> str:
    """Returns the reason why a test fails on simulated ranks. Empty if none is known."""
    for path, tests, reason in read("difference"):
        if fnmatch.fnmatch(file.name, path) and fnmatch.fnmatch(test, tests):
            return reason
    return ""


def report(found: Sequence[Compared], source: str) -> bool:
    """Prints the table and the differences. True if all differences have a reason, and enough tests pass."""
    print(f"\nTests of torch {source}, with torch {torch.__version__}, Python {platform.python_version()}.")
    print("\n| tests | pass over Gloo | on simulated ranks | share |\n|---|---|---|---|")
    for name in dict.fromkeys(part.name for part in PARTS):
        of_part = [each for each in found if each.file.of.name == name and each.passing]
        for each in of_part:
            _print_row(f"`{each.file.name}`", [each])
        if of_part:
            _print_row(f"**{name}**", of_part)
    _print_row("**all**", found)
    unknown = _print_differences(found)
    for each, name in unknown:
        print(f"\n{each.file.name}::{name} fails on simulated ranks, for no known reason:\n{each.failing[name]}")
    num_passing = sum(len(each.passing) for each in found)
    num_failing = sum(len(each.failing) for each in found)
    if not num_passing:
        print(f"\nno test passes over Gloo: see {OUT / 'simulated'}")
    return not unknown and num_passing > 0 and num_passing - num_failing >= GOAL * num_passing


def _print_row(name: str, found: Sequence[Compared]) -> None:
    passing = sum(len(each.passing) for each in found)
    failing = sum(len(each.failing) for each in found)
    share = f"{(passing - failing) / passing:.1%}" if passing else "-"
    print(f"| {name} | {passing} | {passing - failing} | {share} |")


def _print_differences(found: Sequence[Compared]) -> list[tuple[Compared, str]]:
    """Prints the known differences by reason. Returns the others."""
    by_reason: dict[str, list[str]] = {}
    unknown = []
    for each in found:
        for name in sorted(each.failing):
            if reason := reason_for(each.file, name):
                by_reason.setdefault(reason, []).append(name)
            else:
                unknown.append((each, name))
    print("\n| fail on simulated ranks | reason |\n|---|---|")
    for reason, names in by_reason.items():
        print(f"| {', '.join(f'`{name}`' for name in names)} | {reason} |")
    return unknown


def main() -> None:
    """Reads the arguments, runs everything, and ends with the status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="names of files to run; none: all")
    parser.add_argument("--source", type=Path, help="source tree of PyTorch, instead of a download")
    parser.add_argument("--tests", nargs="+", default=[], help="run tests whose names contain one of these words only")
    parser.add_argument(
        "--keep", nargs="+", default=[], choices=["gloo", "simulated"], help="take results of an earlier run for these"
    )
    arguments = parser.parse_args()
    try:
        tree = arguments.source or torch_source.fetched(OUT / "torch")
    except torch_source.Unreachable as error:
        print(f"skipped: the tests of torch {torch.__version__} cannot be downloaded: {error}")
        return
    files = [
        each for each in files_in(tree) if not arguments.files or any(word in each.name for word in arguments.files)
    ]
    if not files:
        sys.exit(f"no such file of tests in {tree}")
    if lost := [part for part in PARTS if not arguments.files and part not in {each.of for each in files}]:
        sys.exit(f"no file in {tree} is one of {' or '.join(pattern for part in lost for pattern in part.patterns)}")
    found = []
    for file in files:
        print(file.name, flush=True)
        found.append(compare(file, arguments.tests, arguments.keep))
    version = tree / "version.txt"
    sys.exit(0 if report(found, version.read_text().strip() if version.exists() else tree.name) else 1)


if __name__ == "__main__":
    main()
