"""After a failure, `echelon run` says which checkpoint the next run resumes from."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
import echelon
from echelon.checkpoint import Store

wait, end = sys.argv[1:]
group = echelon.init()
store = Store("kept")
for step in (10, 20):
    store.save(step, extra={"seen": step}, wait=wait == "waits").wait()
group.barrier()
if end == "a rank is killed" and group.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if end == "the launcher is ended" and group.rank == 1:
    os.kill(os.getppid(), signal.SIGTERM)
if end != "well":
    group.recv(src=1 - group.rank)
group.close()
"""


@pytest.mark.parametrize(
    ("wait", "end", "status"),
    [
        ("beside", "a rank is killed", 137),
        pytest.param("waits", "a rank is killed", 137, marks=pytest.mark.slow),
        pytest.param("waits", "the launcher is ended", 143, marks=pytest.mark.slow),
    ],
)
def test_the_last_checkpoint_is_named_after_a_failure(tmp_path, wait, end, status):
    ended = run(tmp_path, wait, end)
    assert ended.returncode == status
    if end == "a rank is killed":
        assert ended.stderr.startswith("echelon: rank 1 was killed by SIGKILL\n")
        assert "echelon: then rank 0 failed in receive from rank 1" in ended.stderr
    assert ended.stderr.count(f"echelon: the last checkpoint is of step 20, in {tmp_path}/kept\n") == 1


@pytest.mark.slow
def test_a_run_that_ends_well_says_nothing_of_it(tmp_path):
    ended = run(tmp_path, "waits", "well")
    assert (ended.returncode, ended.stderr) == (0, "")


def run(folder, *arguments):
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "echelon", "run", "-q", "-n", "2", "train.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90)
