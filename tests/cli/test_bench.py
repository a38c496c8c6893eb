"""`echelon bench`: on simulated ranks, on processes, beside others, and as a rank that was started already."""

import json
import shutil
import sys

import pytest

from echelon.bench import measure, mpi
from echelon.bench.request import read_hosts
from echelon.bench.subject import EchelonSubject
from echelon.cli import main
from echelon.errors import PlanError
from tests.helpers.commands import above_progress, captured, printed, refusal, spawned_by

PRINTED = """\
# all_reduce by ring: 4 ranks on 4 hosts, simulated over 10GbE, in virtual time
#                                                           simulated
#       size      count       type      op root       time   algbw   busbw wrong
#        (B) (elements)                               (us)  (GB/s)  (GB/s)
        4096       1024    float32     sum    -     125.25   0.033   0.049     0
     1048576     262144    float32     sum    -     1464.3   0.716   1.074     0
# wrong values: 0, OK
# mean bus bandwidth: 0.562 GB/s
"""
"""2 (4 - 1) times 20 us, and 2 * 3 / 4 of the bytes at 1.17 GB/s."""
SIMULATED = ["--backend", "simulated"]


def run(capture, *arguments):
    return printed(capture, "bench", *arguments)


def test_simulated_ranks_take_the_time_of_the_formula(capsys):
    options = ("--min", "4K", "--max", "1M", "--factor", "256", "--algorithm", "ring", *SIMULATED)
    assert run(capsys, "all-reduce", "-n", "4", *options) == PRINTED


def test_json_leaves_the_rows_to_a_terminal(capsys, monkeypatch):
    options = ["bench", "all_reduce", "--max", "8", "--json", *SIMULATED]
    assert main(options) == 0
    quiet = capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(options) == 0
    shown = capsys.readouterr()
    assert shown.out == quiet.out
    assert quiet.err == ""
    assert "measuring all_reduce" in shown.err
    assert [line.split()[0] for line in above_progress(shown.err)[1:]] == ["#", "#", "#", "8"]


def test_hosts_and_networks_count(capsys):
    def seconds(*options):
        found = run(capsys, "all_reduce", "-n", "4", "--min", "1M", "--max", "1M", "--json", *SIMULATED, *options)
        return json.loads(found)["rows"][0]["subjects"]["simulated"]["seconds"]

    apart, nested = seconds(), seconds("--hosts", "2x2")
    assert nested < apart < seconds("--network", "1GbE")
    assert seconds("--hosts", "a,a,b,b") == nested < seconds("--hosts", "2x2", "--local-network", "10GbE")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("2x2", "0011"),
        ("2", "0011"),
        ("2,2", "0011"),
        ("3,1", "0001"),
        ("4", "0123"),
        ("a,a,b,b", "aabb"),
        ("1,1,2,2", "1122"),
    ],
)
def test_hosts_are_counted_or_named(text, hosts):
    assert read_hosts(text, 4) == tuple(hosts)


@pytest.mark.parametrize("text", ["3", "0", "3,2", "a,b", "2x3", "99999x99999", "9999999999999", "1,1,1", ""])
def test_hosts_of_another_number_of_ranks_are_refused(text):
    with pytest.raises(PlanError, match=r"^--hosts .* is for .* ranks: give as a,a,b,b or 2x2"):
        read_hosts(text, 4)


@pytest.mark.parametrize("operation", ["reduce", "all-gather", "scatter", "barrier", "send-recv"])
def test_every_kind_of_operation(capsys, operation):
    found = json.loads(run(capsys, operation, "--max", "64", "--json", "--root", "1", *SIMULATED))
    assert found["num_ranks"] == 2
    assert found["network"] == "10GbE"
    assert all(row["subjects"]["simulated"]["wrong"] == 0 for row in found["rows"])
    assert len(found["rows"]) == (1 if operation == "barrier" else 4)


def test_the_status_tells_of_wrong_values(capsys, monkeypatch):
    def call(self, case, tensor, out):
        inner = right(self, case, tensor, out)
        return lambda: inner() + 1

    right = EchelonSubject.call
    monkeypatch.setattr(EchelonSubject, "call", call)
    assert main(["bench", "all_gather", "--max", "8", *SIMULATED]) == 1
    assert "# wrong values: 4, FAILED" in capsys.readouterr().out


def test_processes_beside_gloo(pool, capsys, monkeypatch):
    monkeypatch.setattr(measure, "spawn", spawned_by(pool))
    options = (
        "all_reduce",
        "-n",
        "2",
        "--backend",
        "tcp",
        "--min",
        "1K",
        "--max",
        "1K",
        "--vs",
        "gloo",
        "--json",
        "--turns",
        "2",
    )
    found = json.loads(run(capsys, *options))
    assert found["hosts"] == [0, 0]
    assert found["turns"] == 2
    (row,) = found["rows"]
    assert list(row["subjects"]) == ["tcp", "gloo"]
    for measured in row["subjects"].values():
        assert measured["seconds"] > 0
        assert measured["wrong"] == 0
        assert measured["algbw"] == pytest.approx(1024 / measured["seconds"] / 1e9)


@pytest.mark.skipif(
    shutil.which("mpirun") is None or not mpi.has_mpi4py(), reason="needs mpirun and mpi4py, which are not installed"
)
def test_processes_beside_mpi(capfd):
    options = (
        "reduce_scatter",
        "-n",
        "2",
        "--backend",
        "tcp",
        "--min",
        "1K",
        "--max",
        "1K",
        "--vs",
        "mpi",
        "--json",
        "--turns",
        "2",
    )
    (row,) = json.loads(run(capfd, *options))["rows"]
    assert list(row["subjects"]) == ["tcp", "mpi"]
    assert all(measured["wrong"] == 0 for measured in row["subjects"].values())


def bench_as_rank(group, options):
    """Runs the command in a process that is a rank already; returns its status, and what it printed."""
    environ = {"RANK": group.rank, "WORLD_SIZE": group.world_size, "LOCAL_RANK": group.rank, "LOCAL_WORLD_SIZE": 2}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 20000}
    return captured(group, {name: str(value) for name, value in environ.items()}, lambda _: main(options))


def test_it_measures_as_the_rank_that_it_was_started_as(pool):
    options = ["bench", "broadcast", "--root", "1", "--backend", "tcp", "--min", "1K", "--max", "1K", "--turns", "1"]
    (status, out), other = pool.run(bench_as_rank, 2, options, backend="tcp")
    assert status == 0
    assert out.startswith("# broadcast: 2 ranks on 1 host over tcp, median of 1 turn; ")
    assert "\n# wrong values: 0, OK\n" in out
    assert other == (0, "")


def test_what_is_missing_for_mpi_is_named(capsys, monkeypatch):
    monkeypatch.setattr(mpi.shutil, "which", lambda _: None)
    assert main(["bench", "barrier", "--vs", "mpi"]) == 2
    assert "install it: apt-get install openmpi-bin libopenmpi-dev" in capsys.readouterr().err
    monkeypatch.setattr(mpi.shutil, "which", lambda _: "mpirun")
    monkeypatch.setattr(mpi, "has_mpi4py", lambda: False)
    assert main(["bench", "barrier", "--vs", "mpi"]) == 2
    assert "mpi4py is not installed; install it: pip install mpi4py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing argument 'OPERATION'"),
        ("sum", "operation 'sum' is unknown: choose from all_reduce, reduce, "),
        ("all_reduce -n 0", "-n "),
        ("all_reduce -n 1000000000000", "-n "),
        ("all_reduce --dtype float8", "--dtype 'float8' is unknown: did you mean "),
        ("all_reduce --op avg", "--op 'avg' is unknown: choose from sum, mean, "),
        ("all_reduce --vs nccl", "--vs 'nccl' is unknown: choose from gloo, mpi"),
        ("all_reduce --min 5x", "--min 5x: not a number of bytes; give one such as 8, 64K or 1M"),
        ("all_reduce --min 0", "--min 0 --max 67108864: give bytes from 1 on, the smallest first"),
        ("all_reduce --factor 1", "--factor "),
        ("all_reduce --turns 0", "--turns "),
        ("all_reduce --iterations 0", "--iterations "),
        ("all_reduce --algorithm tree", "all_reduce has no algorithm 'tree': choose from ring, "),
        ("send_recv --algorithm ring", "--algorithm ring: a message needs none; leave --algorithm out"),
        ("send_recv -n 1", "send_recv with 1 rank: there is nobody to send to; give -n 2 or more"),
        ("broadcast --root 2", "--root 2 is not a rank of this group of 2: use 0 to 1"),
        ("all_reduce --backend carrier", "--backend carrier: use one of auto, "),
        ("all_reduce --network 10GbE", "--network 10GbE: only simulated ranks have that; add --backend simulated"),
        ("all_reduce --backend simulated --network slow", "--network slow: use one of 1GbE, "),
        (
            "all_reduce --backend simulated --local-network 1GbE",
            "--local-network 1GbE: there are no hosts; add --hosts",
        ),
        ("all_reduce --backend simulated --hosts 2x2", "--hosts 2x2 is for 4, not for 2 ranks"),
        ("all_reduce -n 3 --backend simulated --hosts a,b,a", "--hosts a,b,a: simulated hosts have ranks in a row"),
        ("all_reduce --backend simulated --vs gloo", "--vs gloo needs processes: leave out --backend simulated"),
        (
            "all_reduce --backend shm --algorithm ring",
            "--algorithm ring: algorithms are for messages, not for shared memory; leave out --backend shm",
        ),
        ("all_reduce --backend simulated --op sum --dtype bool", "--op sum has no meaning for torch.bool: convert "),
    ],
)
def test_a_wrong_command_line_is_an_error_of_one_line(capsys, arguments, message):
    assert refusal(capsys, "bench", *arguments.split(), statuses=(1, 2)).startswith(message)


def test_a_rank_is_not_asked_how_many_there_are(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert main(["bench", "all_reduce", "-n", "2"]) == 2
    assert "this is a rank that a launcher started: leave out -n" in capsys.readouterr().err
