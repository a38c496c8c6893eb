"""`echelon plan` of a collective."""

from __future__ import annotations

import json

import pytest

from echelon.collectives.plans.algorithms import OPERATIONS, algorithms_of, build
from echelon.collectives.plans.plan import text_of_round
from tests.helpers.commands import imported_by, printed, refusal

BROADCAST = """\
binomial broadcast: 3 ranks, 1 chunk, 1000 bytes
simulated: 2 rounds, 22 us

        0    1
rank 0  0>1  0>2
rank 1  0<0  .
rank 2  .    0<0

0>1 sends chunk 0 to rank 1   0<1 receives it from rank 1

rank  messages  bytes sent   busy   idle
0            2        2000  22 us   0 us
1            0           0  11 us  11 us
2            0           0  11 us  11 us
"""

LIST = """\
broadcast: p ranks, n bytes; h hosts of k ranks
algorithm           rounds         cost
binomial            lg(p)          lg(p)*(alpha + n*beta)
scatter_all_gather  lg(p) + p-1    (lg(p) + p-1)*alpha + 2*n*(p-1)/p*beta
hierarchical        lg(h) + lg(k)  lg(h)*(alpha + n*beta) + lg(k)*(local_alpha + n*local_beta)

ECHELON_BROADCAST=NAME selects another algorithm
"""


def run(capsys, *arguments: str) -> str:
    return printed(capsys, "plan", *arguments)


def test_the_plan_is_printed(capsys):
    assert run(capsys, "broadcast", "--algorithm", "binomial", "-r", "3", "--bytes", "1000") == BROADCAST


def test_without_an_algorithm_all_are_listed(capsys):
    assert run(capsys, "broadcast") == LIST


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_can_be_listed_timed_and_planned(capsys, operation):
    word = operation.replace("_", "-")
    listed = json.loads(run(capsys, word, "-r", "6", "--json"))["algorithms"]
    assert [row["algorithm"] for row in listed] == [
        algorithm.name for algorithm in algorithms_of(operation) if not algorithm.goes_by_hosts
    ]
    assert sum(row["chosen"] for row in listed) == 1
    assert run(capsys, word, "-r", "6").count(" yes ") == 1
    for row in listed:
        name = row["algorithm"].replace("_", "-")
        found = json.loads(run(capsys, word, "--algorithm", name, "-r", "6", "--json"))
        assert (found["seconds"], found["num_rounds"]) == (row["seconds"], row["rounds"])
        plan = build(operation, row["algorithm"], 6)
        assert [rank["rounds"] for rank in found["ranks"]] == [list(map(text_of_round, rank)) for rank in plan.rounds]


def test_costs_and_bytes_count(capsys):
    options = "all-reduce --algorithm ring -r 4 --bytes 400 --alpha 10 --beta 2 --gamma 1 --json"
    found = json.loads(run(capsys, *options.split()))
    assert found["seconds"] == 6 * 10 + 2 * 400 * 3 / 4 * 2 + 400 * 3 / 4
    assert found["ranks"][2]["bytes_sent"] == 600


def test_hosts_and_their_costs_count(capsys):
    options = (
        "all-reduce --algorithm hierarchical -r 4 --hosts a,a,b,b --bytes 400 --alpha 10 --beta 2 --gamma 0 --json"
    )
    same = json.loads(run(capsys, *options.split()))
    near = json.loads(run(capsys, *options.split(), "--local-alpha", "1", "--local-beta", "0"))
    assert same["seconds"] == 2 * (10 + 200 * 2) + 2 * (10 + 100 * 2)
    assert near["seconds"] == 2 * 1 + 2 * (10 + 100 * 2)
    ring = json.loads(run(capsys, *options.replace("hierarchical", "ring").split(), "--local-alpha", "1"))
    assert ring["seconds"] < 6 * (10 + 100 * 2) + 1


def test_with_hosts_the_algorithms_that_go_by_them_are_listed_and_chosen(capsys):
    options = "all-reduce -r 8 --hosts 2x4 --local-alpha 1e-6 --local-beta 1e-10 --json"
    times = {row["algorithm"]: row["seconds"] for row in json.loads(run(capsys, *options.split()))["algorithms"]}
    assert list(times) == [algorithm.name for algorithm in algorithms_of("all_reduce")]
    assert times["hierarchical"] < min(times["ring"], times["rabenseifner"], times["recursive_doubling"])
    chosen = [row["algorithm"] for row in json.loads(run(capsys, *options.split()))["algorithms"] if row["chosen"]]
    assert chosen == ["hierarchical"]
    named = json.loads(run(capsys, *options.replace("2x4", "a,a,a,a,b,b,b,b").split()))
    assert {row["algorithm"]: row["seconds"] for row in named["algorithms"]} == times


def test_a_rank_alone_has_no_picture(capsys):
    lines = run(capsys, "barrier", "--algorithm", "dissemination", "-r", "1").splitlines()
    assert lines[:3] == ["dissemination barrier: 1 rank, 0 chunks, 0 bytes", "simulated: 0 rounds, 0 us", ""]
    assert lines[3].startswith("rank  messages")


def test_what_is_no_collective_but_the_value_of_an_option(capsys, tmp_path):
    assert run(capsys, "--csv", "gather", "1f1b", "-r", "2", "-m", "2").endswith("wrote gather\n")
    found = json.loads(run(capsys, "--json", "-r", "2", "gather"))
    assert (found["operation"], found["num_ranks"], found["bytes"]) == ("gather", 2, 1 << 20)


def test_rounds_that_do_not_fit_are_counted(capsys):
    lines = run(capsys, "all-reduce", "--algorithm", "ring", "-r", "8").splitlines()
    assert max(map(len, lines[3:12])) <= 80
    assert "more rounds)" in lines[12]


def test_files_are_written(capsys, tmp_path):
    files = ("--svg", "a.svg", "--png", "a.png", "--chrome", "a.json")
    assert run(capsys, "all-reduce", "--algorithm", "ring", "-r", "4", *files).endswith(
        "wrote a.svg\nwrote a.png\nwrote a.json\n"
    )
    assert "3&gt;1 +2&lt;3" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4 * 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("all-reduce --algorithm tree -r 4", "all_reduce has no algorithm 'tree': choose from ring, "),
        ("all-reduce --algorithm ring", "-r is missing: give the number of ranks, as -r 4"),
        ("all-reduce --algorithm ring -r 0", "-r 0: give a number greater than or equal to 1"),
        ("broadcast --algorithm binomial -r 4 --root 4", "--root 4 is not a rank of this group of 4: use 0 to 3"),
        ("all-reduce --algorithm hierarchical -r 4", "hierarchical: no hosts for 4 ranks: give the host of each rank"),
        ("all-reduce --algorithm ring -r 4 --hosts a,b", "--hosts a,b is for 2, not for 4 ranks: give as a,a,b,b"),
        (
            "all-reduce --hosts 2x2",
            "--hosts 2x2 is for 4, not for no number of ranks: give as a,a,b,b or 2x2, with -n 4",
        ),
        ("all-reduce --algorithm ring -r 4 --alpha x", "--alpha x: not a number; give one, such as 1.5"),
        ("all-reduce --algorithm ring -r 4 --bytes -1", "--bytes -1: not a number of bytes; give one such as 8, 64K"),
        ("all-reduce -r 4 --bytes 1000000000000000000000", "--bytes 1000000000000000000000: more than 4T bytes; give "),
        ("all-reduce -r 1000000000000", "-r "),
        ("broadcast -r 4 --alpha 1e400", "--alpha 1e400: above 1e100; give a smaller number, such as 1.5"),
        ("all-reduce --algorithm ring -r 4 -m 4", "No such option: -m"),
        ("all-reduce --svg a.svg", "--svg a.svg: there are several plans to draw; name one, as --algorithm ring -r 4"),
        ("all-reduce --algorithm ring -r 4 --svg a.png", "--svg a.png: give a name that ends in .svg"),
        ("all-reduce --algorithm ring -r 4 --png no/a.png", "cannot write no/a.png: the folder no does not exist; "),
    ],
)
def test_a_wrong_command_line_is_an_error_of_one_line(capsys, arguments, message):
    assert refusal(capsys, "plan", *arguments.split()).startswith(message)


def test_torch_is_not_imported():
    imported = imported_by("plan", "all-reduce", "--algorithm", "ring", "-r", "4")
    assert "echelon.collectives.plans.cost" in imported
    assert not {"torch", "numpy", "matplotlib"} & imported
