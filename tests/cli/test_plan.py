"""`echelon plan`: what it prints, what it writes, and what it says to a wrong command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from echelon.cli import main
from echelon.errors import ScheduleError
from echelon.pipeline import Costs, Schedule, schedules
from echelon.pipeline.schedules.recommendation import recommend
from tests.helpers.commands import imported_by, printed, refusal

PLAN = """\
1f1b: 2 ranks, 2 stages, 4 microbatches
simulated: makespan 15.4, bubble rate 22.1 %, peak activations 2 1

rank 0  F0 F1 ......~B0--- F2 B1--- F3 B2--- ...B3---
rank 1     F0 B0--- F1 B1--- .F2 B2--- F3 B3---

F forward   B backward   . waits for a rank   ~ waits for a transfer

rank  stages  busy  warm-up  waiting  transfer  drain  peak  microbatches
0          0    12        0      3.1       0.3      0     2             2
1          1    12      1.1      0.1       0.1    2.1     1             1
"""


def run(capsys, *arguments: str) -> str:
    return printed(capsys, "plan", *arguments)


def test_the_plan_is_printed(capsys):
    assert run(capsys, "1f1b", "-r", "2", "-m", "4", "--transfer", "0.1") == PLAN


def test_the_width_of_the_terminal_is_used(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "F0 F1 ..." in run(capsys, "1f1b", "-r", "2", "-m", "8")
    monkeypatch.setenv("COLUMNS", "40")
    rows = run(capsys, "1f1b", "-r", "2", "-m", "8").splitlines()[3:5]
    assert [len(row) for row in rows] == [35, 33], "the second rank drains, which is blank"


def test_colour_where_there_is_colour(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert "\x1b[38;2;20;23;27;48;2;139;185;233m▏0" in run(capsys, "1f1b", "-r", "2", "-m", "4")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = run(capsys, "1f1b", "-r", "2", "-m", "4")
    assert "F0 F1 ....." in plain, "what colour would show must be said by characters"
    assert plain.replace("\x1b", "").isascii()


def test_many_problems_are_bounded_and_all_in_json(capsys, tmp_path):
    path = str(tmp_path / "plan.csv")
    lines = (str(schedules.build("1f1b", 4, count)).splitlines() for count in (8, 5))
    Path(path).write_text("\n".join(map(",".join, zip(*lines, strict=True))))  # 40 actions twice
    assert main(["plan", path, "--json"]) == 2
    out, err = capsys.readouterr()
    assert len(json.loads(out)["problems"]) == 40
    problems = [line for line in err.splitlines() if line.startswith("  - ")]
    assert problems[3:] == ["  - and 37 more of this kind"]


def test_steps_without_any_time_have_no_bubble_rate(capsys):
    costs = ("--forward", "0", "--backward-input", "0", "--backward-weight", "0")
    assert json.loads(run(capsys, "1f1b", "-r", "2", "-m", "4", *costs, "--json"))["bubble_rate"] is None
    assert "bubble rate" not in run(capsys, "1f1b", "-r", "2", "-m", "4", *costs)
    assert " - " in run(capsys, "--compare", "-r", "2", "-m", "4", *costs)


def test_json_says_what_the_timeline_says(capsys):
    found = json.loads(run(capsys, "zb-v", "-r", "4", "-m", "8", "--transfer", "0.25", "--json"))
    timeline = schedules.build("zb-v", 4, 8).simulate(Costs(transfer=0.25))
    assert {key: found[key] for key in ("schedule", "num_ranks", "num_microbatches", "num_stages")} == {
        "schedule": "zb-v",
        "num_ranks": 4,
        "num_microbatches": 8,
        "num_stages": 8,
    }
    assert (found["makespan"], found["span"]) == (timeline.makespan, timeline.span)
    assert found["bubble_rate"] == pytest.approx(timeline.bubble_rate)
    assert [rank["stages"] for rank in found["ranks"]] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    for rank, peak in zip(found["ranks"], timeline.peak_activations, strict=True):
        assert rank["peak_activations"] == peak
        assert rank["peak_microbatches"] == peak / 2
        assert rank["busy"] + sum(rank["idle"].values()) == pytest.approx(found["makespan"])


def test_every_cost_counts(capsys):
    options = "--forward 1,2 --backward-input 2 --backward-weight 3 --transfer 1/2 --recompute 1 --activation 5,7"
    more = "--weight-activation 2 --recomputed-activation 1"
    found = json.loads(run(capsys, "zb-h1", "-r", "2", "-m", "4", *options.split(), *more.split(), "--json"))
    timeline = schedules.build("zb-h1", 2, 4).simulate(
        Costs(
            forward=(1, 2),
            backward_input=2,
            backward_weight=3,
            transfer=0.5,
            recompute=1,
            activation=(5, 7),
            weight_activation=2,
            recomputed_activation=1,
        )
    )
    assert found["makespan"] == timeline.makespan
    assert [rank["peak_activations"] for rank in found["ranks"]] == list(timeline.peak_activations)
    slow = json.loads(run(capsys, "dualpipe-v", "-r", "2", "-m", "4", "--json"))
    fast = json.loads(run(capsys, "dualpipe-v", "-r", "2", "-m", "4", "--overlapped", "2", "--json"))
    assert fast["makespan"] < slow["makespan"]


def test_sizes_of_the_schedule(capsys):
    found = run(
        capsys, "interleaved-1f1b", "-r", "2", "-m", "6", "--chunks", "3", "--group-size", "3", "--csv", "a.csv"
    )
    assert found.startswith("interleaved-1f1b: 2 ranks, 6 stages, 6 microbatches\n")
    assert Schedule.from_csv("a.csv").orders == schedules.build("interleaved-1f1b", 2, 6, 3, 3).orders


def test_files_are_written(capsys, tmp_path):
    files = ("plan.svg", "plan.png", "plan.html", "plan.json", "plan.csv")
    options = [
        word for pair in zip(("--svg", "--png", "--html", "--chrome", "--csv"), files, strict=True) for word in pair
    ]
    found = run(capsys, "1f1b", "-r", "2", "-m", "4", *options)
    assert found.endswith("".join(f"wrote {name}\n" for name in files))
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "plan.json").read_text())["traceEvents"]) > 16
    assert Schedule.from_csv("plan.csv").orders == schedules.build("1f1b", 2, 4).orders
    assert json.loads(run(capsys, "1f1b", "-r", "2", "-m", "4", "--json", *options))["files"] == list(files)


def test_a_file_is_read_and_checked(capsys, tmp_path):
    schedules.build("zb-h1", 2, 4).to_csv("own.csv")
    assert run(capsys, "own.csv").splitlines()[1:] == run(capsys, "zb-h1", "-r", "2", "-m", "4").splitlines()[1:]
    (tmp_path / "own.csv").write_text("0F0,0B0\n1F0\n")
    assert main(["plan", "own.csv"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("echelon: schedule 'own' has ")
    assert "1B0" in error
    assert main(["plan", "own.csv", "--compare"]) == 2
    assert capsys.readouterr().err == error


def test_search_finds_what_fits(capsys):
    arguments = ("--search", "-r", "3", "-m", "6", "--memory-limit", "2", "--json")
    found = json.loads(run(capsys, *arguments, "--chunks", "1"))
    assert max(rank["peak_microbatches"] for rank in found["ranks"]) <= 2
    assert found["makespan"] == schedules.search(Costs(), 3, 6, 2).simulate().makespan
    assert "searched" not in found
    with_chunks = json.loads(run(capsys, *arguments, "--chunks", "2"))
    assert with_chunks["num_stages"] == 6
    assert max(rank["peak_microbatches"] for rank in with_chunks["ranks"]) <= 2


def test_search_tries_one_and_two_chunks(capsys):
    arguments = ("--search", "-r", "4", "-m", "8", "--memory-limit", "3")
    found = json.loads(run(capsys, *arguments, "--json"))
    alone = json.loads(run(capsys, *arguments, "--chunks", "1", "--json"))
    compared = json.loads(run(capsys, "--compare", *arguments, "--json"))["schedules"]
    best = min(option["span"] for option in compared if option["fits"])
    assert found["span"] == best < alone["span"], "2 chunks of half the work each are faster here"
    assert {tried["num_chunks"]: tried["span"] for tried in found["searched"]} == {1: alone["span"], 2: best}
    assert run(capsys, *arguments).endswith(
        f"searched with 1 chunk per rank (span {alone['span']:g}) and with 2 chunks per rank (span {best:g})\n"
    )


def test_search_takes_the_number_of_chunks_from_costs_of_each_stage(capsys):
    arguments = ("--search", "-r", "2", "-m", "4", "--json")
    assert json.loads(run(capsys, *arguments, "--forward", "1,2,1,1"))["num_stages"] == 4
    of_boundaries = run(capsys, "--search", "-r", "3", "-m", "6", "--transfer", "0.1,0.2")
    assert of_boundaries.splitlines()[0] == "searched: 3 ranks, 3 stages, 6 microbatches"
    assert of_boundaries.endswith("; --transfer per boundary fits only one placement of 2 chunks\n")


def test_compare_prints_a_table(capsys):
    title, _, names, first, *others = run(capsys, "--compare", "-r", "4", "-m", "8", "--memory-limit", "4").splitlines()
    assert title == "4 ranks, 8 microbatches"
    assert names.split() == [
        "schedule",
        "chunks",
        "makespan",
        "span",
        "bubble",
        "rate",
        "microbatches",
        "memory",
        "fits",
    ]
    assert first.split() == ["zb-v", "2", "25.5", "24", "0.0", "%", "4", "4", "yes"]
    assert len(others) == len(schedules.names()) - 2
    assert [line.split()[-1] for line in others].count("no") == 5


def test_compare_puts_a_schedule_of_a_file_beside_the_named_ones(capsys, tmp_path):
    path = str(tmp_path / "mine.csv")
    run(capsys, "zb-h1", "-r", "4", "-m", "8", "--csv", path)
    found = json.loads(run(capsys, path, "--compare", "--json"))
    assert (found["num_ranks"], found["num_microbatches"]) == (4, 8)
    spans = {each["schedule"]: each["span"] for each in found["schedules"]}
    assert spans["mine"] == spans["zb-h1"]
    assert len(spans) > 5
    assert json.loads(run(capsys, path, "--compare", "-r", "4", "-m", "8", "--json")) == found
    for request in ((path, "--compare"), (path,)):
        assert refusal(capsys, "plan", *request, "-r", "3").startswith(f"-r 3: {path} has 4 ranks; leave it out")
        assert refusal(capsys, "plan", *request, "-m", "9").startswith(f"-m 9: {path} has 8 microbatches; leave it ")
    with pytest.raises(ScheduleError, match="mine has 4 ranks and 8 microbatches: compare it with schedules of the "):
        recommend(Costs(), 4, 9, own=[Schedule.from_csv(path)])


def test_compare_counts_memory_and_searches(capsys):
    memory = ("--activation", "2", "--parameters", "10,20", "--capacity", "24")
    found = json.loads(run(capsys, "--compare", "--search", "-r", "2", "-m", "4", "--json", *memory))
    assert (found["num_ranks"], found["num_microbatches"]) == (2, 4)
    by_name = {option["schedule"]: option for option in found["schedules"]}
    assert by_name["1f1b"]["peak_memory"] == [14, 22]
    assert by_name["1f1b"]["peak_microbatches"] == [2, 1]
    assert (by_name["1f1b"]["fits"], by_name["gpipe"]["fits"]) == (True, False)
    assert found["schedules"][0]["bubble_rate"] == 0


def test_the_memory_limit_counts_microbatches(capsys):
    interleaved = ("interleaved-1f1b", "-r", "4", "-m", "8", "--chunks", "2", "--activation", "3")
    run(capsys, *interleaved, "--memory-limit", "5.5")
    assert main(["plan", *interleaved, "--memory-limit", "5.4"]) == 2
    assert capsys.readouterr().err == (
        "echelon: interleaved-1f1b does not fit: rank 0 holds 5.5 microbatches, over the limit of 5.4; "
        "give --memory-limit 5.5, or let --search find a schedule that fits\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no schedule was named: give one of gpipe, 1f1b, "),
        ("1f1b", "-r is missing: give the numbers of ranks and of microbatches, as -r 4 -m 16"),
        ("1f1b -r 4", "-m is missing: give the numbers of ranks and of microbatches, as -r 4 -m 16"),
        ("1f1b -r 0 -m 4", "-r "),
        ("1f1b -r 2 -m -4", "-m "),
        ("1f1b -r 1000000000000 -m 4", "-r "),
        ("--search -r 4 -m 1000000000000", "-m "),
        ("looped-bfs -r 4 -m 4 --chunks 100000000", "--chunks "),
        ("--compare -r 4000 -m 100000", "-r 4000 -m 100000 are 400000000 forwards, too many to look at: give "),
        ("README.md", "no schedule or collective is called 'README.md': choose from gpipe, "),
        ("1F1B -r 2 -m 4", "no schedule or collective is called '1F1B': did you mean 1f1b? There are gpipe, "),
        ("all-redcue -r 2", "no schedule or collective is called 'all-redcue': did you mean all-reduce? There are "),
        ("ring -r 2", "ring is an algorithm: name the collective first, as in `echelon plan all-reduce --algorithm "),
        ("1f1b -r 2 -m 4 --forward 1e400", "--forward 1e400: above 1e100; give a smaller number, such as 1.5"),
        ("1f1b -r two -m 4", "-r two: not a number; give one, such as -r 2"),
        ("2f2b -r 2 -m 4", "no schedule or collective is called '2f2b': "),
        ("1f1b --search -r 2 -m 4", "1f1b and --search cannot be combined: give one of them"),
        ("1f1b --compare -r 2 -m 4", "1f1b and --compare cannot be combined: give one of them"),
        ("--compare -r 2", "-m is missing: "),
        ("--compare -r 2 -m 4 --chunks 2", "--chunks 2: --compare takes all schedules, with one chunk and with two; "),
        ("--compare -r 2 -m 4 --png a.png", "--png a.png: --compare has many schedules; name the one to write"),
        ("--compare -r 2 -m 4 --parameters 1,2,3", "--parameters has 3 values for 2 ranks: "),
        ("--search -r 2 -m 4 --group-size 2", "--group-size 2: --search is not for interleaved-1f1b; leave "),
        ("1f1b -r 2 -m 4 --capacity 3", "--capacity 3: only --compare counts parameters; give --memory-limit instead"),
        ("1f1b -r 2 -m 4 --chunks 2", "--chunks 2: 1f1b has 1 per rank; pass 1, or take interleaved-1f1b"),
        ("dualpipe-v -r 4 -m 7", "-m 7: dualpipe-v needs at least 2 per rank; give 8 or more "),
        ("1f1b -r 2 -m 4 --forward x", "--forward x: not a number; give one, such as 1.5"),
        ("1f1b -r 2 -m 4 --forward 1,", "--forward : not a number; give one, such as 1.5"),
        ("1f1b -r 2 -m 4 --forward nan", "--forward nan: not a number; "),
        ("1f1b -r 2 -m 4 --transfer -1", "--transfer -1: below 0; give a number of at least 0, such as 1.5"),
        ("1f1b -r 2 -m 4 --forward 1,2,3", "--forward has 3 values for 2 stages: give one number, or 2 of them"),
        ("1f1b -r 2 -m 4 --memory-limit 1", "1f1b does not fit: rank 0 holds 2 microbatches, over the limit of 1; "),
        ("1f1b -r 2 -m 4 --memory-limit all", "--memory-limit all: not a number; "),
        ("1f1b -r 2 -m 4 --svg a.png", "--svg a.png: give a name that ends in .svg, such as plan.svg"),
        ("1f1b -r 2 -m 4 --png a", "--png a: give a name that ends in .png, such as plan.png"),
        (
            "1f1b -r 2 -m 4 --csv no/a.csv",
            "cannot write no/a.csv: the folder no does not exist; make it first: mkdir -p no",
        ),
        (
            "1f1b -r 2 -m 4 --svg no/a.svg",
            "cannot write no/a.svg: the folder no does not exist; make it first: mkdir -p no",
        ),
        ("no.csv", "cannot read no.csv: there is no such file in /"),
        ("no.csv --chunks 4", "--chunks 4: no.csv itself says that; leave it out"),
        ("--search -r 2 -m 4 --memory-limit 1/2", "--memory-limit 0.5: a rank must hold at least 1 microbatch; "),
    ],
)
def test_a_wrong_command_line_is_an_error_of_one_line(capsys, arguments, message):
    assert refusal(capsys, "plan", *arguments.split()).startswith(message)


def test_a_file_that_is_no_text(capsys, tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    assert main(["plan", "a.csv"]) == 2
    assert capsys.readouterr().err == "echelon: cannot read a.csv: it is not text; give what --csv writes\n"


def test_without_matplotlib_there_is_a_hint(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plan", "1f1b", "-r", "2", "-m", "4", "--svg", "a.svg"]) == 1
    assert (
        capsys.readouterr().err
        == "echelon: drawing .svg needs matplotlib: pip install matplotlib; .html needs no package\n"
    )


def test_neither_torch_nor_matplotlib_is_imported_for_text():
    imported = imported_by("plan", "1f1b", "-r", "2", "-m", "2")
    assert "echelon.pipeline.plan.simulate" in imported
    assert not {"torch", "numpy", "matplotlib"} & imported
