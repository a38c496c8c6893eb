"""`echelon.init` in programs that were started in every way that there is."""

import os
import subprocess
import sys

import pytest

import echelon
from echelon.errors import LaunchError
from echelon.launch import init as init_module
from echelon.launch.environment import REQUIRED
from echelon.launch.resources import ReservedPort
from tests.launch import ranks

ALL_REDUCE = """
import os, signal, sys
import torch
import echelon

group = echelon.init()
total = group.all_reduce(torch.full((3,), float(group.rank + 1)))
# One call, one line: ranks that are not marked share one stream.
sys.stdout.write(f"{group.rank} of {group.world_size}: {total.tolist()}\\n")
sys.stdout.flush()
if group.rank == 1 and "raise" in sys.argv:
    raise KeyError("rank 1 has no key")
if group.rank == 1 and "die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "leave" in sys.argv and group.rank == 1:
    group.isend(torch.ones(1 << 24, dtype=torch.uint8), 0)
elif len(sys.argv) > 1:
    print(len(group.recv(1)))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(ALL_REDUCE)
    return str(path)


@pytest.fixture
def alone(monkeypatch):
    for name in (*REQUIRED, "ECHELON_SECRET", "ECHELON_BACKEND"):
        monkeypatch.delenv(name, raising=False)


def finish(process):
    out, err = process.communicate(timeout=40)
    return process.returncode, sorted(out.splitlines()), err


def start(*command, **environ):
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )


def test_a_program_that_was_started_alone_is_a_world_of_one(alone):
    with echelon.init(timeout=5) as group:
        assert (group.rank, group.world_size, group.timeout) == (0, 1, 5)


def test_a_group_that_is_provided_is_returned(alone):
    with echelon.init() as group:
        with init_module.provide(group):
            assert echelon.init() is group
            assert echelon.init(backend="tcp") is group
            with pytest.raises(LaunchError, match="this rank was started with 'tcp'"):
                echelon.init(backend="simulated")
        with echelon.init() as other:
            assert other is not group


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        ({}, {"backend": "mpi4"}, "use one of auto, shm, tcp, simulated"),
        ({"ECHELON_BACKEND": "mpi4"}, {}, "use one of auto, shm, tcp, simulated"),
        ({}, {"backend": "simulated"}, "only inside echelon.simulate"),
        ({}, {"timeout": 0}, "timeout=0: use a number of seconds above 0"),
        ({"RANK": "0"}, {}, "RANK set without WORLD_SIZE and MASTER_ADDR and MASTER_PORT"),
        (dict(zip(REQUIRED, ["0", "2", "127.0.0.1", "29500"], strict=True)), {}, "ECHELON_SECRET is not set"),
    ],
)
def test_what_makes_no_sense_is_an_error_of_one_line(alone, monkeypatch, environ, arguments, message):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        echelon.init(**arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_exception_reaches_the_peers_and_the_launcher(script):
    status, _, err = finish(start("-m", "echelon", "run", "-n", "2", script, "raise"))
    assert status == 1
    assert err.startswith("echelon: rank 1 raised KeyError: 'rank 1 has no key' (")
    assert "[1] Traceback (most recent call last):" in err
    assert "then rank 0 raised PeerFailed: rank 1 failed: KeyError: 'rank 1 has no key'" in err


def test_a_rank_that_dies_ends_the_job(script):
    status, _, err = finish(start("-m", "echelon", "run", "-n", "2", script, "die"))
    assert status == 137
    assert err.startswith("echelon: rank 1 was killed by SIGKILL\n")
    assert "then rank 0 raised PeerFailed: rank 1 failed" in err


def test_under_echelon_run_all_ranks_meet_and_what_was_sent_arrives_though_the_sender_has_ended(script):
    status, lines, err = finish(start("-m", "echelon", "run", "-n", "2", script, "leave"))
    assert (status, err) == (0, "")
    assert lines == ["[0] 0 of 2: [3.0, 3.0, 3.0]", f"[0] {1 << 24}", "[1] 1 of 2: [3.0, 3.0, 3.0]"]


def test_under_torchrun_all_ranks_are_clients_of_the_agents_store(script):
    status, lines, err = finish(start("-m", "torch.distributed.run", "--nproc-per-node", "2", script))
    assert status == 0, err
    assert lines == [f"{rank} of 2: [3.0, 3.0, 3.0]" for rank in range(2)]


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({"ECHELON_SECRET": "known to both of the ranks"}, id="a secret and no launcher"),
        pytest.param(
            {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False"}, id="a store that rank 0 serves"
        ),
    ],
)
def test_ranks_meet_with(pool, environ):
    with ReservedPort() as port:
        environ |= {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.port)}
        assert pool.run(ranks.total_of_another_world, 3, environ) == [6.0] * 3
