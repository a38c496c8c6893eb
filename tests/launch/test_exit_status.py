"""A rank that leaves with an error status has failed: the others hear so, and the job ends with that status."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import echelon
from echelon.errors import CollectiveMismatch, PeerFailed, status_of
from echelon.launch.report import blamed_rank

WAIT = """
import os, sys
import torch, echelon
group = echelon.init(timeout=20)
if group.rank == 1:
    LEAVE
for _ in range(2):
    group.all_reduce(torch.ones(3))
"""


def run(tmp_path, leave, backend="shm"):
    script = tmp_path / "script.py"
    script.write_text(WAIT.replace("LEAVE", leave))
    return subprocess.run(
        [sys.executable, "-m", "echelon", "run", "-q", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "ECHELON_BACKEND": backend},
    )


@pytest.mark.parametrize(
    ("leave", "status", "backend"),
    [
        pytest.param("sys.exit(3)", "3", "shm", marks=pytest.mark.slow),
        pytest.param("sys.exit('no data')", "1: no data", "tcp", marks=pytest.mark.slow),
        pytest.param("os._exit(3)", "3", "shm", marks=pytest.mark.slow),
        pytest.param("\n    with group: sys.exit(3)", "3", "tcp", marks=pytest.mark.slow),
    ],
)
def test_the_first_cause_is_the_rank_that_left_and_the_status_is_its_own(tmp_path, leave, status, backend):
    ended = run(tmp_path, leave, backend)
    assert ended.returncode == int(status[0])
    lines = [line for line in ended.stderr.splitlines() if line.startswith("echelon: ")]
    assert lines[0] == f"echelon: rank 1 exited with status {status}"
    assert lines[1].startswith("echelon: then rank 0 failed in all_reduce(sum) of float32[3], #1 of group 'world' at ")
    assert lines[-1] == f"echelon: root cause: rank 1 exited with status {status}"


@pytest.mark.slow
def test_a_status_that_nobody_could_see_is_still_the_cause(tmp_path):
    """Where `sys.exit` was not called, the rank's goodbye is that of one which closes its group."""
    ended = run(tmp_path, "raise SystemExit(3)")
    assert ended.returncode == 3
    assert ended.stderr.splitlines()[0] == "echelon: rank 1 exited with status 3"


@pytest.mark.slow
def test_a_rank_that_leaves_with_status_0_has_departed(tmp_path):
    ended = run(tmp_path, "sys.exit(0)")
    assert ended.returncode == 1
    assert "raised CollectiveMismatch: all_reduce(sum) of float32[3], #1 of group 'world'" in ended.stderr
    assert "but rank 1 has closed its group" in ended.stderr


EXITS = """
import atexit, sys
from echelon.errors import status_of
from echelon.launch.report import watch_exit
watch = watch_exit()
assert watch_exit() is watch is sys.exit
atexit.register(lambda: print("status", status_of(watch.code()), flush=True))
try:
    sys.exit(5)
except SystemExit as error:
    assert error.code == 5
def function():
    LEAVE
function()
"""


@pytest.mark.parametrize(
    ("leave", "status"),
    [("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('text')", 1), ("pass", 0), ("sys.exit(256)", 0)],
)
@pytest.mark.parametrize("way", ["file", "-m"])
def test_the_status_is_known_at_the_end_of_the_program_unless_the_exit_was_caught(tmp_path, leave, status, way):
    (tmp_path / "program.py").write_text(textwrap.dedent(EXITS).replace("LEAVE", leave))
    command = ["-m", "program"] if way == "-m" else ["program.py"]
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ended.returncode == status, ended.stderr
    assert ended.stdout == f"status {status}\n"


EXIT_OF_A_THREAD = """
import atexit, sys, threading
from echelon.launch.report import watch_exit
watch = watch_exit()
atexit.register(lambda: print("code", watch.code(), flush=True))
thread = threading.Thread(target=sys.exit, args=(3,))
thread.start()
thread.join()
raise ValueError
"""


def test_an_exit_of_another_thread_ends_that_thread_alone(tmp_path):
    (tmp_path / "program.py").write_text(EXIT_OF_A_THREAD)
    command = [sys.executable, "program.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "code None\n"), ended.stderr


@pytest.mark.parametrize(("code", "status"), [(None, 0), (0, 0), (3, 3), (-1, 255), (True, 1), ("text", 1), (2.0, 1)])
def test_a_status_is_that_of_the_process(code, status):
    assert status_of(code) == status


def leave(group, code):
    """Rank 1 leaves while the others wait for it, and rank 0 says why it failed."""
    group.barrier()
    if group.rank == 1:
        sys.exit(code)
    try:
        group.all_reduce(torch.ones(3))
    except echelon.EchelonError as error:
        if code:
            raise
        return type(error).__name__, str(error)


@pytest.mark.parametrize(("code", "words"), [(3, "status 3"), ("no data", "status 1: no data")])
def test_an_exit_is_raised_as_the_failure_of_its_rank(on_backend, code, words):
    """And not as SystemExit, which would end the program that started the ranks."""
    with pytest.raises(PeerFailed, match=f"rank 1 failed: it exited with {words}") as caught:
        on_backend(leave, 2, code)
    assert caught.value.rank == 1


@pytest.mark.parametrize("code", [0, None])
def test_an_exit_in_good_order_is_a_departure(on_backend, code):
    (kind, message), nothing = on_backend(leave, 2, code)
    assert nothing is None
    assert kind == "CollectiveMismatch"
    assert "but rank 1 has closed its group" in message


def test_a_departure_blames_the_rank_that_departed():
    """So that the launcher takes its end for the cause, and not the error of a rank that waited for it."""
    error = CollectiveMismatch("rank 2 has closed its group", departed=2)
    assert blamed_rank(error.noticed_by("all_reduce")) == 2
    assert blamed_rank(CollectiveMismatch("rank 0 and rank 1 differ", 1)) is None
