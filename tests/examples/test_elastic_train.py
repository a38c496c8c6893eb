"""Training that was interrupted ends as if it had not been, bit for bit."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.examples import EXAMPLES, elastic_train_as_rank, import_example

KILLED = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import elastic_train

attempt, train_step, replace = os.environ["TORCHELASTIC_RESTART_COUNT"], elastic_train.train_step, os.replace
steps = []

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def killed_step(ddp, optimizer, step, group):
    steps.append(step)
    if (attempt, group.rank, step) == ("0", 1, 33):
        die()
    return train_step(ddp, optimizer, step, group)

def killed_replace(draft, path):
    if (attempt, steps[-1:]) == ("1", [40]):  # only rank 0 writes
        die()
    replace(draft, path)

elastic_train.train_step, os.replace = killed_step, killed_replace
elastic_train.main()
"""


def trained(path):
    """Returns all that a checkpoint has, byte for byte."""
    assert load_file(path)["0.weight"].shape == (64, 8)
    return path.read_bytes()


@pytest.fixture
def undisturbed(pool, tmp_path):
    path = tmp_path / "undisturbed.safetensors"
    pool.run(elastic_train_as_rank, 2, path)
    return trained(path)


def test_training_goes_on_after_the_last_checkpoint_and_ends_the_same(pool, tmp_path, undisturbed):
    path = tmp_path / "interrupted.safetensors"
    pool.run(elastic_train_as_rank, 2, path, 47)
    assert trained(path) != undisturbed
    pool.run(elastic_train_as_rank, 2, path)
    assert trained(path) == undisturbed


def test_ranks_that_see_different_checkpoints_are_told(pool, tmp_path):
    with pytest.raises(
        RuntimeError, match=r"the ranks have checkpoints of the steps \[20, 0\]: put .* into a folder that all of"
    ):
        pool.run(elastic_train_of_two_hosts, 2, tmp_path)


def elastic_train_of_two_hosts(group, folder):
    """Only rank 0 has the folder with the checkpoint."""
    path = folder / "train.safetensors" if group.rank == 0 else folder / "elsewhere.safetensors"
    elastic_train_as_rank(group, path, 20)
    elastic_train_as_rank(group, path)


def test_a_checkpoint_has_its_whole_content_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        done = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *at, name=name, done=done: (calls.append((name, *at)), done(*at)))
    path = tmp_path / "checkpoint"
    import_example("elastic_train").write_atomically(path, b"new")
    assert [call[0] for call in calls] == ["fsync", "replace", "fsync"]
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_crash_while_writing_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    def crash(*_):
        raise OSError("the machine has stopped")

    path = tmp_path / "checkpoint"
    write = import_example("elastic_train").write_atomically
    write(path, b"old")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", crash)
        with pytest.raises(OSError, match="stopped"):
            write(path, b"new")
    assert path.read_bytes() == b"old"
    write(path, b"new")
    assert path.read_bytes() == b"new"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ranks_that_are_killed_are_started_again_by_torchrun(tmp_path, undisturbed):
    """First one rank in the middle of a step, then the other while it writes a checkpoint."""
    script, path = tmp_path / "killed.py", tmp_path / "killed.safetensors"
    script.write_text(KILLED.format(examples=str(EXAMPLES)))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        str(script),
    ]
    command += ["--checkpoint", str(path), "--steps", "60", "--every", "20"]
    environ = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environ)
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"^(going on after step \d+|step \d+)", ended.stdout, re.MULTILINE) == [
        "step 20",
        "going on after step 20",
        "going on after step 20",
        "step 40",
        "step 60",
    ]
    assert ended.stderr.count(f"exitcode: -{signal.SIGKILL.value}") + ended.stderr.count("Signal 9 (SIGKILL)") >= 2
    assert trained(path) == undisturbed
