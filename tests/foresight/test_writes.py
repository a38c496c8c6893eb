"""A foreseen program overwrites nothing."""

import logging
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import save
from torch.distributed.checkpoint import save as save_distributed

from echelon.foresight.record.run import Request, record, record_in_turn
from echelon.launch.call import rank_call
from tests.foresight import programs


def writing(folder):
    programs.begin()
    state = programs.Mlp().cuda().state_dict()
    os.makedirs(folder / "new" / "folder")
    save(state, folder / "model.pt")
    torch.save(state, folder / "model.pt")
    save_file(state, folder / "model.safetensors")
    save_distributed(state, checkpoint_id=folder / "distributed")
    os.remove(folder / "model.pt")
    with open(folder / "log.txt", "a") as file:
        file.write("loss 1.0\n")
    (folder / "notes.txt").write_text("notes")
    handler = logging.FileHandler(folder / "log.txt")
    logging.getLogger("a program").addHandler(handler)
    logging.getLogger("a program").warning("written by a library")
    logging.getLogger("a program").removeHandler(handler)
    handler.close()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"precious")
    (tmp_path / "log.txt").write_text("old\n")
    return tmp_path


def test_writes_are_skipped_and_listed(folder):
    trace = record(writing, 2, args=(folder,))[0]
    assert {path.name for path in folder.iterdir()} == {"model.pt", "log.txt"}
    assert (folder / "model.pt").read_bytes() == b"precious"
    assert (folder / "log.txt").read_text() == "old\n"
    skipped = [text.partition(" at tests/foresight/test_writes.py:")[0] for text in trace.skipped]
    assert skipped == [
        "os.mkdir" if skipped[0] == "os.mkdir" else "os.makedirs",
        "torch.save",
        "torch.save",
        "safetensors.torch.save_file",
        "torch.distributed.checkpoint.save",
        "os.remove",
        f"a write of {folder / 'log.txt'}",
        f"a write of {folder / 'notes.txt'}",
        f"a write of {folder / 'log.txt'}",
    ]
    assert all(":" in text for text in trace.skipped)


def test_logs_may_be_written_but_no_checkpoint(folder):
    call = rank_call(writing, (folder,))
    request = Request(writing, call, (0, 0), allow_writes=True)
    (folder / "model.pt").rename(folder / "kept.pt")
    (folder / "model.pt").write_bytes(b"")
    trace = record_in_turn(request, lambda traces: [] if traces else [0])[0]
    assert (folder / "log.txt").read_text() == "old\nloss 1.0\nwritten by a library\n"
    assert (folder / "notes.txt").read_text() == "notes"
    assert not (folder / "distributed").exists()
    assert not (folder / "model.safetensors").exists()
    assert len(trace.skipped) == 4


def loading(path):
    programs.begin()
    state = torch.load(path)
    model = programs.Mlp().cuda()
    model.load_state_dict(state)
    model(torch.ones(2, programs.WIDTH, device="cuda"))


def test_checkpoints_are_read_as_shapes(tmp_path):
    torch.save(programs.Mlp().state_dict(), tmp_path / "model.pt")
    trace = record(loading, 2, args=(tmp_path / "model.pt",))[0]
    assert not trace.assumptions
