"""A program that starts processes whenever it is imported is told to put the call under a guard."""

import pickle
import subprocess
import sys
import types

import pytest

from echelon.errors import LaunchError
from echelon.launch.worker import _UNGUARDED, Worker, leave_if_imported

UNGUARDED = """\
import echelon


def rank_of(group):
    return group.rank


echelon.spawn(rank_of, 1)
"""


ADVICE = (
    "the program calls echelon.spawn (or a RankPool) whenever it is imported, and every new process imports it: "
    'put the call under `if __name__ == "__main__":`'
)


@pytest.mark.slow
def test_the_first_line_of_the_error_says_so(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1
    errors = [line for line in ended.stderr.splitlines() if line.startswith("echelon.errors.")]
    assert errors == [f"echelon.errors.LaunchError: {ADVICE}"]
    assert ended.stderr.count("Traceback") == 1, "the process that was started says nothing of its own"


def test_the_parent_raises_it():
    worker = Worker.__new__(Worker)
    worker._process = types.SimpleNamespace(exitcode=_UNGUARDED)
    outcome = worker._death(0)
    assert outcome.failure.rank == 0
    with pytest.raises(LaunchError) as caught:
        raise pickle.loads(outcome.error)
    assert str(caught.value) == ADVICE
    worker._process.exitcode = 1
    assert worker._death(0).error is None


@pytest.mark.parametrize("is_main_already", [True, False])
def test_a_worker_may_start_workers_once_it_has_the_program(monkeypatch, is_main_already):
    imported = sys.modules["__main__"] if is_main_already else types.ModuleType("__mp_main__")
    monkeypatch.setitem(sys.modules, "__mp_main__", imported)
    if is_main_already:
        leave_if_imported()
    else:
        with pytest.raises(SystemExit):
            leave_if_imported()
