"""`echelon checkpoint ls`, `verify` and `remove`."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from echelon.checkpoint.ranks.saving import Saver
from echelon.cli import main
from tests.helpers.checkpoints import state_of
from tests.helpers.commands import imported_by, printed, refusal


@pytest.fixture
def folder(tmp_path):
    with_tensors = state_of({"weight": torch.ones(4, 5), "bias": torch.ones(4)})
    saver = Saver(tmp_path)
    for step in (5, 10):
        saver.save(step, with_tensors)
    saver.close()
    return tmp_path


def damage_both(folder):
    path = folder / "step-00000005" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (folder / "step-00000010" / "manifest.json").unlink()


def test_ls_shows_damaged_checkpoints(folder, capsys):
    size = (folder / "step-00000005" / "rank-00000.safetensors").stat().st_size
    assert printed(capsys, "checkpoint", "ls", str(folder)).splitlines() == [
        "step  ranks  tensors  bytes  state",
        f"   5      1        2    {size}  complete",
        f"  10      1        2    {size}  complete",
    ]
    damage_both(folder)
    assert printed(capsys, "checkpoint", "ls", str(folder)).splitlines()[1:] == [
        f"   5      1        2    {size}  complete",
        f"  10                 {' ' * len(str(size))}     damaged: {folder}/step-00000010/manifest.json is missing",
    ]
    values = json.loads(printed(capsys, "checkpoint", "ls", str(folder), "--json"))
    assert [(each["step"], each["state"]) for each in values["checkpoints"]] == [(5, "complete"), (10, "damaged")]


def test_verify_reads_every_byte(folder, capsys):
    assert printed(capsys, "checkpoint", "verify", str(folder)) == "step 5: whole\nstep 10: whole\n"
    damage_both(folder)
    assert main(["checkpoint", "verify", str(folder)]) == 1
    first, problem, *rest = capsys.readouterr().out.splitlines()
    assert first == "step 5: 1 problem"
    assert problem.startswith(f"  {folder}/step-00000005/rank-00000.safetensors is damaged: bytes 0 to ")
    assert problem.endswith("differ from their CRC32; they hold bias and weight") or problem.endswith("bias, weight")
    assert rest == ["step 10: 1 problem", f"  {folder}/step-00000010/manifest.json is missing"]
    assert main(["checkpoint", "verify", str(folder), "--step", "10", "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert [each["step"] for each in values["checkpoints"]] == [10]


def test_folders_without_checkpoints(tmp_path, capsys):
    assert printed(capsys, "checkpoint", "ls", str(tmp_path)) == f"{tmp_path} has no checkpoint\n"
    assert refusal(capsys, "checkpoint", "verify", str(tmp_path), statuses=(1,)) == (
        f"{tmp_path} has no checkpoint: give a folder in which a job saves"
    )
    for command in ("ls", "verify"):
        assert refusal(capsys, "checkpoint", command, str(tmp_path / "no")) == (
            f"cannot read {tmp_path}/no: there is no such folder; give the one in which a job saves"
        )


def test_verify_needs_no_torch(folder):
    assert "torch" not in imported_by("checkpoint", "verify", str(folder))


def test_remove(folder, capsys):
    name = str(folder)
    saver = Saver(folder)
    saver.save(20, state_of({"weight": torch.ones(4)}))
    command = [sys.executable, "-m", "echelon", "checkpoint", "remove", name, "20"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        *(1, ""),
        f"echelon: process {os.getpid()} on {socket.gethostname()} saves into {folder}: stop it, or use another "
        "folder\n",
    )
    saver.close()
    assert refusal(capsys, "checkpoint", "remove", name, "20", "30", statuses=(1,)) == (
        f"{folder} has no checkpoint of step 30: it has 5, 10, 20"
    )
    assert refusal(capsys, "checkpoint", "remove", name, "-5") == (
        "No such option: -5: see `echelon checkpoint remove --help`"
    )
    (folder / "step-00000005" / "notes.txt").write_text("the best so far")
    assert refusal(capsys, "checkpoint", "remove", name, "5", statuses=(1,)) == (
        f"{folder}/step-00000005 has notes.txt, which is of no checkpoint: move it away first"
    )
    (folder / "step-00000005" / "notes.txt").unlink()
    assert printed(capsys, "checkpoint", "remove", name, "20", "10", "20") == (
        f"step 10: removed\nstep 20: removed\nthe newest step in {folder} is 5\n"
    )
    (folder / "step-00000005" / "manifest.json").write_text("damaged")
    assert printed(capsys, "checkpoint", "remove", name, "5") == f"step 5: removed\n{folder} has no checkpoint left\n"
    assert os.listdir(folder) == [".lock"]


def test_remove_leaves_other_folders_alone(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("")
    assert refusal(capsys, "checkpoint", "remove", str(tmp_path), "5", statuses=(1,)) == (
        f"{tmp_path} has no checkpoint: give a folder in which a job saves"
    )
    assert os.listdir(tmp_path) == ["notes.txt"]
    assert refusal(capsys, "checkpoint", "remove", str(tmp_path / "no"), "5") == (
        f"cannot read {tmp_path}/no: there is no such folder; give the one in which a job saves"
    )
    assert not (tmp_path / "no").exists()


def test_remove_needs_no_torch(folder):
    assert "torch" not in imported_by("checkpoint", "remove", str(folder), "10")
