"""The commands of docs/cluster.md, run on one host and on two that are made of namespaces."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.two_hosts import two_hosts

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "cluster.md").read_text()
MANIFEST = ROOT / "examples" / "pytorchjob.yaml"
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", DOCS, re.DOTALL) for line in block.splitlines()]
SECRET = "0123456789abcdef0123456789abcdef"
OPEN_MPI = pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed: apt-get install openmpi-bin")

SCRIPT = """
import os, socket, sys
import torch
import echelon

group = echelon.init(timeout=60)
total = int(group.all_reduce(torch.tensor([group.rank + 1.0])).item())
hosts = "".join(map(str, group.backend.control.hosts))
# One call, one line: ranks share one stream.
sys.stdout.write(f"{group.rank} of {group.world_size} on {socket.gethostname()}, hosts {hosts}: {total}\\n")
sys.stdout.flush()
"""


def documented(beginning, script):
    """Returns the one command of the docs that begins so, with the programs and the script of this test."""
    (line,) = (line for line in COMMANDS if line.startswith(beginning))
    programs = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "echelon": [sys.executable, "-m", "echelon"],
        "mpirun": ["mpirun", "--allow-run-as-root"],
        "python": [sys.executable],
        "train.py": [str(script)],
    }
    return [word for part in shlex.split(line) for word in programs.get(part, [part])]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def environ(tmp_path, monkeypatch):
    """What the ranks inherit: an empty runtime directory, and nothing of a launcher."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(0o700)
    for name in ("ECHELON_SECRET", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMPI_MCA_rmaps_base_oversubscribe", "1")  # -n 2, wherever the tests run
    yield os.environ
    assert not list(runtime.iterdir()), "the secret was left behind"


def lines_of(*outcomes):
    """Returns what all ranks printed, sorted, without marks of the rank."""
    for status, _, err in outcomes:
        assert status == 0, err
    return sorted(re.sub(r"^\[\d\] ", "", line) for _, out, _ in outcomes for line in out.splitlines())


def run(*commands, environs=({},)):
    """Runs commands on this host, all at once."""
    started = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environ}
        )
        for command, environ in zip(commands, environs, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=90) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


def expected_on_one_host(name):
    return [f"{rank} of 2 on {name}, hosts 00: 3" for rank in range(2)]


EXPECTED_ON_TWO_HOSTS = [f"{rank} of 4 on node{rank // 2 + 1}, hosts 0011: 10" for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "beginning", ["echelon run", "torchrun --nproc-per-node 2 train.py", pytest.param("mpirun -n", marks=OPEN_MPI)]
)
def test_on_one_host_nothing_has_to_be_set(beginning, script, environ):
    assert lines_of(*run(documented(beginning, script))) == expected_on_one_host(os.uname().nodename)


@pytest.mark.slow
def test_by_hand_over_ipv6(script, environ):
    command = documented("RANK=0", script)
    ranks = [["env", f"RANK={rank}", *command[1:]] for rank in range(2)]
    assert lines_of(*run(*ranks, environs=({}, {}))) == expected_on_one_host(os.uname().nodename)


@pytest.mark.slow
def test_srun_on_one_host_by_its_environment(script, environ):
    assert "srun --ntasks 2 python train.py" in COMMANDS
    command = documented("srun --ntasks", script)[3:]
    environs = [slurm(rank, 2, [os.uname().nodename]) for rank in range(2)]
    assert lines_of(*run(command, command, environs=environs)) == expected_on_one_host(os.uname().nodename)


def slurm(rank, world_size, nodes):
    """Returns what srun tells a rank, the ranks in equal blocks on the nodes."""
    each = world_size // len(nodes)
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % each),
        "SLURM_NODEID": str(rank // each),
        "SLURM_NTASKS": str(world_size),
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_STEP_NUM_NODES": str(len(nodes)),
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{len(nodes)})" if len(nodes) > 1 else str(each),
        "SLURM_STEP_NODELIST": ",".join(nodes),
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_on_two_hosts(script, environ, tmp_path):
    static = documented("torchrun --nnodes 2 --node-rank 0", script)
    second = shlex.split(shlex.join(static).replace("--node-rank 0", "--node-rank 1"))
    meeting = documented("torchrun --nnodes 2 --nproc-per-node 2 --rdzv-id", script)
    six = ["fd77::1" if word == "node1" else word for word in static]
    six_second = ["fd77::1" if word == "node1" else word for word in second]
    with two_hosts(tmp_path) as hosts:
        for pair in ((static, second), (meeting, meeting), (six, six_second)):
            assert lines_of(*hosts.run(*pair, ECHELON_SECRET=SECRET)) == EXPECTED_ON_TWO_HOSTS
        assert lines_of(*hosts.run(static, second)) == EXPECTED_ON_TWO_HOSTS  # with a secret from torch's store


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torch_s_own_ddp_on_two_hosts_over_echelon(environ, tmp_path):
    """Under `init_process_group("echelon")`, with a secret of the user's, and with one from torch's store."""
    script = ROOT / "examples" / "interop" / "train_ddp.py"
    first = documented("torchrun --nnodes 2 --node-rank 0", script)
    second = shlex.split(shlex.join(first).replace("--node-rank 0", "--node-rank 1"))
    with two_hosts(tmp_path) as hosts:
        for secret in ({"ECHELON_SECRET": SECRET}, {}):
            (line,) = lines_of(*hosts.run(first, second, **secret))
            found = re.fullmatch(r"loss (\d\.\d+) on 4 ranks over echelon", line)
            assert found, line
            assert float(found[1]) < 0.5


@OPEN_MPI
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mpirun_on_two_hosts(script, environ, tmp_path):
    """With a script in place of ssh, which enters the second host."""
    with two_hosts(tmp_path) as hosts:
        agent = tmp_path / "agent"
        enter = shlex.join(hosts.command(1, "sh", "-c"))
        agent.write_text(f'#!/bin/sh\n[ "$1" = -x ] && shift\nshift\nexec {enter} "$*"\n')
        agent.chmod(0o755)
        command = documented("mpirun --host", script)
        handed_on = ["-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"]  # this test's own
        command = ["mpirun", "--mca", "plm_rsh_agent", str(agent), *handed_on, *command[1:]]
        assert lines_of(*hosts.run(command, ECHELON_SECRET=SECRET)) == EXPECTED_ON_TWO_HOSTS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_srun_on_two_hosts_by_its_environment(script, environ, tmp_path):
    assert "srun python train.py" in COMMANDS
    command = documented("srun python", script)[1:]

    def environs(**more):
        return [{**slurm(rank, 4, ["node1", "node2"]), **more} for rank in range(4)]

    def run_on(hosts, environs):
        commands = [hosts.command(node, *launch_two(command)) for node in range(2)]
        return run(*commands, environs=[pack(environs[:2]), pack(environs[2:])])

    with two_hosts(tmp_path) as hosts:
        found = run_on(hosts, environs(ECHELON_SECRET=SECRET, ECHELON_INTERFACE="eth0"))
        assert lines_of(*found) == EXPECTED_ON_TWO_HOSTS
        for status, _, err in run_on(hosts, environs()):
            assert status == 1
            assert (
                err.count("LaunchError: ECHELON_SECRET is not set, and not all ranks are on one host: set it on") == 2
            )


def launch_two(command):
    """Returns a command that runs another one twice on a host, as Slurm's daemon does, each with its environment."""
    code = (
        "import json, os, subprocess, sys\n"
        "environs = json.loads(os.environ.pop('RANKS'))\n"
        "ranks = [subprocess.Popen(sys.argv[1:], env={**os.environ, **environ}) for environ in environs]\n"
        "sys.exit(max([rank.wait() for rank in ranks]))\n"
    )
    return [sys.executable, "-c", code, *command]


def pack(environs):
    return {"RANKS": json.dumps(environs)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_manifest_s_command_in_two_pods_by_their_environment(script, environ, tmp_path):
    job = yaml.safe_load(MANIFEST.read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    programs = {"torchrun": [sys.executable, "-m", "torch.distributed.run"], "train.py": [str(script)]}
    command = [word for part in container["command"] for word in programs.get(part, [part])]
    common = {
        "WORLD_SIZE": "4",
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"],
        "PYTHONUNBUFFERED": "1",
        **{f"{prefix}MASTER_ADDR": "node1" for prefix in ("", "PET_")},
        **{f"{prefix}MASTER_PORT": "23456" for prefix in ("", "PET_")},
        container["env"][0]["name"]: SECRET,
    }
    pods = [{**common, "RANK": str(pod), "PET_NODE_RANK": str(pod)} for pod in range(2)]
    with two_hosts(tmp_path) as hosts:
        outcomes = run(*(hosts.command(number, *command) for number in range(2)), environs=pods)
    assert lines_of(*outcomes) == EXPECTED_ON_TWO_HOSTS
