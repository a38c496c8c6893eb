"""PyTorch's own tests of one file, each in a process of its own; see `simulated.py`.

    python conformance/file_of_tests.py gloo FILE RESULTS [TEST ...]      # on processes over Gloo
    python conformance/file_of_tests.py simulated FILE RESULTS [TEST ...] # on simulated ranks

Appends to the file RESULTS a line of JSON for every test: its name, its problem (empty: it passed; null: it was
skipped), and the seconds that it took. FILE may lie anywhere; its folder is searched for modules, and so are those
above it.
"""

from __future__ import annotations

import argparse
import faulthandler
import fnmatch
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import unittest
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import spawning
import torch

SECONDS = 600.0
"""Most real seconds for one test."""

ON_CPU = {
    '"cuda"': '"cpu"',
    'f"cuda:{self.rank}"': '"cpu"',
    '"nccl"': '"gloo"',
    ".cuda()": ".cpu()",
    "torch.cuda.device_count()": str(spawning.MANY_GPUS),
    "torch.cuda.set_device(": "str(",
    "not TEST_CUDA": "False",
    "device_ids=[self.rank]": "device_ids=None",
}
"""Parts of lines that were written for GPUs, and their replacements."""


class Outcome(unittest.TestResult):
    """Outcome of one test: its problem, or None if it was skipped or is expected to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.problem: str | None = "it did not run"

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: ARG002, D102, N802
        self.problem = ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: ARG002, D102, N802
        self.problem = None

    def addFailure(self, test: unittest.TestCase, error: tuple) -> None:  # noqa: ARG002, D102, N802
        self.problem = "".join(traceback.format_exception(*error))

    addError = addFailure  # noqa: N815

    def addExpectedFailure(self, test: unittest.TestCase, error: tuple) -> None:  # noqa: ARG002, D102, N802
        self.problem = None

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:  # noqa: ARG002, D102, N802
        self.problem = "it passed, though it is expected to fail"


def load(path: Path, on_cpu: bool) -> ModuleType:
    """Imports a file of tests. With `on_cpu`, it uses the CPU where it was written for GPUs."""
    sys.path[:0] = [
        str(path.parent),
        *map(str, [each for each in path.parents if each.name in ("distributed", "test")]),
    ]
    source = path.read_text()
    if on_cpu:
        for gpu, cpu in ON_CPU.items():
            source = source.replace(gpu, cpu)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    exec(compile(source, str(path), "exec"), vars(module))
    vars(module).pop("load_tests", None)  # torch's, which wants the file to be the program
    return module


def tests_in(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Yields the tests of a suite and of the suites inside of it."""
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from tests_in(each)
        else:
            yield each


def _run_here(test: unittest.TestCase, pipe: multiprocessing.connection.Connection) -> None:
    """Runs a test in this process, and sends its problem."""
    os.setsid()  # so that the processes of the test can be ended with it
    faulthandler.dump_traceback_later(SECONDS - 5)
    outcome = Outcome()
    unittest.TestSuite([test]).run(outcome)
    pipe.send(outcome.problem)
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads


def run(test: unittest.TestCase) -> str | None:
    """Runs a test in a process of its own. Returns its problem: empty if it passed, None if it was skipped."""
    ours, theirs = multiprocessing.Pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        ours.close()
        try:
            _run_here(test, theirs)
        finally:
            os._exit(1)
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            return f"it took more than {SECONDS:g} s"
        return ours.recv()
    except EOFError:
        return "its process ended"
    finally:
        for kill, whom in ((os.killpg, child), (os.kill, child)):
            with suppress(ProcessLookupError):
                kill(whom, signal.SIGKILL)
        os.waitpid(child, 0)
        ours.close()


def main() -> None:
    """Reads the arguments, and runs the tests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=spawning.HOW)
    parser.add_argument("file", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--without", nargs="*", default=[], help="patterns of tests to leave out")
    parser.add_argument("--on-cpu", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    spawning.HOW[arguments.how]()
    if arguments.on_cpu:
        spawning.on_cpu()
    suite = unittest.TestLoader().loadTestsFromModule(load(arguments.file, arguments.on_cpu))
    for test in tests_in(suite):
        name = test.id().removeprefix(f"{arguments.file.stem}.")
        if arguments.tests and not any(word in name for word in arguments.tests):
            continue
        if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.without):
            continue
        print(f"--- {name}", flush=True)
        began = time.monotonic()
        problem = run(test)
        seconds = round(time.monotonic() - began, 2)
        with open(arguments.results, "a") as file:
            print(json.dumps({"test": name, "problem": problem, "seconds": seconds}), file=file)


if __name__ == "__main__":
    main()
