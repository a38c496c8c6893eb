import pytest

from echelon.errors import InvalidRank, InvalidWorldSize, LaunchError
from echelon.launch.environment import read, read_backend

SECRET = "0123456789abcdef"
GOOD = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def error_of(**changes):
    with pytest.raises(ValueError) as caught:
        read({**GOOD, **changes})
    assert "\n" not in str(caught.value)
    return caught.value


def test_without_a_launcher_there_is_nothing_to_read():
    assert read({}) is None
    assert read({"PATH": "/bin", "LOCAL_RANK": "3"}) is None


def test_the_four_variables_are_enough():
    environment = read(GOOD)
    assert (environment.rank, environment.world_size) == (1, 4)
    assert (environment.local_rank, environment.local_world_size) == (1, 4)
    assert environment.address == "10.0.0.1:29500"
    assert environment.secret is None
    assert not environment.elastic


def test_all_ranks_are_on_one_host_only_if_the_launcher_says_so():
    """Else ranks of several hosts would look for a secret in a file, each host in its own."""
    assert not read(GOOD).is_one_host
    assert not read({**GOOD, "LOCAL_WORLD_SIZE": "2"}).is_one_host
    assert read({**GOOD, "LOCAL_WORLD_SIZE": "4"}).is_one_host
    assert read({**GOOD, "MASTER_ADDR": "127.0.0.1"}).is_one_host


def test_the_local_rank_is_guessed_from_the_local_world_size():
    assert read({**GOOD, "RANK": "3", "LOCAL_WORLD_SIZE": "2"}).local_rank == 1


def test_what_torchrun_adds_is_read():
    elastic = {
        "TORCHELASTIC_RUN_ID": "job7",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    environment = read({**GOOD, **elastic})
    assert (environment.run_id, environment.restart) == ("job7", 2)
    assert environment.elastic
    assert environment.agent_store
    assert not read({**GOOD, **elastic, "TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store


def test_an_ipv6_address_is_put_in_brackets_once():
    assert read({**GOOD, "MASTER_ADDR": "::1"}).address == "[::1]:29500"
    assert read({**GOOD, "MASTER_ADDR": "[::1]"}).address == "[::1]:29500"


def test_the_secret_is_never_shown():
    environment = read({**GOOD, "ECHELON_SECRET": SECRET})
    assert environment.secret == SECRET.encode()
    assert SECRET not in repr(environment)


@pytest.mark.parametrize("missing", GOOD)
def test_one_missing_variable_is_named(missing):
    with pytest.raises(LaunchError, match=f"without {missing}: "):
        read({name: value for name, value in GOOD.items() if name != missing})


@pytest.mark.parametrize("rank", ["4", "-1", "two", "1.0"])
def test_a_rank_out_of_range_is_refused(rank):
    error = error_of(RANK=rank)
    assert isinstance(error, InvalidRank)
    assert "RANK=" in str(error)
    assert "0 to 3" in str(error)


@pytest.mark.parametrize("world_size", ["0", "-2", "many"])
def test_a_world_size_that_cannot_be_is_refused(world_size):
    error = error_of(WORLD_SIZE=world_size)
    assert isinstance(error, InvalidWorldSize)
    assert f"WORLD_SIZE={world_size!r}" in str(error)


def test_more_local_ranks_than_ranks_are_refused():
    assert isinstance(error_of(LOCAL_WORLD_SIZE="5"), InvalidWorldSize)
    assert isinstance(error_of(LOCAL_RANK="2", LOCAL_WORLD_SIZE="2"), InvalidRank)


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_a_port_that_is_none_is_refused(port):
    assert f"MASTER_PORT={port!r} is not a port" in str(error_of(MASTER_PORT=port))


def test_a_restart_count_that_is_no_number_is_refused():
    assert "TORCHELASTIC_RESTART_COUNT" in str(error_of(TORCHELASTIC_RESTART_COUNT="first"))


def test_a_short_secret_is_refused_and_not_shown():
    message = str(error_of(ECHELON_SECRET="hunter2"))
    assert "7 characters" in message
    assert "hunter2" not in message


def test_the_variable_overrules_auto_only():
    assert read_backend({}, "auto") == "auto"
    assert read_backend({"ECHELON_BACKEND": "tcp"}, "auto") == "tcp"
    assert read_backend({"ECHELON_BACKEND": "simulated"}, "tcp") == "tcp"


@pytest.mark.parametrize(("environ", "backend"), [({}, "mpi4"), ({"ECHELON_BACKEND": "mpi4"}, "auto")])
def test_an_unknown_backend_is_refused_with_the_known_ones(environ, backend):
    with pytest.raises(
        LaunchError, match=r"'mpi4' is unknown: did you mean mpi\? There are auto, shm, tcp, gloo, nccl"
    ):
        read_backend(environ, backend)
