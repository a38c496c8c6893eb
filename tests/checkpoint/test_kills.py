"""Ranks and writer processes that are killed during saves."""

import contextlib
import errno
import itertools
import json
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from echelon.backends.tcp.backend import TcpBackend
from echelon.checkpoint.files.claim import claim
from echelon.checkpoint.files.folder import Folder
from echelon.checkpoint.files.fs import Disk
from echelon.checkpoint.files.lock import FileLock, is_alive
from echelon.checkpoint.files.priority import restore
from echelon.checkpoint.ranks.saving import Saver
from echelon.errors import CheckpointError
from echelon.group.group import ProcessGroup
from tests.helpers.checkpoints import load, same, state_of, tensors_of
from tests.helpers.worlds import SECRET, free_address

ROWS = 50_000
"""The weight then has 2.2 MB."""


class Job:
    """Ranks in forked processes that save one step after the other, until they are killed."""

    def __init__(self, path, num_ranks, first, seed=0, ends=None):
        """`ends`: called with the saver after the first save without waiting for it; None: goes on for ever."""
        self.progress = mmap.mmap(-1, 16)  # the steps that were begun and committed
        struct.pack_into("<qq", self.progress, 0, first - 1, first - 1)
        self.port = contextlib.ExitStack()
        address = self.port.enter_context(free_address())
        self.ranks = []
        for rank in range(num_ranks):
            pid = os.fork()
            if not pid:
                with contextlib.suppress(BaseException):
                    torch.set_num_threads(1)  # the threads of OpenMP stayed in the parent
                    self._run(path, rank, num_ranks, address, first, seed, ends)
                os._exit(1)
            self.ranks.append(pid)

    def _run(self, path, rank, num_ranks, address, first, seed, ends):
        group = None
        if num_ranks > 1:
            group = ProcessGroup(TcpBackend(rank, num_ranks, address, secret=SECRET, connect_timeout=20, timeout=20.0))
        saver, rng = Saver(path, group, keep=2), random.Random(seed)
        for step in itertools.count(first):
            if rank == 0:
                struct.pack_into("<q", self.progress, 0, step)
            if ends is not None:
                saver.save(step, state_of(tensors_of(step, ROWS)), wait=False)
                ends(saver)
            saver.save(step, state_of(tensors_of(step, ROWS)), wait=rng.random() < 0.4).wait()
            if rank == 0:
                struct.pack_into("<q", self.progress, 8, step)

    def wait_for_commit(self, step, deadline):
        while self.steps()[1] < step:
            assert time.monotonic() < deadline, "no commit in time"
            time.sleep(0.001)

    def steps(self):
        return struct.unpack_from("<qq", self.progress)

    def kill(self, rng):
        """Kills the ranks in some order, a little apart."""
        for pid in rng.sample(self.ranks, len(self.ranks)):
            os.kill(pid, signal.SIGKILL)
            time.sleep(rng.choice([0, 0.002]))
        self.end()

    def wait(self):
        """Returns the exit statuses."""
        ranks, self.ranks = self.ranks, []
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        self.port.close()
        return statuses

    def end(self):
        for pid in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.ranks = []
        self.port.close()


def writers(path):
    """Returns the records of writer processes in a folder."""
    return [json.loads(text) for file in path.glob(".step-*.writers/*") if (text := read(file))]


def read(file):
    with contextlib.suppress(FileNotFoundError):
        return file.read_text()


@pytest.mark.parametrize("num_kills", [5, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_ranks_are_killed_at_any_time(tmp_path, num_kills):
    rng = random.Random(num_kills)
    first = 1
    for number in range(num_kills):
        job = Job(tmp_path, 1 + number % 2, first, seed=number)
        try:
            job.wait_for_commit(first, time.monotonic() + 40)
            time.sleep(rng.random() * 0.15)
            if number % 5 == 4:  # a writer, too
                for record in writers(tmp_path):
                    if record.get("writes"):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(record["pid"], signal.SIGKILL)
            job.kill(rng)
        finally:
            job.end()
        begun, committed = job.steps()
        step, tensors = load(tmp_path)
        assert committed <= step <= begun
        assert same(tensors, tensors_of(step, ROWS))
        assert [problem for each in Folder(tmp_path).steps() for problem in Folder(tmp_path).verify(each)] == []
        first = step + 1
    Saver(tmp_path).save(first, state_of({}))
    assert sorted(os.listdir(tmp_path)) == [".lock", *sorted(name for name in os.listdir(tmp_path) if name[0] == "s")]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_writers_outlive_their_ranks(tmp_path, num_ranks):
    """Each rank kills itself once its part is copied. The next start waits for the commit."""
    job = Job(tmp_path, num_ranks, 1, ends=lambda _: os.kill(os.getpid(), signal.SIGKILL))
    job.wait()
    step, tensors = load(tmp_path)
    assert (step, same(tensors, tensors_of(1, ROWS))) == (1, True)
    assert not writers(tmp_path)


def stop_its_writer(saver):
    os.kill(saver._writer.__self__._process.pid, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_that_hangs_is_ended_by_the_next_start(tmp_path):
    job = Job(tmp_path, 1, 1, ends=stop_its_writer)
    job.wait()
    (record,) = writers(tmp_path)
    assert is_alive(record)
    claim(Disk(), str(tmp_path), patience=0.3).close()
    assert not is_alive(record)
    assert os.listdir(tmp_path) == [".lock"]


def test_a_writer_that_is_killed_fails_the_save_on_all_ranks(tmp_path):
    """Rank 1's; the step before stays."""

    def kill_one(saver):
        if saver._rank:
            os.kill(saver._writer.__self__._process.pid, signal.SIGKILL)
        try:
            saver.finish()
        except CheckpointError as error:
            assert "rank 1: its writer process was killed by signal 9" in str(error)  # noqa: PT017
            saver.save(2, state_of(tensors_of(2, ROWS)))
            os._exit(0)

    job = Job(tmp_path, 2, 1, ends=kill_one)
    assert job.wait() == [0, 0]
    assert load(tmp_path)[0] == 2
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000002"]


def test_a_writer_imports_no_torch():
    code = "import sys, echelon.checkpoint.ranks.writer; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert not {"torch", "numpy", "typer"} & set(ended.stdout.split())


@pytest.mark.skipif(not os.path.exists("/proc/self/autogroup"), reason="this kernel shares between processes")
def test_a_writer_lets_training_go_first_until_it_is_waited_for(tmp_path):
    """Its session's nice value counts, not its own. A zombie has it still."""
    saver = Saver(tmp_path)
    saver.save(1, state_of(tensors_of(1)), wait=False)
    pid = saver._writer.__self__._process.pid
    wait_for_session(pid, 19)
    restore(pid)
    wait_for_session(pid, 0)
    saver.close()


def wait_for_session(pid, nice):
    deadline = time.monotonic() + 20
    while not read(Path(f"/proc/{pid}/autogroup")).endswith(f"nice {nice}\n"):
        assert time.monotonic() < deadline, read(Path(f"/proc/{pid}/autogroup"))
        time.sleep(0.01)


def test_records_in_a_folder_of_another_name_end_no_process(tmp_path):
    """A folder that is not ours is not looked at."""
    (tmp_path / "our.writers").mkdir()
    record = FileLock(str(tmp_path / "our.writers" / "rank-00000"))
    assert record.try_take()
    claim(Disk(), str(tmp_path), patience=0.0).close()
    record.close()


class ReadOnly(Disk):
    def lock(self, path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


def test_a_read_only_disk_with_records_of_writers_is_loaded_from(tmp_path):
    Saver(tmp_path).save(1, state_of(tensors_of(1)))
    records = tmp_path / f".step-00000002.{'0' * 16}.writers"
    records.mkdir()
    (records / "rank-00000").write_text("{}")
    assert load(tmp_path, fs=ReadOnly())[0] == 1


def test_a_save_whose_wait_was_interrupted_is_waited_for_again(tmp_path):
    """Ctrl-C: else the next save would clear the folder in which its writer is at work."""
    saver = Saver(tmp_path)
    handle = saver.save(1, state_of(tensors_of(1)), wait=False)
    wait, saver._writer = saver._writer, interrupt
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert "under way" in repr(handle)
    saver._writer = wait
    handle.wait()
    assert "ended" in repr(handle)
    assert Folder(tmp_path).steps() == [1]
    saver.close()


def interrupt():
    raise KeyboardInterrupt
