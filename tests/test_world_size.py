"""A number of ranks that cannot be meant is an error at once, and ranks are listed in a few words."""

import time

import pytest

import echelon
from echelon.backends.simulated import SimulatedBackend
from echelon.backends.tcp.backend import TcpBackend
from echelon.errors import InvalidWorldSize
from echelon.launch import environment
from echelon.launch.run import Program, run
from echelon.wording import itemized, listed, with_article

COMMON = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TORCHRUN = COMMON | {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_RANK": "0"}
SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


def not_called(group):
    raise AssertionError


@pytest.mark.parametrize("number", ["65537", "1000000000"])
@pytest.mark.parametrize(
    ("name", "environ"),
    [
        ("WORLD_SIZE", COMMON),
        ("WORLD_SIZE", TORCHRUN),
        ("SLURM_STEP_NUM_TASKS", SRUN),
        ("OMPI_COMM_WORLD_SIZE", MPIRUN),
        ("PMI_SIZE", {"PMI_RANK": "0"}),
    ],
)
def test_more_ranks_than_a_world_has_are_refused_at_once(monkeypatch, name, environ, number):
    """It was waited for a thousand million ranks, until the time was up."""
    for variable, value in (environ | {name: number}).items():
        monkeypatch.setenv(variable, value)
    begun = time.monotonic()
    with pytest.raises(InvalidWorldSize, match=f"{name}={number}: a world has at most 65,536 ranks: give a smaller"):
        echelon.init(timeout=6.0)
    assert time.monotonic() - begun < 2


def test_as_many_ranks_as_a_world_may_have_are_taken():
    found = environment.read(COMMON | {"WORLD_SIZE": "65536", "LOCAL_WORLD_SIZE": "4096"})
    assert (found.world_size, found.local_world_size) == (65536, 4096)


@pytest.mark.parametrize(
    ("name", "environ"),
    [
        ("LOCAL_WORLD_SIZE", COMMON | {"WORLD_SIZE": "65536"}),
        ("LOCAL_WORLD_SIZE", TORCHRUN | {"WORLD_SIZE": "65536"}),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", MPIRUN | {"OMPI_COMM_WORLD_SIZE": "65536"}),
    ],
)
def test_more_ranks_than_a_host_has_are_refused(name, environ):
    with pytest.raises(InvalidWorldSize, match=f"{name}='4097': set it to a number of ranks, 1 to 4096"):
        environment.read(environ | {name: "4097"})


def test_spawn_simulate_and_the_backends_refuse_them_too():
    with pytest.raises(InvalidWorldSize, match="world_size=4097: one host has at most 4,096 ranks"):
        echelon.spawn(not_called, 4097)
    for make in (
        lambda: echelon.simulate(not_called, 65_537),
        lambda: SimulatedBackend.create_group(65_537),
        lambda: TcpBackend(0, 65_537, "127.0.0.1:1", secret=b"x"),
    ):
        with pytest.raises(InvalidWorldSize, match="world_size=65537: a world has at most 65,536 ranks"):
            make()


def test_the_launcher_refuses_them_too():
    with pytest.raises(InvalidWorldSize, match="-n 1000000000: one host starts at most 1024 ranks"):
        run(Program("x.py"), 1_000_000_000, None, {})


def test_a_node_number_that_cannot_be_takes_no_memory():
    environ = SRUN | {"SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "1000000000"}
    environ |= {"SLURM_TASKS_PER_NODE": "2(x2000000000)", "MASTER_ADDR": "a"}
    assert environment.read(environ).world_size == 4


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "no rank"),
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 1, 3], "ranks 0, 1 and 3"),
        (range(1, 8), "ranks 1-7"),
        ([*range(1, 8), 9], "ranks 1-7 and 9"),
        (range(0, 65536, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 32,760 more"),
        ([*range(8), *range(10, 70000)], "ranks 0-7 and 10-69999"),
    ],
)
def test_ranks_are_listed_in_a_few_words(ranks, text):
    assert listed(ranks) == text


@pytest.mark.parametrize("text", ["an a100-40g", "an h100", "a v100", "a cpu", "an AMD EPYC", "a tpu", "an l40"])
def test_the_article_of_a_device_is_as_it_is_spoken(text):
    assert with_article(text.partition(" ")[2]) == text


def test_a_long_list_of_problems_has_the_first_of_each_kind():
    assert itemized([f"{rank}F0 missing" for rank in range(8)]) == [f"  - {rank}F0 missing" for rank in range(8)]
    late, missing = [f"rank {rank} is late" for rank in range(9)], [f"{rank}B{rank} missing" for rank in range(4)]
    assert itemized([*late, "no end", *missing]) == [
        *("  - rank 0 is late", "  - rank 1 is late", "  - rank 2 is late", "  - and 6 more of this kind"),
        "  - no end",
        *("  - 0B0 missing", "  - 1B1 missing", "  - 2B2 missing", "  - and 1 more of this kind"),
    ]
    assert itemized(["x" * number for number in range(1, 31)])[-1] == "  - and 10 more"
