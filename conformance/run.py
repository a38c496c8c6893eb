"""Runs PyTorch's own tests of torch.distributed over Gloo and over Echelon, and prints both, test by test.

    python conformance/run.py            # 2 and 4 ranks; --ranks 2, or names of tests, for less

Ends with status 1 if Echelon fails a test that Gloo passes, or if either ends before its last test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
LOGS = HERE.parent / "out" / "conformance"
BACKENDS = ("control", "echelon")
# Most seconds for all tests of one backend on one number of ranks.
SECONDS = 1800.0


class Outcomes(NamedTuple):
    """Outcomes of the tests of one backend."""

    problems: dict[str, str]
    """Problem of each test that ran, by the test's name. Empty if it passed."""
    skipped: int
    ended: bool
    """Whether all tests ran: the process neither died nor took too long."""

    @property
    def passed(self) -> set[str]:
        """Names of the tests that passed."""
        return {name for name, problem in self.problems.items() if not problem}


def run(backend: str, num_ranks: int, names: list[str]) -> Outcomes:
    """Runs the named tests, or all, with one backend. The output of the ranks goes to a log."""
    LOGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, open(LOGS / f"{backend}-{num_ranks}.log", "w") as log:
        results = Path(folder) / "results"
        results.touch()
        environ = os.environ | {"BACKEND": backend, "WORLD_SIZE": str(num_ranks), "TEMP_DIR": folder}
        command = [sys.executable, str(HERE / "suite.py"), str(results), *names]
        ended = False
        try:
            done = subprocess.run(command, env=environ, stdout=log, stderr=log, timeout=SECONDS, check=False)
            ended = done.returncode == 0
        except subprocess.TimeoutExpired:
            print(f"{backend} on {num_ranks} ranks took more than {SECONDS:g} s; tests that are missing failed")
        told = [json.loads(line) for line in results.read_text().splitlines()]
    problems = {each["test"]: each["problem"] for each in told if each["problem"] is not None}
    return Outcomes(problems, len(told) - len(problems), ended)


def report(num_ranks: int, control: Outcomes, ours: Outcomes) -> bool:
    """Prints a table of all tests that ran on either. True if ours passed every test that the control passed.

    False if either has not run all tests: a test that is missing over Gloo would be missing from the comparison.
    """
    print(f"\n{num_ranks} ranks\n{'':68}control  echelon")
    for name in sorted(control.problems.keys() | ours.problems.keys()):
        words = [
            "passed" if name in found.passed else "failed" if name in found.problems else "-"
            for found in (control, ours)
        ]
        print(f"{name:68}{words[0]:9}{words[1]}")
    for backend, found in zip(BACKENDS, (control, ours), strict=True):
        failed = len(found.problems) - len(found.passed)
        print(f"{backend}: {len(found.passed)} passed, {failed} failed, {found.skipped} skipped by the suite")
        if not found.ended:
            print(f"{backend} ended before its last test: see {LOGS}/{backend}-{num_ranks}.log")
    worse = sorted(control.passed - ours.passed)
    for name in worse:
        print(f"\n{name} passes over Gloo and not over Echelon:\n{ours.problems.get(name, 'it did not end')}")
    return not worse and control.ended and ours.ended


def main() -> None:
    """Reads the arguments, runs everything, and ends with the status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="tests to run; none: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    fine = True
    for num_ranks in arguments.ranks:
        control, ours = (run(backend, num_ranks, arguments.names) for backend in BACKENDS)
        if not control.passed:
            sys.exit(f"the control passed no test: see {LOGS}/control-{num_ranks}.log")
        fine = report(num_ranks, control, ours) and fine
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
