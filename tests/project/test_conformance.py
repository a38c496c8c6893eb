"""PyTorch's bases of distributed tests start their ranks on processes or on simulated ranks, with the same outcomes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import sys
import unittest

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import (
    TEST_SKIPS, DistributedTestBase, MultiProcContinuousTest, MultiThreadedTestCase, spawn_threads_and_init_comms,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_fsdp import FSDPTest
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms


def total(world_size, group=None):
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == dist.get_world_size() == world_size, tensor


class Processes(DistributedTestBase):
    world_size = 2

    def test_pass(self):
        self.create_pg("cpu")
        total(2)

    def test_fail(self):
        self.assertEqual(self.rank, 0)

    def test_skip(self):
        sys.exit(TEST_SKIPS["small_worldsize"].exit_code)


class Mesh(DTensorTestBase):
    @with_comms
    def test_pass(self):
        total(4)
        assert self.build_device_mesh().size() == 4


class Threads(MultiThreadedTestCase):
    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_pass(self):
        total(3)

    def test_fail(self):
        self.assertLess(self.rank, 2)

    def test_skip(self):
        self.skipTest("on threads")


class Method(TestCase):
    @spawn_threads_and_init_comms(world_size=2)
    def test_pass(self):
        total(2)


class Shared(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_pass(self):
        total(2, self.pg)
        assert self.rank == dist.get_rank()

    def test_fail(self):
        self.assertEqual(self.rank, 0)


class Gpus(FSDPTest):
    @skip_if_lt_x_gpu(2)
    def test_pass(self):
        assert torch.ones(1, device="cuda").device.type == "cpu"
        total(4)


if __name__ == "__main__":
    run_tests()
"""
EXPECTED = {
    "Processes.test_pass": "passed",
    "Processes.test_fail": "failed",
    "Processes.test_skip": "skipped",
    "Mesh.test_pass": "passed",
    "Threads.test_pass": "passed",
    "Threads.test_fail": "failed",
    "Threads.test_skip": "skipped",
    "Method.test_pass": "passed",
    "Shared.test_pass": "passed",
    "Shared.test_fail": "failed",
    "Gpus.test_pass": "passed",
}


def program(name):
    """Returns a module of the folder."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "conformance" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_over_gloo_that_ends_early_is_an_error(monkeypatch, tmp_path):
    """It compared the tests until then, and was fine."""
    run = program("run")
    monkeypatch.setattr(run, "LOGS", tmp_path)
    (tmp_path / "suite.py").write_text(
        """if True:
        import os, sys
        with open(sys.argv[1], "w") as file:
            file.write('{"test": "test_one", "problem": ""}')
        sys.exit(int(os.environ["BACKEND"] == sys.argv[2]))"""
    )
    monkeypatch.setattr(run, "HERE", tmp_path)
    for dies in ("none", "control", "echelon"):
        control, ours = (run.run(backend, 2, [dies]) for backend in run.BACKENDS)
        assert run.report(2, control, ours) == (dies == "none")


def test_a_download_that_was_cut_off_is_not_taken_for_all_tests(monkeypatch, tmp_path):
    source = program("torch_source")

    def run(command, **_):
        if "clone" not in command:
            return subprocess.CompletedProcess(command, 1, "", "fatal: cut off")
        (Path(command[-1]) / source.FOLDER).mkdir(parents=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(source.subprocess, "run", run)
    for _ in range(2):
        with pytest.raises(source.Unreachable, match="fatal: cut off"):
            source.fetched(tmp_path)


def test_a_comparison_of_no_tests_is_an_error(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "conformance"))
    simulated = program("simulated")
    file = simulated.File(simulated.PARTS[0], Path("test_one.py"), "test_one.py")
    assert simulated.report([simulated.Compared(file, frozenset({"test"}), {})], "source")
    assert not simulated.report([simulated.Compared(file, frozenset(), {})], "source")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gloo", "simulated"])
def test_each_base_runs_its_ranks(how, tmp_path):
    file, results = tmp_path / "test_bases.py", tmp_path / "results"
    file.write_text(TESTS)
    command = [sys.executable, "conformance/file_of_tests.py", how, str(file), str(results), "--on-cpu"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    told = [json.loads(line) for line in results.read_text().splitlines()]
    outcomes = {each["test"]: {None: "skipped", "": "passed"}.get(each["problem"], "failed") for each in told}
    assert outcomes == EXPECTED, [each["problem"] for each in told]
