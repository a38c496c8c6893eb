"""Each spawn starts processes that import torch, so there are few; what a job does is tested on the pool."""

import functools
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import types
from multiprocessing import util
from pathlib import Path

import pytest
import torch

import echelon
from echelon.errors import InvalidArgument, InvalidWorldSize, LaunchError
from echelon.launch.spawn import RankPool, pickle_call
from echelon.launch.worker import Worker
from tests.helpers import rank_functions


def test_results_come_back_in_the_order_of_ranks():
    results = echelon.spawn(rank_functions.total, 2, (2.0,))
    assert all(torch.equal(result, torch.full((3,), 6.0)) for result in results)


async def waits(group):
    return group.rank


def yields(group):
    yield group.rank


class Waits:
    async def __call__(self, group):
        return group.rank


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Waits(), 2), LaunchError, "fn=Waits is an async function: give"),
        ((functools.partial(waits), 2), LaunchError, "fn=waits is an async function: give"),
        ((waits, 2), LaunchError, "fn=waits is an async function: give one that calls asyncio.run(waits(...))"),
        ((yields, 2), LaunchError, "fn=yields is a generator, because it has a yield: give a function that returns"),
        ((rank_functions.who, 0), InvalidWorldSize, "world_size=0: a world has at least 1 rank"),
        ((rank_functions.who, "2"), InvalidWorldSize, "world_size='2': a world has at least 1 rank"),
        ((lambda _: 0, 2), LaunchError, "<lambda> cannot be found by name in another process: def it"),
        (
            (rank_functions.who, 2, (), "mpi4"),
            LaunchError,
            "backend='mpi4' is unknown: did you mean mpi? There are auto, shm, tcp, gloo",
        ),
        ((rank_functions.who, 2, (), "simulated"), LaunchError, "call echelon.simulate"),
        ((rank_functions.who, 2, (), "auto", 0.0), LaunchError, "timeout=0.0: use a number of seconds above 0"),
        ((rank_functions.who, 2, (threading.Lock(),)), LaunchError, "cannot be pickled"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(monkeypatch, arguments, error, message):
    monkeypatch.setattr("echelon.launch.spawn.Worker", lambda: pytest.fail("started a process"))
    with pytest.raises(error) as caught:
        echelon.spawn(*arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_job_of_a_pool_takes_its_arguments_by_place():
    with (
        RankPool() as pool,
        pytest.raises(InvalidArgument, match=r"^args is no argument here: give them by place"),
    ):
        pool.run(rank_functions.who, 2, args=(3,))


SCRIPT = r"""
import os, signal, sys, threading
import echelon

def work(group):
    os.write(1, f"{os.getpid()}\n".encode())  # in one piece: both ranks write to the same pipe
    threading.Event().wait()

if __name__ == "__main__":
    echelon.spawn(work, int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("number", "num_ranks"),
    [
        (signal.SIGINT, 1),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 2, marks=pytest.mark.slow),
    ],
)
def test_no_process_is_left_when_the_parent_is_interrupted(tmp_path, number, num_ranks):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(path), str(num_ranks)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        pidfds = [os.pidfd_open(int(parent.stdout.readline())) for _ in range(num_ranks)]
        parent.send_signal(number)
        try:
            assert all(select.select([pidfd], [], [], 10)[0] for pidfd in pidfds)
            errors = parent.communicate(timeout=20)[1]
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
            parent.kill()
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)


def typed_in(group):
    pass


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "fn=typed_in was typed in, so no other process can import it: put it in a file"),
        ("<stdin>", "this program was read from <stdin>, so no other process can import it: put it in a file"),
    ],
)
def test_a_program_that_no_other_process_can_import_is_refused(monkeypatch, path, message):
    main = types.ModuleType("__main__")
    if path is not None:
        main.__file__ = path
    main.typed_in = typed_in
    monkeypatch.setattr(typed_in, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(LaunchError) as caught:
        pickle_call(typed_in, ())
    assert str(caught.value) == message


def test_a_new_worker_does_not_see_ctrl_c():
    # It would print where the import of torch broke off.
    worker = Worker()
    try:
        lines = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
    finally:
        worker.end()
    blocked, ignored = (int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk:", "SigIgn:")))
    assert (blocked | ignored) >> (signal.SIGINT - 1) & 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_processes_of_a_rank_start_as_those_of_its_parent(pool):
    """Each worker of a DataLoader was a new interpreter that imports torch, which took seconds."""
    method = multiprocessing.get_start_method()  # it chooses one if none was
    assert pool.run(rank_functions.start_method, 2) == [method] * 2
    assert multiprocessing.get_start_method(allow_none=True) == method


@pytest.mark.slow
def test_processes_of_a_rank_keep_their_sockets_in_the_folder_of_its_parent():
    """Workers of a DataLoader that were killed left folders behind."""
    assert echelon.spawn(util.get_temp_dir, 1) == [util.get_temp_dir()]
