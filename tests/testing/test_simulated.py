"""The decorator `simulated`, which some tests here carry, and pytest's plugin. Others run pytest on a file."""

import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import tomllib
import types
import unittest
import unittest.mock
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import echelon
from echelon.errors import InvalidWorldSize, LaunchError
from echelon.testing import simulated

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["a", "b"], scope="module")
def letter(request):
    return [request.param]


@pytest.mark.parametrize("number", [1, 2])
@simulated(world_size=3)
@pytest.mark.parametrize("other", [5])
def test_fixtures_and_parameters_are_the_same_objects_on_every_rank(letter, group, number, other, tmp_path):
    assert letter[0] in "ab"
    assert number in (1, 2)
    assert other == 5
    (tmp_path / str(group.rank)).touch()
    identities = group.all_gather_object([id(letter), id(tmp_path)])
    assert identities == [[id(letter), id(tmp_path)]] * 3
    assert len(list(tmp_path.iterdir())) == 3


@simulated(world_size=2)
def test_a_test_need_not_take_the_group():
    assert echelon.init().world_size == 2


class TestOfAClass:
    value = 7

    @pytest.mark.parametrize("number", [1])
    @simulated(world_size=2, network="1GbE")
    def test_a_method_gets_its_object_and_the_group(self, number, group):
        assert self.value == 7
        assert group.all_reduce(torch.tensor(number)).item() == 2

    @staticmethod
    @simulated(world_size=2)
    def test_a_static_method(group):
        assert group.world_size == 2


class TestOfUnittest(unittest.TestCase):
    @simulated(world_size=2)
    def test_a_method_of_unittest(self, group):
        assert group.world_size == 2


@simulated(world_size=4, seeds=3)
def test_a_program_of_torch(tmp_path):
    dist.init_process_group("gloo")
    (tmp_path / os.environ["RANK"]).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == dist.get_world_size() == 4
    dist.destroy_process_group()


SETTINGS = types.SimpleNamespace(place=None)


@unittest.mock.patch.object(SETTINGS, "place")
@simulated(world_size=2)
def test_a_test_that_is_patched(place, group, tmp_path):
    assert SETTINGS.place is place
    assert tmp_path.is_dir()


@simulated(world_size=2)
@unittest.mock.patch.object(SETTINGS, "place")
def test_a_test_that_each_rank_patches(place, group, tmp_path):
    assert SETTINGS.place is place
    assert tmp_path.is_dir()


def test_a_plain_call_runs_the_body_on_every_rank_with_every_seed():
    seen = []

    @simulated(world_size=3, seeds=2)
    def check(first, group, /, second, *rest, third=3, **more):
        seen.append((group.rank, first, second, rest, third, more))

    assert check("one", "two", "rest", fourth=4) is None
    ranks = [(rank, "one", "two", ("rest",), 3, {"fourth": 4}) for rank in range(3)]
    assert sorted(seen, key=str) == sorted(ranks * 2, key=str)


def test_pytest_sees_all_parameters_but_the_group():
    @simulated(world_size=2)
    def check(self, group, tmp_path, number=3):
        """Says so."""

    assert str(inspect.signature(check)) == "(self, tmp_path, number=3)"
    assert (check.__name__, check.__doc__) == ("check", "Says so.")


@pytest.mark.parametrize(
    ("seeds", "expected"), [({}, [0]), ({"seed": 7}, [7]), ({"seeds": 3}, [0, 1, 2]), ({"seeds": iter([4, 2])}, [4, 2])]
)
def test_all_options_go_to_simulate(monkeypatch, seeds, expected):
    calls = []
    monkeypatch.setattr(
        "echelon.testing.decorator.simulate", lambda *args, **options: calls.append((args[1:], options))
    )
    options = {"network": "1GbE", "costs": {}, "faults": (), "timeout": 3.0, "memory": False, "late_sends": True}
    assert {"seed", *options} <= set(inspect.signature(echelon.simulate).parameters)
    simulated(5, **seeds, **options)(lambda: None)()
    assert [args for args, _ in calls] == [(5,)] * len(expected)
    assert [given.pop("seed", 0) for _, given in calls] == expected
    assert all(given == options for _, given in calls)


def test_a_failure_says_its_seed_and_how_to_replay_it():
    def first_to_come(group):
        if group.rank > 0:
            group.send(torch.tensor(group.rank), 0)
        elif group.recv_any().src == 1:
            raise ValueError("rank 1 was first")
        else:
            group.recv(1)

    with pytest.raises(ValueError, match="rank 1 was first") as caught:
        simulated(3, seeds=100, network="1GbE", late_sends=False)(first_to_come)()
    replay = caught.value.__notes__[-1]
    seed = int(replay.split()[1])
    assert seed > 0
    assert replay == (
        f"seed {seed} fails, after {seed} that passed; to replay it: "
        f"@echelon.testing.simulated(world_size=3, network=..., late_sends=..., seed={seed})"
    )
    with pytest.raises(ValueError, match="rank 1 was first") as again:
        simulated(3, seed=seed, network="1GbE", late_sends=False)(first_to_come)()
    assert again.value.__notes__[0].startswith("raised on rank 0 of 3, at ")
    simulated(3, seeds=range(seed), network="1GbE", late_sends=False)(first_to_come)()


def asynchronous():
    async def check():
        """No rank would run it."""

    return check


def generator():
    yield


def of_spawn(rank, world_size):
    """Takes its rank."""


class OfSpawn:
    def check(self, local_rank):
        """Takes its rank."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: simulated(generator), "write @simulated(world_size=4)"),
        (lambda: simulated(2, seeds=0), "seeds=0: give the number of runs"),
        (lambda: simulated(2, seeds=True), "seeds=True: give"),
        (lambda: simulated(2, seeds=[]), "seeds=[]: give"),
        (lambda: simulated(2, seeds=[-1]), "seeds=[-1]: give"),
        (lambda: simulated(2, seeds="12"), "seeds='12': give"),
        (lambda: simulated(2, seeds=None, args=(1,)), "args=) is unknown"),
        (lambda: simulated(2, netwrok="1GbE"), "netwrok=) is unknown: did you mean network?"),
        (lambda: simulated(2, seeds=2, seed=1), "has both"),
        (lambda: simulated(2)(OfSpawn), "put it next to the def of a test function"),
        (lambda: simulated(2)(functools.partial(of_spawn)), "put it next to the def of a test function"),
        (lambda: simulated(2)(asynchronous()), "check is async or yields"),
        (lambda: simulated(2)(generator), "generator is async or yields"),
        (lambda: simulated(2)(of_spawn), "of_spawn takes 'rank' first"),
        (lambda: simulated(2)(OfSpawn.check), "check takes 'local_rank' first"),
    ],
)
def test_bad_input_is_refused_by_the_decorator(make, message):
    with pytest.raises(LaunchError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_world_without_ranks_is_refused_by_the_decorator():
    with pytest.raises(InvalidWorldSize, match="world_size=0"):
        simulated(0)


class Reports:
    """Plugin that keeps the outcome and the text of every test."""

    def __init__(self):
        self.outcomes = {}
        self.texts = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            name = report.nodeid.rpartition("::")[2]
            self.outcomes[name] = report.outcome
            self.texts[name] = report.longreprtext


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    """Runs pytest in this process on a file with this text, and returns its reports."""
    # The entry point may or may not be installed: see the test of it below.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "pytest.ini").touch()

    def run(text):
        path = tmp_path / "test_of_a_user.py"
        path.write_text(text)
        reports = Reports()
        plugins = ["-p", "echelon.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
        options = ["-c", str(tmp_path / "pytest.ini"), "--import-mode=importlib", *plugins]
        pytest.main([*options, str(path)], [reports])
        return reports

    yield run
    sys.modules.pop("test_of_a_user", None)


FAILING = """
import pytest
from echelon.testing import simulated

@simulated(world_size=2, seeds=3)
def test_assertion(group, tmp_path):
    ranks = group.all_gather_object(group.rank)
    assert ranks == [0, 2]

@simulated(world_size=2, seeds=3)
def test_deadlock(group):
    group.recv(1 - group.rank)

@simulated(world_size=2, seeds=[4, 5])
def test_fail(group):
    pytest.fail("on purpose")

@simulated(world_size=2, seeds=2)
def test_skip(group):
    pytest.skip("not here")

@simulated(world_size=2)
def test_fixture_that_is_not_there(group, no_such_fixture):
    pass
"""


def test_what_pytest_prints_begins_in_the_test_and_ends_with_the_seed(run_file):
    reports = run_file(FAILING)
    assert reports.outcomes == {
        "test_assertion": "failed",
        "test_deadlock": "failed",
        "test_fail": "failed",
        "test_skip": "skipped",
        "test_fixture_that_is_not_there": "failed",
    }
    replay = "E       seed 0 fails, after 0 that passed; to replay it: @echelon.testing.simulated(world_size=2, seed=0)"
    assertion = reports.texts["test_assertion"]
    assert ">       assert ranks == [0, 2]" in assertion
    assert "E       assert [0, 1] == [0, 2]" in assertion, "pytest explains the assertion"
    assert replay in assertion
    assert "scheduler" not in assertion, "frames of the simulator are left out"
    deadlock = reports.texts["test_deadlock"]
    assert "DeadlockError: no rank can go on" in deadlock
    assert "test_of_a_user.py:12: group.recv(1 - group.rank)" in deadlock
    assert "seed 0 fails" in deadlock
    assert "def simulate(" not in deadlock
    assert "Failed: on purpose" in reports.texts["test_fail"]
    assert "seed 4 fails" in reports.texts["test_fail"]
    assert "fixture 'no_such_fixture' not found" in reports.texts["test_fixture_that_is_not_there"]


WITH_FIXTURE = """
import pytest
import echelon

def program(scale):
    return echelon.init().rank * scale

@pytest.fixture(scope="module")
def run_of_the_module(simulated):
    return simulated(program, world_size=3, args=(2,), network="1GbE")

def test_fixture(run_of_the_module, simulated):
    assert run_of_the_module.results == [0, 2, 4]
    assert isinstance(run_of_the_module, echelon.Simulation)
    with pytest.raises(echelon.DeadlockError):
        simulated(lambda group: group.recv(1 - group.rank), 2)
"""


def test_the_fixture_simulates_in_fixtures_of_any_scope(run_file):
    reports = run_file(WITH_FIXTURE)
    assert reports.outcomes == {"test_fixture": "passed"}, reports.texts


def test_the_plugin_is_declared_and_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"echelon": "echelon.pytest_plugin"}
    assert hasattr(importlib.import_module("echelon.pytest_plugin"), "simulated")


def test_neither_the_plugin_nor_the_decorator_imports_more_than_it_needs():
    code = """
import json, sys
import echelon.pytest_plugin
plugin = [name for name in ("torch", "echelon.testing") if name in sys.modules]
for name in [name for name in sys.modules if name.partition(".")[0] in ("pytest", "_pytest", "echelon")]:
    del sys.modules[name]
sys.modules["pytest"] = sys.modules["_pytest"] = None  # as where it is not installed
import echelon
assert echelon.testing.simulated(world_size=2)(lambda: None)() is None
print(json.dumps(plugin))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == []
