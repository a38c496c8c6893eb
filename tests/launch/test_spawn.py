"""Each spawn starts processes that import torch, so there are few; what a job does is tested on the pool."""

import os
import select
import signal
import subprocess
import sys
import threading

import pytest
import torch

import echelon
from echelon.errors import InvalidWorldSize, LaunchError, PeerFailed
from tests.launch import ranks


def test_results_come_back_in_the_order_of_ranks():
    results = echelon.spawn(ranks.total, 3, (2.0,))
    assert all(torch.equal(result, torch.full((3,), 12.0)) for result in results)


def test_a_killed_rank_is_named():
    with pytest.raises(PeerFailed) as caught:
        echelon.spawn(ranks.kill_on, 2, (1,))
    assert str(caught.value) == "rank 1 failed: it was killed by SIGKILL before it returned"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((ranks.who, 0), InvalidWorldSize, "world_size=0: a world has at least 1 rank"),
        ((ranks.who, "2"), InvalidWorldSize, "world_size='2': a world has at least 1 rank"),
        ((lambda _: 0, 2), LaunchError, "<lambda> cannot be found by name in another process: def it"),
        ((ranks.who, 2, (), "mpi4"), LaunchError, "backend='mpi4' is unknown: use one of auto, tcp, simulated"),
        ((ranks.who, 2, (), "simulated"), LaunchError, "call echelon.simulate"),
        ((ranks.who, 2, (), "auto", 0.0), LaunchError, "timeout=0.0: use a number of seconds above 0"),
        ((ranks.who, 2, (threading.Lock(),)), LaunchError, "cannot be pickled"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(monkeypatch, arguments, error, message):
    monkeypatch.setattr("echelon.launch.spawn.Worker", lambda: pytest.fail("started a process"))
    with pytest.raises(error) as caught:
        echelon.spawn(*arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


SCRIPT = """
import os, signal, sys, threading
import echelon

def work(group):
    print(os.getpid(), flush=True)
    threading.Event().wait()

if __name__ == "__main__":
    echelon.spawn(work, 2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_when_the_parent_is_interrupted(tmp_path, number):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        pidfds = [os.pidfd_open(int(parent.stdout.readline())) for _ in range(2)]
        parent.send_signal(number)
        try:
            assert all(select.select([pidfd], [], [], 10)[0] for pidfd in pidfds)
            errors = parent.communicate(timeout=20)[1]
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
            parent.kill()
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)


TYPED_IN = """
import echelon
def work(group): pass
try:
    echelon.spawn(work, 2)
except echelon.LaunchError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["-c", TYPED_IN], "", "fn=work was typed in, so no other process can import it: put it in a file\n"),
        (["-"], TYPED_IN, "this program was read from <stdin>, so no other process can import it: put it in a file\n"),
    ],
)
def test_a_program_that_no_other_process_can_import_is_refused(arguments, text, message):
    ended = subprocess.run(
        [sys.executable, *arguments], input=text, capture_output=True, text=True, timeout=30, check=True
    )
    assert ended.stdout == message
