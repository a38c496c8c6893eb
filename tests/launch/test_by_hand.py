"""Ranks started by hand, with mistakes, or ended by hand: every rank gets one clear line, soon."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial

import pytest
import torch.distributed as dist

import echelon
from echelon.launch.environment import REQUIRED
from echelon.launch.variables import ReservedPort
from tests.helpers.forked_ranks import fork_and_collect
from tests.helpers.worlds import free_address

SECRET = "a secret for a test by hand"


def by_hand(address, environs):
    """Returns what has to be set for every rank."""
    host, _, port = address.rpartition(":")
    common = {"MASTER_ADDR": host, "MASTER_PORT": port, "ECHELON_SECRET": SECRET, "WORLD_SIZE": "2"}
    return [common | environ for environ in environs]


def run_by_hand(function, *environs):
    """Runs a function in a process per environment; returns what each returned, and how many seconds all took."""
    begun = time.monotonic()
    with free_address() as address:
        outcomes = fork_and_collect([partial(function, environ) for environ in by_hand(address, environs)])
    return outcomes, time.monotonic() - begun


def start(environ):
    """Returns the error of `init`, or the sum that an all-reduce gives."""
    for name in (*REQUIRED, "ECHELON_BACKEND"):
        os.environ.pop(name, None)
    os.environ.update(environ)
    try:
        with echelon.init(timeout=2.0) as group:
            group.barrier()
            return "no error"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


MISTAKES = {
    "a rank that is none": (({"RANK": "2"}, {"RANK": "0"}), (r"InvalidRank: RANK=2 is not", r"ConnectError: .*rank 1")),
    "no number": (({"RANK": "one"}, {"RANK": "0"}), (r"InvalidRank: RANK='one'", r"ConnectError: .*rank 1")),
    "the same rank twice": (({"RANK": "0"}, {"RANK": "0"}), (r"ConnectError: ", r"ConnectError: ")),
    "the other rank twice": (
        ({"RANK": "0", "WORLD_SIZE": "3"}, {"RANK": "1", "WORLD_SIZE": "3"}, {"RANK": "1", "WORLD_SIZE": "3"}),
        (r"ConnectError: .*rank 2", r"ConnectError: ", r"ConnectError: "),
    ),
    "worlds of two sizes": (
        ({"RANK": "0"}, {"RANK": "1", "WORLD_SIZE": "3"}),
        (r"ConnectError: .*rank 1", r"ConnectError: .* of 3 ranks; this is .* of 2$"),
    ),
    "an address that is nobody's": (
        ({"RANK": "0"}, {"RANK": "1", "MASTER_ADDR": "nobody.invalid"}),
        (r"ConnectError: .*rank 1", r"ConnectError: .*nobody\.invalid"),
    ),
    "another secret": (
        ({"RANK": "0"}, {"RANK": "1", "ECHELON_SECRET": "another secret for a test"}),
        (r"(ConnectError|AuthenticationError): ", r"AuthenticationError: "),
    ),
}


def test_every_mistake_is_one_line_on_every_rank_and_soon():
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        every = [by_hand(stack.enter_context(free_address()), environs) for environs, _ in MISTAKES.values()]
        outcomes = iter(fork_and_collect([partial(start, environ) for environs in every for environ in environs]))
    for mistake, (_, patterns) in MISTAKES.items():
        for pattern in patterns:
            outcome = next(outcomes)
            assert re.match(pattern, outcome), (mistake, outcome)
            assert "\n" not in outcome
    assert time.monotonic() - begun < 15


def start_twice(environ):
    os.environ.update(environ)
    with echelon.init(timeout=5.0) as first:
        rank = first.rank
        if environ.get("TWICE") == "all" or rank == 1:
            try:
                with echelon.init(timeout=1.0) as second:
                    return [first.all_gather_object(rank), second.all_gather_object(rank + 10)]
            except echelon.ConnectError as error:
                return str(error)
        try:
            first.barrier()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_init_twice_gives_two_worlds():
    outcomes, _ = run_by_hand(start_twice, {"RANK": "0", "TWICE": "all"}, {"RANK": "1", "TWICE": "all"})
    assert outcomes == [[[0, 1], [10, 11]]] * 2


def test_init_twice_on_one_rank_ends_on_both():
    outcomes, seconds = run_by_hand(start_twice, {"RANK": "0"}, {"RANK": "1"})
    assert re.match("CollectiveMismatch: barrier, #1 .* but rank 1 has closed its group", outcomes[0]), outcomes
    assert "rank 0" in outcomes[1]
    assert seconds < 10


def start_after_torch(environ):
    """Makes torch's group first, which listens on the master port of the environment."""
    os.environ.update(environ)
    dist.init_process_group("gloo")
    try:
        with echelon.init(timeout=20.0) as group:
            return group.backend.name, group.all_gather_object(dist.get_rank())
    finally:
        dist.destroy_process_group()


def test_init_after_a_group_of_torch_has_its_ranks():
    """It failed with "Address already in use"."""
    with ReservedPort() as port:
        environs = by_hand(port.address, [{"RANK": "0"}, {"RANK": "1"}])
        outcomes = fork_and_collect([partial(start_after_torch, environ) for environ in environs])
    assert outcomes == [["shm", [0, 1]]] * 2


SCRIPT = """
import sys, time, torch, echelon

group = echelon.init(timeout=20)
group.barrier()
if group.rank == 1:
    print("between steps", flush=True)
    if "exit" in sys.argv:
        sys.exit(int(sys.argv[2]))
    while True:  # wakes now and then: a signal just before a wait would not end it
        time.sleep(0.05)
group.all_reduce(torch.ones(3))
"""


def start_script(tmp_path, rank, address, *arguments):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    host, _, port = address.rpartition(":")
    environ = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": port, "ECHELON_SECRET": SECRET}
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_between_steps(tmp_path, *arguments):
    """Runs the script on two ranks; returns the status of both and the last line that rank 0 printed."""
    with free_address() as address:
        processes = [start_script(tmp_path, rank, address, *arguments) for rank in (0, 1)]
        try:
            assert processes[1].stdout.readline() == "between steps\n"
            if not arguments:
                processes[1].send_signal(signal.SIGINT)
            errors = [process.communicate(timeout=40)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
    return [process.returncode for process in processes], errors[0].splitlines()[-1]


@pytest.mark.slow
def test_the_interruption_of_a_rank_between_steps_is_told(tmp_path):
    (status, interrupted), last = end_between_steps(tmp_path)
    assert status == 1
    assert interrupted in (1, 130, -signal.SIGINT)
    assert last.startswith(
        "echelon.errors.PeerFailed: rank 1 failed: KeyboardInterrupt (noticed by rank 0 in all_reduce"
    )


@pytest.mark.slow
def test_a_rank_that_exits_between_steps_is_told(tmp_path):
    (status, exited), last = end_between_steps(tmp_path, "exit", "0")
    assert (status, exited) == (1, 0)
    assert re.match(
        r"echelon\.errors\.CollectiveMismatch: all_reduce\(sum\) of float32\[3\], #2 of group 'world' at .*train\.py:12"
        r" on rank 0, but rank 1 has closed its group, past barrier, #1 of group 'world' at .*train\.py:5",
        last,
    ), last


def share_a_secret(environ, folder):
    """Is a rank that finds its secret by a file; returns whether that worked."""
    for name in ("ECHELON_SECRET", "XDG_RUNTIME_DIR"):
        os.environ.pop(name, None)
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None
    return start({name: value for name, value in environ.items() if name != "ECHELON_SECRET"})


def test_ranks_that_share_a_secret_leave_no_file_and_no_folder(tmp_path):
    ranks = [{"RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in range(2)]
    outcomes, _ = run_by_hand(lambda environ: share_a_secret(environ, str(tmp_path)), *ranks)
    assert outcomes == ["no error"] * 2
    assert not list(tmp_path.iterdir())
