"""Training that was interrupted ends as if it had not been, bit for bit."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch

import echelon
from echelon.checkpoint.ranks.loading import open_checkpoint
from echelon.checkpoint.state import Wanted
from tests.helpers.examples import EXAMPLES, elastic_train_as_rank

KILLED = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import elastic_train

attempt, train_step, rename = os.environ["TORCHELASTIC_RESTART_COUNT"], elastic_train.train_step, os.rename
rank, steps = os.environ["RANK"], []

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def killed_step(ddp, optimizer):
    steps.append(1)
    if (attempt, rank, len(steps)) == ("0", "1", 33):
        die()
    return train_step(ddp, optimizer)

def killed_rename(old, new, **options):
    if (attempt, len(steps)) == ("1", 20):  # step 40: rank 0 commits
        die()
    rename(old, new, **options)

elastic_train.train_step, os.rename = killed_step, killed_rename
elastic_train.main()
"""


def trained(path):
    """Returns all that the last checkpoint has, byte for byte, but the generators that the example does not use."""
    checkpoint = open_checkpoint(path)
    assert checkpoint.step == 60
    specs = {name: spec for name, spec in checkpoint.specs.items() if "/python/" not in name and "/numpy/" not in name}
    found = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
    checkpoint.read([Wanted(name, 0, tensor.view(-1)) for name, tensor in found.items()])
    return {name: tensor.view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


@pytest.fixture
def undisturbed(pool, tmp_path):
    path = tmp_path / "undisturbed"
    pool.run(elastic_train_as_rank, 2, path)
    return trained(path)


def test_training_goes_on_after_the_last_checkpoint_and_ends_the_same(pool, tmp_path, undisturbed):
    path = tmp_path / "interrupted"
    pool.run(elastic_train_as_rank, 2, path, 47)
    assert echelon.checkpoint.Store(path).steps() == [20, 40]
    pool.run(elastic_train_as_rank, 2, path)
    assert trained(path) == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ranks_that_are_killed_are_started_again_by_torchrun(tmp_path, undisturbed):
    """First one rank in the middle of a step, then the other while it writes a checkpoint."""
    script, path = tmp_path / "killed.py", tmp_path / "killed"
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
