"""PyTorch's own tests of torch.distributed, for a backend that is registered under a name of its own; see `run.py`.

    BACKEND=echelon WORLD_SIZE=2 TEMP_DIR=$(mktemp -d) python conformance/suite.py RESULTS [TEST ...]

Appends to the file RESULTS a line of JSON for every test: its name, and its problem (empty: it passed; null: it was
skipped). The backend "control" is Gloo: some tests treat Gloo differently under its own name.
"""

from __future__ import annotations

import json
import sys
import unittest
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

import echelon.interop.torch_distributed  # noqa: F401 # registers "echelon"


def _gloo(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, world_size, timeout)


dist.Backend.register_backend("control", _gloo, devices=["cpu"])

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402


class Conformance(TestDistBackend, DistributedTest._DistTestBase):
    """PyTorch's tests, each in forked processes of its own, which need not import torch."""

    def setUp(self) -> None:
        """Starts the processes, which run the test."""
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Results(unittest.TestResult):
    """Record of the tests' ends in a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def _write(self, test: unittest.TestCase, problem: str | None) -> None:
        with open(self._path, "a") as file:
            print(json.dumps({"test": test.id().rpartition(".")[2], "problem": problem}), file=file)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: D102, N802
        self._write(test, "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: ARG002, D102, N802
        self._write(test, None)

    def addFailure(self, test: unittest.TestCase, error: tuple) -> None:  # noqa: D102, N802
        self._write(test, str(error[1]) or error[0].__name__)

    addError = addFailure  # noqa: N815


def main(path: str, names: list[str]) -> None:
    """Runs the named tests, or all, and writes their results to a file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = names or unittest.TestLoader().getTestCaseNames(Conformance)
    unittest.TestSuite(map(Conformance, chosen)).run(Results(path))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
