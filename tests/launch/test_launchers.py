"""What srun, Open MPI's mpirun and PMI's mpiexec tell their ranks."""

import os
import subprocess
import sys

import pytest

from echelon.errors import InvalidRank, InvalidWorldSize, LaunchError
from echelon.launch.environment import is_rank, read, without_launcher

SECRET = "0123456789abcdef"
HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_NODELIST": "gpu[01-09]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
ONE_NODE = {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_STEP_NODELIST": "gpu07"}
BATCH = {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "2044067841",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def numbers(environ):
    read_out = read(environ)
    return read_out.rank, read_out.world_size, read_out.local_rank, read_out.local_world_size


def refusal(environ, kind=LaunchError):
    with pytest.raises(kind) as caught:
        read(environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_srun_on_several_hosts():
    environment = read(SRUN)
    assert numbers(SRUN) == (3, 5, 1, 2)
    assert numbers({**SRUN, "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}) == (4, 5, 0, 1)
    assert environment.master_addr == "gpu07"
    assert not environment.is_one_host
    assert environment.job == environment.run_id == "slurm-4711.2"


def test_srun_on_one_host_meets_on_the_loopback_address():
    environment = read(ONE_NODE)
    assert numbers(ONE_NODE) == (3, 5, 1, 5)
    assert environment.master_addr == "127.0.0.1"
    assert environment.is_one_host


def test_the_port_follows_from_the_job_and_is_none_that_linux_gives_away():
    def port(job):
        return read({**SRUN, "SLURM_JOB_ID": str(job)}).master_port

    ports = {port(job) for job in range(100)}
    assert len(ports) > 90
    assert all(20000 <= number < 30000 for number in ports)
    assert port(7) == port(7)
    assert read({**SRUN, "SLURM_PROCID": "0"}).master_port == read(SRUN).master_port


def test_a_few_of_slurms_variables_are_enough():
    few = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "9", "SLURM_NODELIST": "vm"}
    assert numbers(few) == (1, 2, 1, 2)
    assert read(few).is_one_host
    without = {name: value for name, value in few.items() if name != "SLURM_NODELIST"}
    assert "srun does not say on which host rank 0 is: set MASTER_ADDR" in refusal(without)
    assert read({**without, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}).master_addr == "10.0.0.9"


def test_a_requeued_job_is_another_attempt():
    assert (read(SRUN).restart, read({**SRUN, "SLURM_RESTART_COUNT": "2"}).restart) == (0, 2)


def test_where_ranks_meet_can_be_overruled():
    environment = read({**SRUN, "MASTER_ADDR": "[fd00::1]", "MASTER_PORT": "1234"})
    assert environment.address == "[fd00::1]:1234"
    assert environment.rank == 3


def test_a_heterogeneous_job_has_to_say_where_rank_0_is():
    several = {**SRUN, "SLURM_HET_SIZE": "2"}
    assert "srun does not say on which host rank 0 is" in refusal(several)
    assert read({**several, "MASTER_ADDR": "gpu01"}).master_addr == "gpu01"


def test_a_batch_script_itself_is_no_rank():
    assert "SLURM_NTASKS=8, but this is the batch script's own process: start the ranks with srun" in refusal(BATCH)
    assert read({**BATCH, "SLURM_NTASKS": "1"}) is None
    assert read({**BATCH, **HAND}).rank == 1
    assert not is_rank(BATCH)


def test_a_step_of_one_task_is_a_world_of_one():
    shell = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert read(shell) is None
    assert not is_rank(shell)
    assert is_rank(SRUN)


def test_open_mpi_on_one_host():
    environment = read(OPEN_MPI)
    assert numbers(OPEN_MPI) == (1, 4, 1, 4)
    assert environment.is_one_host
    assert environment.master_addr == "127.0.0.1"
    assert environment.job == "openmpi-2044067841"


def test_open_mpi_on_several_hosts_has_to_be_told_where_rank_0_is():
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert "mpirun does not say on which host rank 0 is: set MASTER_ADDR" in refusal(several)
    environment = read({**several, "MASTER_ADDR": "node1"})
    assert environment.address == f"node1:{read(OPEN_MPI).master_port}"
    assert not environment.is_one_host


def test_pmi_on_one_host():
    assert numbers(PMI) == (1, 4, 1, 4)
    assert read(PMI).is_one_host
    assert read(PMI).job == f"pmi-{os.getppid()}"


def test_ranks_of_pmi_that_are_started_by_scripts_have_the_same_job():
    code = "import os; from echelon.launch.environment import read; print(read(os.environ).job)"
    command = ["sh", "-c", f'"{sys.executable}" -c "{code}"; true']
    ended = subprocess.run(command, env={**os.environ, **PMI}, capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == f"pmi-{os.getpid()}\n"


def test_pmi_on_several_hosts_has_to_be_told_where_to_meet():
    several = {**PMI, "MPI_LOCALNRANKS": "2"}
    assert "mpiexec does not say on which host" in refusal(several)
    assert "mpiexec gives the job no name to take a port from: set MASTER_PORT" in refusal(
        {**several, "MASTER_ADDR": "node1"}
    )
    assert read({**several, "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}).address == "node1:29500"


def test_of_nested_launchers_the_innermost_counts():
    assert read({**SRUN, **OPEN_MPI}).job.startswith("openmpi")
    assert read({**BATCH, **OPEN_MPI}).job.startswith("openmpi")
    assert read({**SRUN, **PMI}).job.startswith("pmi")
    elastic = {**HAND, "TORCHELASTIC_RUN_ID": "job7"}
    assert read({**elastic, **SRUN, **OPEN_MPI}).run_id == "job7"


def test_srun_that_speaks_pmi_is_read_as_srun():
    assert read({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "5"}).job == "slurm-4711.2"


def test_variables_by_hand_that_agree_are_welcome():
    agreeing = {**OPEN_MPI, **HAND}
    assert read(agreeing).address == "10.0.0.1:29500"
    assert numbers({**OPEN_MPI, "RANK": "1"}) == (1, 4, 1, 4)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**OPEN_MPI, "RANK": "0"}, "RANK=0 contradicts OMPI_COMM_WORLD_RANK=1: two launchers, or one and a variable"),
        ({**OPEN_MPI, **HAND, "WORLD_SIZE": "8"}, "WORLD_SIZE=8 contradicts OMPI_COMM_WORLD_SIZE=4"),
        ({**SRUN, "LOCAL_RANK": "0"}, "LOCAL_RANK=0 contradicts SLURM_LOCALID=1"),
        ({**SRUN, "WORLD_SIZE": "8"}, "WORLD_SIZE=8 contradicts SLURM_STEP_NUM_TASKS=5"),
        ({**PMI, **OPEN_MPI, "PMI_RANK": "2"}, "OMPI_COMM_WORLD_RANK=1 contradicts PMI_RANK=2"),
    ],
)
def test_what_contradicts_is_named(environ, message):
    assert message in refusal(environ)


@pytest.mark.parametrize(
    ("environ", "kind", "message"),
    [
        ({**SRUN, "SLURM_PROCID": "5"}, InvalidRank, "SLURM_PROCID=5 is not a rank of this group of 5"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "0"}, InvalidWorldSize, "SLURM_STEP_NUM_TASKS='0'"),
        ({**SRUN, "SLURM_LOCALID": "2"}, InvalidRank, "SLURM_LOCALID=2"),
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu[7-"}, LaunchError, "is not a list of hosts"),
        ({**SRUN, "SLURM_RESTART_COUNT": "x"}, LaunchError, "SLURM_RESTART_COUNT='x' is not a number of restarts"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "one"}, InvalidRank, "OMPI_COMM_WORLD_RANK='one'"),
        ({**OPEN_MPI, "MASTER_PORT": "x"}, LaunchError, "MASTER_PORT='x' is not a port"),
        ({**PMI, "PMI_SIZE": ""}, InvalidWorldSize, "PMI_SIZE=''"),
    ],
)
def test_what_cannot_be_is_named_as_the_launcher_names_it(environ, kind, message):
    assert message in refusal(environ, kind)


def test_the_secret_is_read_whoever_started_the_ranks():
    assert read({**SRUN, "ECHELON_SECRET": SECRET}).secret == SECRET.encode()
    assert read(SRUN).secret is None


@pytest.mark.parametrize("launched", [SRUN, OPEN_MPI, PMI, {"TORCHELASTIC_RUN_ID": "x"}])
def test_what_one_launcher_says_is_not_inherited_by_the_ranks_of_another(launched):
    assert read(without_launcher({**launched, "PATH": "/bin"})) is None
    assert without_launcher({"PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, True),
        ({"MASTER_ADDR": "localhost"}, True),
        ({"MASTER_ADDR": "[::1]"}, True),
        ({"LOCAL_WORLD_SIZE": "4"}, True),
        ({"LOCAL_WORLD_SIZE": "2"}, False),
        ({}, False),
    ],
)
def test_that_all_ranks_are_on_one_host_is_said_only_where_it_is_certain(changes, expected):
    assert read({**HAND, **changes}).is_one_host is expected
