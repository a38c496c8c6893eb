"""Saving and loading: dtypes, names and ranges, files that other readers take, ranks that disagree, bad places."""

import contextlib
import ctypes
import errno
import gc
import os
import shutil
import stat
import struct
import subprocess
import sys

import pytest
import safetensors.torch
import torch

import echelon
from echelon.checkpoint.files.folder import Folder
from echelon.checkpoint.files.fs import Disk, Output
from echelon.checkpoint.ranks import background
from echelon.checkpoint.ranks.loading import open_checkpoint
from echelon.checkpoint.ranks.saving import Saver
from echelon.checkpoint.state import Piece, Spec, State, Wanted
from echelon.errors import CheckpointError, FileError, InvalidArgument, SizeMismatch, UnsupportedOp
from tests.helpers.checkpoints import DTYPES, load, loaded, same, state_of, tensors_of


def save_each_way(group, path):
    """Saves with and without waiting, by ranks that hold the same, and parts. Returns whether all loads are equal."""
    tensors, rank, size = tensors_of(1), group.rank, group.world_size

    def part(name, numel):  # replicas of the weight, an uneven share of the rest
        if name == "weight":
            return [(0, numel)]
        cut = [numel * each * each // size**2 for each in range(size + 1)]
        return [(cut[rank], cut[rank + 1])]

    saver = Saver(path, group)
    states = [state_of(tensors, {"lr": 0.5}, {"rank": rank}, keep) for keep in (part, lambda _, numel: [(0, numel)])]
    results = []
    for step, state in enumerate(states * 2):
        saver.save(step, state, wait=step < 2, seed=7, layout={"dp": size}).wait()
        checkpoint = open_checkpoint(path, group)
        results.append(same(loaded(checkpoint), tensors))
        results.append((checkpoint.step, checkpoint.seed, checkpoint.data, checkpoint.layout["dp"]))
        results.append([each["rank"] for each in checkpoint.own])
    saver.close()
    return results


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_all_dtypes_and_names_come_back(run, tmp_path, num_ranks):
    for results in run(save_each_way, num_ranks, str(tmp_path / "a" / "b")):
        for step in range(4):
            equal, values, own = results[3 * step : 3 * step + 3]
            assert equal
            assert list(values) == [step, 7, {"lr": 0.5}, num_ranks]
            assert own == list(range(num_ranks))


def test_replicas_share_the_writing(tmp_path):
    tensors = {f"layer{number}": torch.rand(100, 300) for number in range(7)} | {"long": torch.rand(1, 600_001)}

    def job(group):
        Saver(tmp_path, group).save(1, state_of(tensors))

    echelon.simulate(job, 4)
    sizes = [file.size for file in Folder(tmp_path).manifest(1).files]
    assert max(sizes) - min(sizes) < 64 << 10
    assert same(load(tmp_path)[1], tensors)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_readers_take_the_files(tmp_path):
    """safetensors reads whole tensors, and torch.distributed.checkpoint rows of several files."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    tensors = {"weight": torch.rand(300, 200), "bias": torch.rand(5).bfloat16(), "scalar": torch.tensor(2.5)}

    def job(group):
        Saver(tmp_path, group).save(1, state_of(tensors))

    echelon.simulate(job, 3)
    folder = tmp_path / "step-00000001"
    found = [safetensors.torch.load_file(folder / f"rank-0000{rank}.safetensors") for rank in range(3)]
    assert torch.equal(torch.cat([each["weight"] for each in found if "weight" in each]), tensors["weight"])
    whole = [each["bias"] for each in found if "bias" in each]
    assert len(whole) == 1
    assert torch.equal(whole[0], tensors["bias"])
    out = {name: torch.zeros_like(value) for name, value in tensors.items()}
    dcp.load(out, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert same(out, tensors)


def test_a_range_of_a_tensor_is_read(tmp_path):
    tensors = tensors_of(1)
    Saver(tmp_path).save(1, state_of(tensors))
    checkpoint = open_checkpoint(tmp_path)
    for start, stop in ((0, 440), (0, 0), (440, 440), (17, 18), (30, 331)):
        out = torch.empty(stop - start)
        checkpoint.read([Wanted("weight", start, out)])
        assert torch.equal(out, tensors["weight"].reshape(-1)[start:stop])
    with pytest.raises(SizeMismatch, match=r"weight of step 1: expected elements 0 to 440, got 430 to 441"):
        checkpoint.read([Wanted("weight", 430, torch.empty(11))])
    with pytest.raises(SizeMismatch, match=r"weight of step 1: expected contiguous torch.float32, got torch.float64"):
        checkpoint.read([Wanted("weight", 0, torch.empty(11).double())])
    with pytest.raises(InvalidArgument, match="step 1 has no tensor wight"):
        checkpoint.read([Wanted("wight", 0, torch.empty(11))])


def test_ranges_of_all_lengths_that_overlap(tmp_path):
    """Long ones are read in place, short ones and those that overlap by way of other memory."""
    values = torch.rand(1_500_000)
    Saver(tmp_path).save(1, state_of({"a": values}))
    checkpoint = open_checkpoint(tmp_path)
    for ranges in (
        [(5, 7), (900, 100_000), (100_000, 1_200_000), (1_200_003, 1_200_004), (1_200_004, 1_500_000)],
        [(0, 1_500_000), (17, 900_000), (17, 900_000), (3, 5)],
    ):
        outs = [torch.zeros(stop - start) for start, stop in ranges]
        checkpoint.read([Wanted("a", start, out) for (start, _), out in zip(ranges, outs, strict=True)])
        for (start, stop), out in zip(ranges, outs, strict=True):
            assert torch.equal(out, values[start:stop])


def test_views_and_lazy_conjugates_are_stored_by_value(tmp_path):
    matrix = torch.rand(4, 6, dtype=torch.complex64)
    values = {"t": matrix.t(), "conj": matrix.conj(), "expanded": torch.rand(3, 1).expand(3, 5)}
    Saver(tmp_path).save(1, state_of(values))
    found = load(tmp_path)[1]
    assert all(torch.equal(found[name], value) for name, value in values.items())


def test_keep_counts_whole_checkpoints_and_leaves_other_files(tmp_path):
    saver = Saver(tmp_path, keep=2)
    for step in (1, 2, 3):
        saver.save(step, state_of({"a": torch.ones(3)}))
    (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    (tmp_path / "step-00000003" / "notes.txt").write_text("the best so far")
    for name in ("step-7", ".step-00000009.mine", "step-00000000", "results"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_text("not ours")
    for step in (4, 5):
        saver.save(step, state_of({"a": torch.ones(3)}), wait=step == 4)
    saver.close()
    assert saver._fs.list_folder(str(tmp_path)).count("step-00000003") == 1
    assert sorted(os.listdir(tmp_path)) == [
        *(".lock", ".step-00000009.mine", "results", "step-00000000", "step-00000002", "step-00000003"),
        *("step-00000004", "step-00000005", "step-7"),
    ]


def test_a_step_is_replaced_but_no_folder_of_that_name(tmp_path):
    saver = Saver(tmp_path)
    saver.save(1, state_of({"a": torch.ones(3)}))
    saver.save(1, state_of({"a": torch.zeros(3)}))
    assert same(load(tmp_path)[1], {"a": torch.zeros(3)})
    (tmp_path / "step-00000002").mkdir()
    with pytest.raises(CheckpointError, match="step-00000002 exists and is no checkpoint: move it away"):
        saver.save(2, state_of({"a": torch.ones(3)}))
    assert not list((tmp_path / "step-00000002").iterdir())


# Ranks that disagree


def disagree(group, path, what):
    saver = Saver(path, group)
    tensors, step, data, specs = {"a": torch.ones(3), "b": torch.ones(2)}, 1, {}, {}
    keep = lambda _, numel: [(0, numel)]  # noqa: E731
    if group.rank:
        if what == "step":
            step = 2
        elif what == "data":
            data = {"lr": 1}
        elif what == "shape":
            tensors["a"] = torch.ones(4)
        elif what == "dtype":
            specs = {"b": Spec((2,), torch.qint8)}
    if what == "missing":
        keep = lambda name, numel: [(1, numel)] if name == "a" else [(0, numel)]  # noqa: E731
    try:
        state = state_of(tensors, data, keep=keep)
        saver.save(step, state._replace(specs=state.specs | specs))
    except (InvalidArgument, CheckpointError, UnsupportedOp) as error:
        saver.save(3, state_of({"a": torch.ones(3)}))  # the ranks are still in step
        return f"{type(error).__name__}: {error}"
    return ""


DISAGREEMENTS = {
    "step": "InvalidArgument: rank 1 saves another step than rank 0, 2 and 1: pass the same on all ranks",
    "data": "InvalidArgument: rank 1 saves another data than rank 0: pass the same on all ranks",
    "shape": "InvalidArgument: a is float32[3] on rank 0 and float32[4] on rank 1: give it the same shape and dtype",
    "missing": "CheckpointError: no rank holds elements 0 to 1 of a: save from all ranks of the model",
    "dtype": "CheckpointError: rank 1: b has the dtype torch.qint8, which no checkpoint holds: convert it",
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_all_raise(tmp_path, what):
    messages = echelon.simulate(disagree, 2, (str(tmp_path), what)).results
    assert messages[0].startswith(DISAGREEMENTS[what])
    assert messages[1].endswith(messages[0].rpartition("rank 1: ")[2])
    assert Folder(tmp_path).steps() == [3]


# Places that cannot be written to


class Full(Disk):
    """Disk that is full for files of one rank."""

    def create(self, path):
        return _FullOutput(super().create(path)) if path.endswith("rank-00001.safetensors") else super().create(path)


class _FullOutput(Output):
    def __init__(self, file):
        self._file = file

    def write(self, data):
        raise OSError(28, "No space left on device")

    def sync(self):
        self._file.sync()

    def close(self):
        self._file.close()


def save_on_a_full_disk(group, path):
    Saver(path, group).save(1, state_of(tensors_of(1)))
    messages = []
    for wait in (True, False):
        saver = Saver(path, group, fs=Full() if group.rank else None)
        try:
            saver.save(2, state_of(tensors_of(2)), wait=wait)  # without waiting it fails at the next call
            saver.save(3, state_of(tensors_of(3)))
        except FileError as error:
            messages.append(str(error))
        saver.close()
    return messages


def test_a_disk_that_is_full_for_one_rank_fails_the_save_on_all(tmp_path):
    first, second = echelon.simulate(save_on_a_full_disk, 2, (str(tmp_path),)).results
    advice = "No space left on device; free some space, or keep fewer checkpoints with keep="
    assert len(first) == len(second) == 2
    for mine, other in zip(first, second, strict=True):
        assert mine.startswith("rank 1: cannot write ")
        assert mine.endswith(f"rank-00001.safetensors: {advice}")
        assert mine == f"rank 1: {other}"
    assert load(tmp_path)[0] == 1
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000001"]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_read_only_disk_is_one_error(tmp_path, monkeypatch):
    """The lock that could not be opened was then closed, which printed a second traceback."""

    def refuse(path, flags, *args):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return open_file(path, flags, *args)

    open_file = os.open
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FileError, match=r"cannot use .*: Read-only file system; give a folder on a disk that can be w"):
        Saver(tmp_path).save(1, state_of({}))
    gc.collect()


def test_a_limit_on_the_size_of_files_is_named(tmp_path):
    script = """if True:
        import resource
        import sys

        import torch

        import echelon
        from echelon.checkpoint import Store

        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        for wait in (True, False):
            try:
                Store(sys.argv[1]).save(1, extra={"value": torch.zeros(1 << 16)}, wait=wait)
            except echelon.FileError as error:
                print(error)
    """
    command = [sys.executable, "-c", script, str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.endswith(
            ": File too large; raise this process's limit on the size of a file, which `ulimit -f` shows"
        )


def test_memory_of_a_save_is_freed_when_the_interpreter_ends(monkeypatch):
    """Modules have lost their names by then: an AttributeError was printed behind the program's own output."""
    buffer = background.SharedBuffer()
    buffer.tensor(8)
    file = buffer.fileno
    with monkeypatch.context() as patch:
        patch.setattr(background, "os", None)
        buffer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "gpt"):
        with pytest.raises(
            FileError, match=rf"cannot \w+ {tmp_path}/file.*: Not a directory; it is a file, give a fold"
        ):
            Saver(path).save(1, state_of({}))
        with pytest.raises(FileError, match="it is a file, give a folder"):
            open_checkpoint(path)


def test_bad_arguments(tmp_path):
    with pytest.raises(InvalidArgument, match="keep=0: give a number of checkpoints above 0"):
        Saver(tmp_path, keep=0)
    with pytest.raises(InvalidArgument, match="step=-1: give a number from 0 on"):
        Saver(tmp_path).save(-1, state_of({}))
    with pytest.raises(InvalidArgument, match=r"step=1\.5: give the number of a step"):
        open_checkpoint(tmp_path, step=1.5)
    with pytest.raises(CheckpointError, match="has no checkpoint of step 4: it has none: give a folder in"):
        open_checkpoint(tmp_path, step=4)
    assert open_checkpoint(tmp_path / "nowhere") is None


def test_a_store_that_nobody_has_any_more_gives_its_folder_free(tmp_path):
    """As one of a function that an error has ended: the error and its frames have each other."""

    def fail():
        saver = Saver(tmp_path)
        saver.save(1, state_of({}))
        error = RuntimeError()
        try:
            raise error
        except RuntimeError:
            return saver.path

    gc.collect()
    gc.disable()
    try:
        fail()
        Saver(tmp_path).save(2, state_of({}))
    finally:
        gc.enable()
    assert load(tmp_path)[0] == 2


def test_two_stores_of_one_folder(tmp_path):
    first, second = Saver(tmp_path), Saver(tmp_path)
    first.save(1, state_of({}))
    with pytest.raises(CheckpointError, match=f"another store of this process saves into {tmp_path}: close it"):
        second.save(2, state_of({}))
    assert load(tmp_path)[0] == 1
    first.close()
    second.save(2, state_of({}))


def test_two_jobs_of_one_folder(tmp_path):
    def save_and_stay():
        saver = Saver(tmp_path)
        saver.save(1, state_of({}))
        os.write(begun[1], b"saved")
        os.read(end[0], 1)

    begun, end = os.pipe(), os.pipe()
    other = forked(save_and_stay)
    try:
        assert os.read(begun[0], 5) == b"saved"
        with pytest.raises(
            CheckpointError, match=rf"process {other} on .* saves into {tmp_path}: stop it, or use anoth"
        ):
            Saver(tmp_path).save(2, state_of({}))
        assert load(tmp_path)[0] == 1  # a job that evaluates may read
    finally:
        os.write(end[1], b".")
        os.waitpid(other, 0)
        for pipe in (*begun, *end):
            os.close(pipe)
    Saver(tmp_path).save(2, state_of({}))


def forked(act):
    """Runs a function in a forked process, and returns its number."""
    pid = os.fork()
    if pid:
        return pid
    with contextlib.suppress(BaseException):
        torch.set_num_threads(1)  # the threads of OpenMP stayed in the parent
        act()
    os._exit(0)


def drop_rights():
    """Takes this process the rights of root over files of others and closed ones of its own."""
    header, nothing = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6)
    assert ctypes.CDLL(None).capset(header, nothing) == 0


def test_a_folder_without_rights(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)

    def save():
        drop_rights()
        try:
            Saver(tmp_path / "gpt").save(1, state_of({}))
        except FileError as error:
            os.write(pipe[1], str(error).encode())

    pipe = os.pipe()
    os.waitpid(forked(save), 0)
    os.close(pipe[1])
    assert os.read(pipe[0], 1000).decode() == (
        f"cannot use {tmp_path}/gpt: Permission denied; give a folder with the rights to it"
    )
    os.close(pipe[0])
    tmp_path.chmod(stat.S_IRWXU)


NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
NO_SPACE = """
import subprocess, sys, torch
from echelon.checkpoint.ranks.saving import Saver
from echelon.errors import FileError
from tests.helpers.checkpoints import load, state_of
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", sys.argv[1]], check=True)
saver = Saver(sys.argv[1])
saver.save(1, state_of({"a": torch.ones(100_000)}))
for wait in (True, False):
    try:
        saver.save(2, state_of({"a": torch.ones(1_000_000)}), wait=wait).wait()
    except FileError as error:
        print(error)
print(load(sys.argv[1])[0])
saver.save(3, state_of({"a": torch.ones(100_000)}))
print(load(sys.argv[1])[0])
"""


@pytest.mark.slow
def test_a_disk_that_is_full(tmp_path):
    probe = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this host lets no user mount in a namespace")
    command = [*NAMESPACE, sys.executable, "-c", NO_SPACE, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    first, second, *steps = ended.stdout.splitlines()
    for line in (first, second):
        assert line.startswith(f"cannot write {tmp_path}/.step-00000002.")
        assert "No space left on device; free some space, or keep fewer checkpoints" in line
    assert steps == ["1", "3"]


def test_dtypes_of_torch_that_no_checkpoint_holds():
    """All others are there: a new one of torch shows here."""
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    refused = {str(dtype)[6:] for dtype in every if not _is_stored(dtype)}
    assert all(name.startswith(("qint", "quint", "bits", "int", "uint", "float4", "bcomplex")) for name in refused), (
        refused
    )
    assert set(DTYPES) <= {dtype for dtype in every if _is_stored(dtype)}


def _is_stored(dtype):
    from echelon.checkpoint.ranks.image import entry_of

    try:
        return entry_of("a", Spec((), dtype)).dtype == str(dtype)[6:]
    except UnsupportedOp:
        return False


def test_a_tensor_in_pieces_of_one_rank(tmp_path):
    values = torch.arange(10.0)
    pieces = [Piece("a", start, values[start : start + 2]) for start in (8, 0, 4, 2, 6)]
    Saver(tmp_path).save(1, State({"a": Spec((2, 5), torch.float32)}, pieces, {}, {}))
    assert same(load(tmp_path)[1], {"a": values.reshape(2, 5)})
