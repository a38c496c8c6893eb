"""A foreseen program overwrites nothing."""

import ctypes
import glob
import gzip
import importlib
import io
import json
import logging
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import warnings
import zipfile
from os import remove as remove_by_name
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import save
from torch.distributed.checkpoint import load as load_distributed
from torch.distributed.checkpoint import save as save_distributed

from echelon import UnsupportedOp, foresee
from echelon.checkpoint.store import Store
from echelon.foresight.record.run import Request, record, record_in_turn
from echelon.foresight.trace import HostWait
from echelon.hint import hint_of
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
    trace = record_in_turn(request, lambda traces: [] if traces else [0]).traces[0]
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


FILES = ("a.txt", "b.txt", "data.bin", "base.db", "folder/c.txt", "old/d.txt")


def resumed(path, location, saves_itself):
    device = programs.begin()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(4, 8, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    if saves_itself:
        step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    loaded = torch.load(path, map_location=location)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    if not saves_itself and location != "cuda":
        assert optimizer.state_dict()["state"][0]["step"].item() == 2
    step()
    step()


@pytest.mark.parametrize("saves_itself", [False, True])
@pytest.mark.parametrize("location", [None, "cpu", "cuda", lambda storage, _: storage])
def test_an_optimizer_that_is_loaded_counts_its_steps_on_the_host(location, saves_itself, tmp_path):
    path = tmp_path / "checkpoint.pt"
    if not saves_itself:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    seen = foresee(resumed, 1, (path, location, saves_itself), gpu="h100")
    waits = sum(isinstance(each, HostWait) for each in seen.traces[0].entries)
    # With map_location torch puts the counts of steps on the GPU, too. The optimizer reads each of them.
    assert waits == (8 if location == "cuda" else 0)
    assert len(seen.assumptions) == (location == "cuda")


def descriptor(folder):
    number = os.open(folder / "a.txt", os.O_WRONLY | os.O_TRUNC)
    os.write(number, b"new")
    os.close(number)


def in_folder(folder):
    number = os.open(folder, os.O_RDONLY)
    os.unlink("a.txt", dir_fd=number)
    os.close(number)


def in_file(folder):
    number = os.open(folder / "a.txt", os.O_RDONLY)
    os.fchmod(number, 0o400)
    os.close(number)


def database(folder):
    connection = sqlite3.connect(folder / "base.db")
    connection.execute("create table rows(x)")
    connection.commit()
    connection.close()


def mapped(folder):
    values = np.memmap(folder / "data.bin", np.uint8)
    assert list(values) == list(b"real")
    values[:] = 0
    values.flush()


def new_map(folder):
    values = np.memmap(folder / "new.bin", np.uint8, "w+", shape=(4,))
    values[:] = 1
    values.flush()


def shared_storages(folder):
    storage = torch.UntypedStorage.from_file(str(folder / "data.bin"), shared=True, nbytes=4)
    assert ctypes.string_at(storage.data_ptr(), 4) == b"real"
    ctypes.memset(storage.data_ptr(), 1, 4)
    for name, size in (("data.bin", 8), ("new.bin", 4)):
        storage = torch.UntypedStorage.from_file(str(folder / name), True, size)
        ctypes.memset(storage.data_ptr(), 1, size)
    written = torch.UntypedStorage.from_file(str(folder / "new.bin"), nbytes=4)
    assert ctypes.string_at(written.data_ptr(), 4) == b"\1\1\1\1"


def zipped(folder):
    with zipfile.ZipFile(folder / "a.txt", "w") as file:
        file.writestr("name", "content")
    assert zipfile.ZipFile(folder / "a.txt").namelist() == ["name"]
    with gzip.open(folder / "b.txt", "wb") as file:
        file.write(b"new")


def unbuffered(folder):
    with io.FileIO(str(folder / "a.txt"), "w") as file:
        file.write(b"new")
    with open(folder / "b.txt", "rb", buffering=0) as file:
        assert isinstance(file, io.FileIO)


def read_back(folder):
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text("{}")
    assert json.loads((folder / "run" / "config.json").read_text()) == {}
    assert os.listdir(folder / "run") == ["config.json"]
    assert "run" in os.listdir(folder)
    with open(folder / "a.txt", "a+") as file:
        file.write("more")
        file.seek(0)
        assert file.read() == "realmore"
    shutil.rmtree(folder / "run")
    assert not (folder / "run").exists()


def listed(folder):
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "new.pt").write_text("x")
    assert os.listdir(folder / "a") == ["b"]
    assert sorted(each.name for each in folder.glob("*")) == sorted([*os.listdir(folder)])
    assert glob.glob(str(folder / "n*.pt")) == [str(folder / "new.pt")]
    assert "a" in next(os.walk(folder))[1]
    with os.scandir(folder) as entries:
        entry = next(each for each in entries if each.name == "new.pt")
    assert (entry.is_dir(), entry.is_file(), entry.stat().st_size) == (False, True, 1)
    with pytest.raises(FileExistsError):
        (folder / "folder").mkdir()
    os.makedirs(folder / "folder", exist_ok=True)
    torch.onnx.export(torch.nn.Linear(2, 2), (torch.ones(2),), folder / "new.onnx")


def replaced(folder):
    with tempfile.NamedTemporaryFile("w", dir=folder) as file:
        file.write("new")
    os.replace(file.name, folder / "a.txt")
    assert (folder / "a.txt").read_text() == "new"


def temporary(folder):
    with tempfile.TemporaryDirectory() as inner:
        (Path(inner) / "x").write_text("x")
        assert os.listdir(inner) == ["x"]
    with tempfile.TemporaryFile() as file:
        file.write(b"x")
        file.seek(0)
        assert file.read() == b"x"
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("x")
        file.flush()
        assert Path(file.name).read_text() == "x"
    tempfile.mkdtemp()
    tempfile.mkstemp(dir=folder)


def doubled(x):
    return 2 * x


def profiled(folder):
    with torch.autograd.profiler.profile(use_kineto=True) as profile:
        doubled(torch.ones(2))
    profile.export_chrome_trace(str(folder / "new.json"))
    torch.profiler.profile().export_chrome_trace(str(folder / "new.json"))


def scripted(code=None):
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.script(torch.nn.Linear(2, 2) if code is None else code)


WAYS = {
    "os.open": descriptor,
    "os.unlink in a folder": in_folder,
    "os.remove by its name": lambda folder: remove_by_name(folder / "a.txt"),
    "a link": lambda folder: (folder / "new").symlink_to("a.txt"),
    "a hard link": lambda folder: (folder / "new").hardlink_to(folder / "a.txt"),
    "touch": lambda folder: ((folder / "new").touch(), (folder / "a.txt").touch()),
    "chmod": lambda folder: (folder / "a.txt").chmod(0o400),
    "utime": lambda folder: os.utime(folder / "a.txt", (1, 1)),
    "chmod of an open file": in_file,
    "truncate": lambda folder: os.truncate(folder / "a.txt", 0),
    "nodes": lambda folder: (os.mkfifo(folder / "fifo"), os.mknod(folder / "node")),
    "rename": lambda folder: (folder / "a.txt").rename(folder / "b.txt"),
    "copies": lambda folder: (
        shutil.copy(folder / "a.txt", folder / "new"),
        shutil.copy2(folder / "a.txt", folder / "b.txt"),
        shutil.copytree(folder / "folder", folder / "other"),
        shutil.move(folder / "a.txt", folder / "other"),
    ),
    "rmtree": lambda folder: (shutil.rmtree(folder / "folder"), shutil.rmtree(folder / "none", ignore_errors=True)),
    "arrays": lambda folder: (
        np.save(folder / "a.txt", np.ones(2)),
        np.savez(folder / "a.npz", np.ones(2)),
        np.savetxt(folder / "b.txt", np.ones(2)),
        np.ones(2).tofile(folder / "a.txt"),
    ),
    "a database": database,
    "a map": mapped,
    "a new map": new_map,
    "shared storages": shared_storages,
    "a saved storage": lambda folder: torch.save(torch.zeros(3).untyped_storage(), folder / "new.bin"),
    "archives": zipped,
    "no buffer": unbuffered,
    "processes": lambda folder: (
        subprocess.run(["touch", folder / "new"], check=True),
        subprocess.run(f"rm {folder / 'a.txt'}", shell=True, check=True),
        os.system(f"rm {folder / 'b.txt'}"),
        os.popen(f"touch {folder / 'new'}").close(),
    ),
    "a script": lambda folder: torch.jit.save(scripted(), folder / "new"),
    "a script by its method": lambda folder: scripted().save(folder / "new"),
    "a scripted function by its method": lambda folder: scripted(doubled).save(str(folder / "new")),
    "a profile": profiled,
    "arrays in safetensors": lambda folder: save_arrays({"x": np.ones(2)}, folder / "a.txt"),
}


def facts(folder):
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mode,
            path.stat().st_mtime_ns,
            path.is_file() and path.read_bytes(),
        )
        for path in folder.rglob("*")
    }


def ways(folder, done):
    for name, way in done.items():
        try:
            way(folder)
        except Exception as error:
            error.add_note(f"by {name}")
            raise


def changed(tmp_path, done):
    """Returns whether files differ after a recording."""
    for name in FILES:
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if name.endswith(".db") else b"real")
    before = facts(tmp_path / "files")
    trace = record(ways, 1, args=(tmp_path / "files", done))[0]
    assert trace.skipped
    return facts(tmp_path / "files") != before


@pytest.mark.parametrize("name", WAYS)
def test_no_way_of_writing_changes_a_file(name, tmp_path):
    assert not changed(tmp_path, {name: WAYS[name]})


def test_what_a_program_wrote_it_reads_back(tmp_path):
    assert not changed(tmp_path, {"reading": read_back, "listing": listed, "replacing": replaced})


def test_temporary_files_are_gone_afterwards(tmp_path, monkeypatch):
    outer = tmp_path / "temporary"
    outer.mkdir()
    (outer / "of another program").write_text("real")
    monkeypatch.setattr(tempfile, "tempdir", str(outer))
    assert not changed(tmp_path, {"temporary": temporary})
    assert os.listdir(outer) == ["of another program"]


@pytest.mark.parametrize("name", ["execv", "execve"])
def test_a_program_does_not_replace_the_process(name):
    with pytest.raises(UnsupportedOp, match=f"os.{name} at .*use subprocess"):
        record(lambda: getattr(os, name)("/bin/true", ["true"], *([{}] if name == "execve" else [])), 1)


def test_processes_of_libraries_run(tmp_path):
    def program():
        import ctypes.util

        assert ctypes.util.find_library("c")

    assert not record(program, 1)[0].skipped


def test_functions_are_as_before():
    names = [(owner, name) for owner in (os, shutil, io, tempfile, sqlite3) for name in dir(owner)]
    before = {(owner.__name__, name): getattr(owner, name) for owner, name in names if name != "environ"}
    record(lambda: None, 1)
    assert {(owner.__name__, name): getattr(owner, name) for owner, name in names if name != "environ"} == before
    assert remove_by_name is os.remove
    assert sys.modules["builtins"].open is io.open


def _saved_and_loaded(folder, save, load):
    """Saves on rank 0 and loads on all ranks, as PyTorch's tutorial of DDP does."""
    programs.begin()
    rank = dist.get_rank()
    model, path = programs.Mlp().cuda(), folder / "model"
    assert not path.exists()
    if rank == 0:
        save({"model": model.state_dict(), "steps": 3}, f"{path}.new")
        os.replace(f"{path}.new", path)
        assert path.is_file()
    else:
        assert not path.exists()
    dist.barrier()
    assert path.is_file()
    found = load(path)
    model.load_state_dict(found["model"])
    assert found["steps"] == 3
    dist.barrier()
    if rank == 0:
        path.unlink()
        assert not path.exists()


def _save(state, path):
    torch.save(state, path)  # found here, since the function is replaced while a program is recorded


def _save_into_file(state, path):
    with open(path, "wb") as file:
        torch.save(state, file)


def _load_from_file(path):
    with open(path, "rb") as file:
        return torch.load(file)


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (_save, lambda path: torch.load(path, map_location={"cuda:0": "cuda:1"}, weights_only=True, mmap=True)),
        (_save_into_file, _load_from_file),
    ],
    ids=["a path", "an open file"],
)
def test_all_ranks_load_a_checkpoint_that_rank_0_has_saved(save, load, tmp_path):
    traces = record(_saved_and_loaded, 2, (0, 1), args=(tmp_path, save, load))
    assert not any(trace.assumptions for trace in traces.values())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("allows", [False, True])
def test_ranks_in_child_processes_load_it_too(allows, tmp_path):
    request = Request(_saved_and_loaded, rank_call(_saved_and_loaded, (tmp_path, _save, _load_from_file)), (0,) * 32)
    turns = iter([[0], [5, 31]])
    found = record_in_turn(request._replace(allow_writes=allows), lambda _: next(turns, [])).traces
    assert sorted(found) == [0, 5, 31]
    assert not list(tmp_path.iterdir())


def test_a_rank_finds_no_checkpoint_of_the_future(tmp_path):
    def program():
        programs.begin()
        dist.barrier()
        with pytest.raises(FileNotFoundError):
            torch.load(tmp_path / "model.pt")
        dist.barrier()
        torch.save(dist.get_rank(), tmp_path / "model.pt")
        assert torch.load(tmp_path / "model.pt") == dist.get_rank()

    record(program, 2, (0, 1))


def test_files_of_safetensors_are_read_back_as_shapes(tmp_path):
    def program():
        programs.begin()
        model = programs.Mlp().cuda()
        save_file(model.state_dict(), tmp_path / "a.safetensors")
        save_model(model, tmp_path / "b.safetensors")
        model.load_state_dict(load_file(tmp_path / "a.safetensors"))
        load_model(model, tmp_path / "b.safetensors")

    assert len(record(program, 1)[0].skipped) == 2


def test_arguments_may_be_named(tmp_path):
    """A program failed with TypeError, as the replacement of a function called its arguments otherwise."""

    def program():
        state = {"a": torch.ones(2, device="cuda")}
        os.makedirs(name=tmp_path / "folder", exist_ok=True)
        torch.save(obj=state, f=tmp_path / "a.pt")
        save_file(tensors=state, filename=tmp_path / "a.safetensors")
        save_distributed(state_dict=state, checkpoint_id=tmp_path / "distributed")
        os.renames(old=tmp_path / "a.safetensors", new=tmp_path / "b.safetensors")
        assert load_file(filename=tmp_path / "b.safetensors")["a"].shape == (2,)
        assert os.listdir(path=tmp_path / "folder") == []
        # Names of the replacements' own arguments.
        Store(tmp_path / "store").save(1, name=state, result=state, recording=state, original=state, function=state)
        double = torch.compile(lambda recording, function: recording + function)
        double(recording=state["a"], function=state["a"])

    assert len(record(program, 1)[0].skipped) == 6
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("save", "load", "message"),
    [
        (
            lambda path: torch.save(lambda: 1, path),
            lambda path: torch.load(path),
            r"torch.load of .* at .*: torch.save at .*:\d+ was skipped",
        ),
        (
            lambda path: save_distributed({"a": torch.ones(2)}, checkpoint_id=path),
            lambda path: load_distributed({"a": torch.ones(2)}, checkpoint_id=path),
            "torch.distributed.checkpoint.load of .*: torch.distributed.checkpoint.save at .* was skipped",
        ),
        (
            lambda path: save_file({"a": torch.ones(2)}, path),
            lambda path: safe_open(path, "pt"),
            "safetensors.safe_open of .*: the script wrote it, and it cannot be read back",
        ),
    ],
    ids=["a function", "distributed", "opened"],
)
def test_a_checkpoint_that_cannot_be_given_back_is_named(save, load, message, tmp_path):
    def program():
        programs.begin()
        save(tmp_path / "model")
        load(tmp_path / "model")

    with pytest.raises(UnsupportedOp, match=message):
        record(program, 1)


def importing(folder):
    programs.begin()
    import a_prober  # type: ignore[import-not-found]
    import a_writer  # type: ignore[import-not-found]

    a_prober.save(folder)
    assert a_writer.IS_WRITTEN


def test_a_buffer_in_memory_is_read_back_as_shapes():
    def program():
        model = torch.nn.Linear(2, 3).cuda()
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)
        assert (loaded["weight"].shape, loaded["weight"].device.type) == ((3, 2), "cuda")
        model.load_state_dict(loaded)

    assert record(program, 1)[0].skipped


def test_the_working_folder_is_as_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def program():
        os.makedirs("run/now")
        os.chdir("run/now")

    record(program, 2, (0, 1))
    assert os.getcwd() == str(tmp_path)


def test_a_package_that_takes_a_function_later_on_has_its_replacement(tmp_path, monkeypatch):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "a_lazy_package.py").touch()
    monkeypatch.syspath_prepend(packages)
    package = importlib.import_module("a_lazy_package")
    monkeypatch.delitem(sys.modules, "a_lazy_package")
    monkeypatch.setitem(sys.modules, "a_lazy_package", package)
    assert not record(lambda: package.__doc__, 1)[0].skipped
    package.delete = os.remove
    assert record(lambda: package.delete(tmp_path / "a"), 1)[0].skipped
    assert package.delete is os.remove


def test_probes_of_a_library_while_it_is_imported_are_not_listed(tmp_path, monkeypatch):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    probe = f"os.link({str(tmp_path / 'a')!r}, {str(tmp_path / 'b')!r})\n"
    (packages / "a_prober.py").write_text(
        f"import os\n{probe}\ndef save(folder):\n    os.symlink(folder, folder / 'c')\n"
    )
    (tmp_path / "a_writer.py").write_text(f"import os\nimport a_prober\n{probe}IS_WRITTEN = True\n")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("a_prober", "a_writer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    skipped = record(importing, 2, args=(tmp_path,))[0].skipped
    assert [text.partition(" at ")[0] for text in skipped] == ["os.link", "os.symlink"]
    assert skipped[0].endswith("a_writer.py:3")


def test_a_file_that_a_library_misses_hints_at_the_skipped_writes(tmp_path):
    """As a cache of data that C++ reads, which does not find the files of the recording."""

    def program():
        os.makedirs(tmp_path / "cache")
        os.statvfs(tmp_path / "cache")
        raise FileNotFoundError("no data in cache")

    with pytest.raises(FileNotFoundError) as caught:
        foresee(program, 1)
    words = r"writes of the program are skipped, such as os\.makedirs at .*test_writes\.py:\d+: make .*--allow-writes"
    assert re.match(words, hint_of(caught.value))


@pytest.mark.parametrize("device", ["cpu", "cuda", torch.device("cuda", 0), 0])
def test_files_of_safetensors_give_shapes(tmp_path, device):
    """safetensors reads tensors of a GPU by the address of pinned memory, which a recorded tensor does not have."""
    path = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(3, 4, dtype=torch.bfloat16), "count": torch.tensor([7])}, path)

    def program():
        with safe_open(path, framework="pt", device=device) as file:
            weight, part = file.get_tensor("weight"), file.get_slice("weight")[:2]
            assert (weight.shape, weight.dtype, part.shape) == ((3, 4), torch.bfloat16, (2, 4))
            assert weight.is_cuda == part.is_cuda == (device != "cpu")
            assert file.get_slice("weight").get_shape() == [3, 4]
            assert file.get_tensor("count").item() == 7
        assert load_file(path, device=device)["weight"].is_cuda == (device != "cpu")

    record(program, 1)
