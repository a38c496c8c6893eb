"""`echelon.init` in programs that were started in every way that there is."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

import echelon
from echelon.errors import LaunchError
from echelon.launch import init as init_module
from echelon.launch.environment import REQUIRED
from echelon.launch.variables import ReservedPort
from tests.helpers import rank_functions

MPIRUN = shutil.which("mpirun")
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


def test_an_error_of_a_program_that_was_started_alone_comes_with_advice(alone, monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with echelon.init() as group, pytest.raises(TypeError) as caught:
        group.rank()
    sys.excepthook(TypeError, caught.value, caught.value.__traceback__)
    assert capsys.readouterr().err.splitlines()[-1] == "rank is a value: write group.rank without ()"


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
        ({}, {"backend": "mpi4"}, "did you mean mpi? There are auto, shm, tcp, gloo, nccl, mpi, ucc, simulated"),
        (
            {"ECHELON_BACKEND": "mpi4"},
            {},
            "did you mean mpi? There are auto, shm, tcp, gloo, nccl, mpi, ucc, simulated",
        ),
        ({}, {"backend": "simulated"}, "only inside echelon.simulate"),
        ({}, {"timeout": 0}, "timeout=0: use a number of seconds above 0"),
        ({"RANK": "0"}, {}, "RANK set without WORLD_SIZE and MASTER_ADDR and MASTER_PORT"),
        (
            dict(zip(REQUIRED, ["0", "2", "10.0.0.1", "29500"], strict=True)),
            {},
            "ECHELON_SECRET is not set, and not all ranks are on one host: set it on every rank to the same random "
            "text, such as the output of `openssl rand -hex 32`",
        ),
    ],
)
def test_what_makes_no_sense_is_an_error_of_one_line(alone, monkeypatch, environ, arguments, message):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        echelon.init(**arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_an_exception_reaches_the_peers_and_the_launcher(script):
    status, _, err = finish(start("-m", "echelon", "run", "-q", "-n", "2", script, "raise"))
    assert status == 1
    assert err.startswith("echelon: rank 1 raised KeyError: 'rank 1 has no key' (")
    assert "[1] Traceback (most recent call last):" in err
    assert "echelon: then rank 0 failed in " in err
    assert err.count("'rank 1 has no key'") == 3, "above and in the traceback, and as the root cause"


REPEATED = """
import sys
import torch
import echelon

group = echelon.init()
if sys.argv[1] == "checkpoint":
    torch.manual_seed(0)
    store = echelon.checkpoint.Store(sys.argv[2])
    store.save(30, model=torch.nn.Linear(2, 2))
    store.save(20, model=torch.nn.Linear(2, 2))
elif sys.argv[1] == "mismatch":
    if group.rank:
        group.all_reduce(torch.ones(3))
    group.all_reduce(torch.ones(4))
else:
    group.recv(1 - group.rank)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("checkpoint", "is older than step 30"),
        ("mismatch", "every rank must call the same operations"),
        ("deadlock", "let one of them send before it receives"),
    ],
)
def test_an_error_that_all_ranks_raise_is_told_once(fault, text, tmp_path):
    script = tmp_path / "repeated.py"
    script.write_text(REPEATED)
    status, _, err = finish(start("-m", "echelon", "run", "-q", "-n", "2", str(script), fault, str(tmp_path / "run")))
    assert status == 1
    assert err.count(text) == 1, err
    assert "direct cause" not in err


@pytest.mark.slow  # tests/checkpoint/test_last_words.py has one in the quick tests
def test_a_rank_that_dies_ends_the_job(script):
    status, _, err = finish(start("-m", "echelon", "run", "-q", "-n", "2", script, "die"))
    assert status == 137
    assert err.startswith("echelon: rank 1 was killed by SIGKILL\n")
    assert "then rank 0 failed in " in err


def test_under_echelon_run_all_ranks_meet_and_what_was_sent_arrives_though_the_sender_has_ended(script):
    status, lines, err = finish(start("-m", "echelon", "run", "-q", "-n", "2", script, "leave"))
    assert (status, err) == (0, "")
    assert lines == ["[0] 0 of 2: [3.0, 3.0, 3.0]", f"[0] {1 << 24}", "[1] 1 of 2: [3.0, 3.0, 3.0]"]


ATTACHED = """
import sys
import torch
import torch.distributed as dist
import echelon

dist.init_process_group("gloo")
with echelon.init(backend="gloo") as group:
    theirs = torch.tensor([group.rank])
    dist.all_reduce(theirs)
    ours = group.all_reduce(torch.tensor([group.rank]))
    sys.stdout.write(f"{group}: {ours.item()} and {theirs.item()}\\n")
    sys.stdout.flush()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("torch.distributed.run", "--nproc-per-node"), id="torchrun", marks=pytest.mark.slow),
        pytest.param(("echelon", "run", "-n"), id="echelon run", marks=pytest.mark.slow),
    ],
)
def test_a_group_of_torch_that_is_there_already_is_attached_to(command, tmp_path):
    """Both engines are at work at once, on connections of their own."""
    script = tmp_path / "attached.py"
    script.write_text(ATTACHED)
    status, lines, err = finish(start("-m", *command, "2", str(script)))
    assert status == 0, err
    for rank, line in enumerate(lines):
        assert line.endswith(f"<ProcessGroup 'world': rank {rank} of 2 over gloo>: 1 and 1")


@pytest.mark.slow
def test_under_torchrun_gloo_does_the_collectives(script):
    status, lines, err = finish(
        start("-m", "torch.distributed.run", "--nproc-per-node", "2", script, ECHELON_BACKEND="gloo")
    )
    assert status == 0, err
    assert lines == [f"{rank} of 2: [3.0, 3.0, 3.0]" for rank in range(2)]


@pytest.mark.slow
def test_a_rank_that_dies_ends_a_job_over_gloo(script):
    status, _, err = finish(start("-m", "echelon", "run", "-q", "-n", "2", script, "die", ECHELON_BACKEND="gloo"))
    assert status == 137
    assert err.startswith("echelon: rank 1 was killed by SIGKILL\n")
    assert "then rank 0 failed in " in err


def test_alone_an_engine_has_a_world_of_one(alone):
    with echelon.init(backend="gloo") as group:
        assert group.all_reduce(torch.ones(2), "mean").tolist() == [1.0, 1.0]
        assert group.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "gpu"}, "device='gpu' is unknown: use 'auto', 'cpu', 'cuda' or 'cuda:0'"),
        ({"device": "meta"}, "device='meta' is not supported"),
        ({"device": "cuda:99"}, "device='cuda:99': rank 0 of this host would have GPU 99, but torch sees"),
    ],
)
def test_a_device_that_is_not_there_is_named(alone, arguments, message):
    with pytest.raises(LaunchError) as caught:
        echelon.init(**arguments)
    assert message in str(caught.value)


@pytest.mark.slow
def test_under_torchrun_all_ranks_are_clients_of_the_agents_store(script):
    status, lines, err = finish(start("-m", "torch.distributed.run", "--nproc-per-node", "2", script))
    assert status == 0, err
    assert lines == [f"{rank} of 2: [3.0, 3.0, 3.0]" for rank in range(2)]


@pytest.mark.slow  # the next test has its variables
@pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed: apt-get install openmpi-bin")
def test_under_mpirun_all_ranks_meet(script, tmp_path):
    command = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, script]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path / "runtime")}
    (tmp_path / "runtime").mkdir(0o700)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=40, env=environ)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"{rank} of 2: [3.0, 3.0, 3.0]" for rank in range(2)]
    assert not list((tmp_path / "runtime").iterdir()), "the secret was left behind"


def test_ranks_of_mpirun_meet(pool, tmp_path):
    """Simulated: its variables alone, as Open MPI sets them on one host."""
    common = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "2044067841"}
    common["XDG_RUNTIME_DIR"] = str(tmp_path)
    tmp_path.chmod(0o700)
    names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"
    environs = [{**common, **dict.fromkeys(names, str(rank))} for rank in range(2)]
    assert pool.run(rank_functions.totals_of_another_world, 2, environs) == [[3.0, 3.0]] * 2
    assert not list(tmp_path.iterdir()), "the secret was left behind"


@pytest.mark.parametrize("hosts", ["vm", "vm[1-2]"])
def test_srun_s_ranks_meet(pool, tmp_path, hosts):
    """Simulated: Slurm needs a daemon and a cluster. Two names are two hosts, which share nothing but the variables."""
    common = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": hosts}
    common["XDG_RUNTIME_DIR"] = str(tmp_path)
    if hosts != "vm":
        common |= {"MASTER_ADDR": "127.0.0.2", "ECHELON_SECRET": "known to both of the hosts"}
    tmp_path.chmod(0o700)
    environs = [{**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(3)]
    assert pool.run(rank_functions.totals_of_another_world, 3, environs) == [[6.0, 6.0]] * 3
    assert not list(tmp_path.iterdir()), "the secret was left behind"


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="no launcher on one host"),
        pytest.param({"ECHELON_SECRET": "known to both of the ranks"}, id="a secret and no launcher"),
        pytest.param(
            {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False"}, id="a store that rank 0 serves"
        ),
    ],
)
def test_ranks_meet_with(pool, environ):
    with ReservedPort() as port:
        environ |= {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.port)}
        assert (
            pool.run(rank_functions.totals_of_another_world, 3, [environ | {"RANK": str(rank)} for rank in range(3)])
            == [[6.0, 6.0]] * 3
        )


@pytest.mark.parametrize("backend", ["nccl", "tcp", "auto"])
def test_simulated_ranks_stand_for_ranks_of_any_backend(backend):
    names = echelon.simulate(lambda: echelon.init(backend=backend).backend.name, world_size=2)
    assert names.results == ["simulated"] * 2
