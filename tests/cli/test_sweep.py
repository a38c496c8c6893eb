"""`echelon foresee --sweep`: combinations of arguments, and the table of their steps."""

import io
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from rich.console import Console

from echelon import LaunchError
from echelon.cli import Terminated, ending_by_sigterm
from echelon.cli import main as command
from echelon.cli import sweep as sweep_module
from echelon.cli.sweep import Ended, Entry, as_json, combinations, entry_of, ranked, show, sweep, time_left
from echelon.cli.sweep import run_all as run_processes


def test_every_choice_is_combined_with_every_other():
    assert combinations("--sweep", "--tp {1,2} --pp={1,4} --zero") == [
        ("--tp", "1", "--pp=1", "--zero"),
        ("--tp", "1", "--pp=4", "--zero"),
        ("--tp", "2", "--pp=1", "--zero"),
        ("--tp", "2", "--pp=4", "--zero"),
    ]
    assert combinations("--sweep", """--name '{a b,c}' x{1}y{2,3}""") == [
        ("--name", "a b", "x1y2"),
        ("--name", "a b", "x1y3"),
        ("--name", "c", "x1y2"),
        ("--name", "c", "x1y3"),
    ]


def test_an_empty_alternative_adds_no_word():
    assert combinations("--sweep", "{--recompute,} --tp {1,2}") == [
        ("--recompute", "--tp", "1"),
        ("--recompute", "--tp", "2"),
        ("--tp", "1"),
        ("--tp", "2"),
    ]
    assert combinations("--sweep", "--name '' x{,y}") == [("--name", "", "x"), ("--name", "", "xy")]


def test_an_alternative_may_have_several_words():
    assert combinations("--sweep", "{--batch 8 --name 'a b', --batch 4 } --tp {1, 2}") == [
        ("--batch", "8", "--name", "a b", "--tp", "1"),
        ("--batch", "8", "--name", "a b", "--tp", "2"),
        ("--batch", "4", "--tp", "1"),
        ("--batch", "4", "--tp", "2"),
    ]
    assert combinations("--sweep", "{--batch 8,}") == [("--batch", "8"), ()]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "give alternatives"),
        ("--tp 2", "give alternatives"),
        ("--tp {}", "give alternatives"),
        ("--tp {1, 2", "'{1, 2' has an open brace"),
        ("--tp {1,{2,3}}", "open brace"),
        ("--tp 1}", "open brace"),
        ("--tp '{1,2}", "quote"),
        (" ".join(["{1,2,3,4,5,6,7,8,9}"] * 3), "729 combinations"),
    ],
)
def test_bad_text_is_one_line(text, error, capsys):
    with pytest.raises(LaunchError, match=error) as raised:
        combinations("--sweep", text)
    assert "\n" not in str(raised.value)
    assert command(["foresee", "-n", "2", "--sweep", text, "train.py"]) == 2
    assert capsys.readouterr().err.startswith("echelon: --sweep")


def figures(step, mfu, reserved=1 << 30, fits=True, bubble=None):
    narrowly = fits and reserved > 79 << 30
    memory = {"needed_peak": reserved, "limit": 80 << 30, "fits": fits, "fits_narrowly": narrowly}
    known = {"step_seconds": step, "mfu": mfu, "bubble": bubble, "memory": memory}
    return {**known, "tokens_per_second": None, "problems": []}


OUTCOMES = {
    "1": Ended(1, json.dumps(figures(0.5, 0.9, 90 << 30, fits=False)), ""),
    "2": Ended(0, json.dumps(figures(2.0, 0.4)) + "\n", "[0] loss 1\na warning"),
    "4": Ended(0, json.dumps(figures(1.0, 0.3)), ""),
    "8": Ended(1, "[0] begun\n", "a warning\nechelon: rank 0 raised ValueError: 8 does not divide 12\n[0] Traceback"),
    "16": Ended(-9, "", ""),
}


def run_all(commands):
    yield from ((number, OUTCOMES[words[-1]]) for number, words in enumerate(commands))


def ending_with(outcomes):
    return lambda _: (each for each in enumerate(outcomes))


def no_word(line):
    pass


EACH = [("--tp", tp) for tp in OUTCOMES]


def test_a_sweep_runs_the_command_with_each_combination_after_the_arguments():
    ran, told = [], []
    sweep(
        *(["-n", "12"], ["train.py", "--tp", "9"], EACH[1:3]),
        *(lambda commands: ran.extend(commands) or run_all(commands), told.append),
    )
    assert told == ["1 of 2: --tp 2 takes 2.00 s, fits", "2 of 2: --tp 4 takes 1.00 s, fits"]
    assert list(map(shlex.join, ran)) == [
        "foresee -n 12 --json train.py --tp 9 --tp 2",
        "foresee -n 12 --json train.py --tp 9 --tp 4",
    ]


@pytest.mark.parametrize(("options", "best"), [([], ["2", "4"]), (["--tokens", "9"], ["4", "2"])])
def test_the_best_is_first_and_failures_are_last(options, best):
    told = []
    found, num_left, ended_by = sweep(options, ["train.py"], EACH, run_all, told.append)
    assert (num_left, ended_by) == (0, None)
    assert told[0] == "1 of 5: --tp 1 takes 500.00 ms, does not fit"
    assert told[3] == "4 of 5: --tp 8 failed: rank 0 raised ValueError: 8 does not divide 12"
    assert [entry.arguments[1] for entry in found] == [*best, "1", "8", "16"]
    values = json.loads(as_json(found))
    assert values["ranked"][0]["arguments"] == ["--tp", best[0]]
    assert [entry["reason"] for entry in values["failed"]] == [
        "rank 0 raised ValueError: 8 does not divide 12",
        "killed by signal 9",
    ]


def test_what_fits_with_room_is_before_what_fits_narrowly():
    def entry(batch, seconds, narrowly):
        memory = {"fits": True, "fits_narrowly": narrowly}
        return Entry((batch,), {"step_seconds": seconds, "mfu": 1 / seconds, "memory": memory})

    entries = [entry("4", 1.0, True), entry("2", 2.0, False), entry("1", 3.0, False)]
    for is_same_work in (True, False):
        assert [each.name for each in ranked(entries, is_same_work)] == ["2", "1", "4"]


def test_a_script_that_refuses_its_arguments_is_quoted():
    said = "echelon: rank 0 exited with status 2"
    err = f"[0] usage: train.py [--tp TP]\n[0] train.py: error: argument --tp: invalid\n{said}"
    assert entry_of(("--tp", "x"), Ended(2, "", err)).reason == "train.py: error: argument --tp: invalid"
    silent = entry_of(("--tp", "x"), Ended(2, "", said))
    assert silent.reason == "rank 0 exited with status 2"


def test_the_table_has_a_line_for_each_combination():
    written = io.StringIO()
    show(sweep([], ["train.py"], EACH, run_all, no_word).entries, Console(file=written, width=200))
    assert written.getvalue().splitlines() == [
        "arguments       step    MFU     needs        of  fits",
        "--tp 2        2.00 s  40.0%   1.0 GiB  80.0 GiB   yes",
        "--tp 4        1.00 s  30.0%   1.0 GiB  80.0 GiB   yes",
        "--tp 1     500.00 ms  90.0%  90.0 GiB  80.0 GiB    NO",
        "failed   reason",
        "--tp 8   rank 0 raised ValueError: 8 does not divide 12",
        "--tp 16  killed by signal 9",
    ]


def test_a_size_that_does_not_fit_is_above_the_limit():
    written = io.StringIO()
    ended = Ended(1, json.dumps(figures(0.5, 0.9, (80 << 30) + 1, fits=False)), "")
    show(sweep([], ["train.py"], EACH[:1], ending_with([ended]), no_word).entries, Console(file=written, width=200))
    assert written.getvalue().splitlines()[1].split()[5:] == ["over", "80.0", "GiB", "80.0", "GiB", "NO"]


def test_a_size_that_fits_narrowly_says_so():
    written = io.StringIO()
    ended = Ended(0, json.dumps(figures(0.5, 0.9, 159 << 29)), "")
    (entry,) = sweep([], ["train.py"], EACH[:1], ending_with([ended]), no_word).entries
    show([entry], Console(file=written, width=200))
    assert written.getvalue().splitlines()[1].split()[-1] == "narrowly"
    assert entry.summary == "--tp 1 takes 500.00 ms, fits narrowly"


def test_the_table_has_bubbles_if_a_layout_has_a_pipeline():
    ended = [Ended(0, json.dumps(each), "") for each in PIPELINES]
    found = sweep([], ["train.py"], EACH[1:3], ending_with(ended), no_word)
    written = io.StringIO()
    show(found.entries, Console(file=written, width=200))
    assert [re.split("  +", line)[1:4] for line in written.getvalue().splitlines()] == [
        ["step", "MFU", "bubble"],
        ["2.00 s", "40.0%", "12.5%"],
        ["1.00 s", "30.0%", "-"],
    ]


PIPELINES = [figures(2.0, 0.4, bubble=0.125), figures(1.0, 0.3)]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_alone(is_terminal):
    written = io.StringIO()
    ended = list(run_processes([["--version"]] * 2, Console(file=written, force_terminal=is_terminal, width=80)))
    assert sorted((number, each.status) for number, each in ended) == [(0, 0), (1, 0)]
    assert ("foreseeing" in written.getvalue()) == is_terminal


def test_outcomes_are_told_as_they_come_and_ranked_by_their_combinations():
    told = []
    found = sweep([], ["train.py"], EACH, lambda commands: reversed_of(run_all(commands)), told.append)
    assert told[0] == "1 of 5: --tp 16 failed: killed by signal 9"
    assert [entry.arguments[1] for entry in found.entries] == ["2", "4", "1", "8", "16"]


def reversed_of(outcomes):
    yield from reversed(list(outcomes))


@pytest.mark.parametrize(("error", "ended_by"), [(KeyboardInterrupt, signal.SIGINT), (Terminated, signal.SIGTERM)])
@pytest.mark.parametrize("while_told", [True, False])
def test_a_sweep_that_is_ended_has_the_steps_so_far(error, ended_by, while_told):
    closed = []

    def running(commands):
        try:
            yield from [*run_all(commands)][:2]
            if not while_told:
                raise error
            yield 2, OUTCOMES["4"]
        finally:
            closed.append(True)

    def tell(line):
        if line.startswith("3"):
            raise error

    found = sweep([], ["train.py"], EACH, running, tell)
    assert closed
    assert [entry.arguments[1] for entry in found.entries] == ["2", *["4"] * while_told, "1"]
    assert (found.num_left, found.signal) == (3 - while_told, ended_by)


def test_a_signal_that_does_not_interrupt_a_wait_is_handled_soon():
    """One that came right before the wait was handled when the next combination ended."""

    def send():
        time.sleep(0.3)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # it interrupts this thread, and not the main one

    thread = threading.Thread(target=send)
    with ending_by_sigterm():
        thread.start()
        with pytest.raises(Terminated):
            next(sweep_module._as_completed([Future()]))
    thread.join()


LONG = """#!{python}
import os, signal, sys, time
if sys.argv[-1] == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    open("begun-" + sys.argv[-1], "x").close()
    time.sleep(300)
finally:
    os.remove("begun-" + sys.argv[-1])
"""


def test_processes_of_an_ended_sweep_remove_their_files(tmp_path, monkeypatch):
    """They were killed, and their temporary folders stayed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_module, "_PATIENCE", 2.0)
    program = tmp_path / "long"
    program.write_text(LONG.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    processes = sweep_module._Processes()
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(processes.run, [how]) for how in ("tidy", "deaf")]
        while len(list(tmp_path.glob("begun-*"))) < 2:
            time.sleep(0.01)
        processes.stop()
    assert [each.result().status for each in ended] == [-signal.SIGINT, -signal.SIGKILL]
    assert [each.name for each in tmp_path.glob("begun-*")] == ["begun-deaf"]


FAST_AND_SLOW = """
import sys, time, torch
if sys.argv[-1] == "slow":
    time.sleep(300)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("number", "status", "choices"),
    [
        (signal.SIGINT, 130, "{slow,fast}"),
        pytest.param(signal.SIGTERM, 143, "{slow,fast,slow}", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_sweep_with_its_table(number, status, choices, tmp_path):
    (tmp_path / "train.py").write_text(FAST_AND_SLOW)
    is_json = ["--json"] * (number == signal.SIGTERM)
    words = ["foresee", "-n", "1", *is_json, "--sweep", choices, "train.py"]
    count = choices.count(",") + 1
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-P", "-m", "echelon", *words], cwd=tmp_path, **pipes) as process:
        begun = process.stderr.readline()
        first = process.stderr.readline()
        process.send_signal(number)
        out, err = process.communicate()
    assert begun == f"echelon: foreseeing {count} combinations of arguments, {sweep_module.at_once(count)} at once\n"
    assert re.match(rf"echelon: 1 of {count}: fast takes .*, fits(; about \d+ (s|min) left)?\n", first)
    assert re.search(rf"echelon: ended by {number.name}: {count - 1} of {count} combinations? left out\n", err)
    assert process.returncode == status
    if is_json:
        assert [entry["arguments"] for entry in json.loads(out)["ranked"]] == [["fast"]]
    else:
        assert [line.split()[0] for line in out.splitlines()] == ["arguments", "fast"]


@pytest.mark.parametrize(
    ("seconds", "num_ended", "left"),
    [(10.0, 1, "; about 15 s left"), (10.0, 2, "; about 10 s left"), (600.0, 2, "; about 10 min left"), (9.0, 4, "")],
)
def test_the_time_left_follows_from_the_time_so_far(monkeypatch, seconds, num_ended, left):
    monkeypatch.setattr(sweep_module, "at_once", lambda _: 2)
    assert time_left(seconds, num_ended, 4) == left


def swept(monkeypatch, outcomes, *words):
    """Runs a sweep over `--tp` whose processes have these outcomes, and returns the status and the commands."""
    ran = []

    def run(commands, shown):
        ran.extend(commands)
        return run_all(commands) if outcomes is None else ending_with(outcomes)(commands)

    monkeypatch.setattr(sweep_module, "run_all", run)
    return command(["foresee", "-n", "4", "--tokens", "9", "--sweep", "--tp {2,4}", *words, "train.py"]), ran


def test_files_are_of_the_best_combination(monkeypatch, capsys):
    status, ran = swept(monkeypatch, None, "--json", "--html", "a.html", "--svg", "a.svg")
    captured = capsys.readouterr()
    assert status == 0
    assert shlex.join(ran[2]).endswith("--svg a.svg --html a.html --json train.py --tp 4")
    assert json.loads(captured.out)["files"] == ["a.svg", "a.html"]
    assert "echelon: wrote a.svg, a.html, of the best combination: --tp 4\n" in captured.err


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (2, "echelon: ended by SIGINT: did not write a.svg, a.html\n"),
        (1, "echelon: ended by SIGINT: 1 of 2 combinations left out, did not write a.svg, a.html\n"),
    ],
)
def test_a_sweep_that_is_ended_says_which_files_are_missing(number, said, monkeypatch, capsys):
    num_ran = 0

    def run(commands, shown):
        nonlocal num_ran
        for each in run_all(commands):
            if num_ran == number:
                raise KeyboardInterrupt
            num_ran += 1
            yield each

    monkeypatch.setattr(sweep_module, "run_all", run)
    words = ["foresee", "-n", "4", "--sweep", "--tp {2,4}", "--html", "a.html", "--svg", "a.svg", "train.py"]
    assert command(words) == 130
    captured = capsys.readouterr()
    assert captured.err.endswith(said)
    assert "--tp" in captured.out


def test_without_a_best_combination_no_file_is_written(monkeypatch, capsys):
    status, ran = swept(monkeypatch, [OUTCOMES["8"], OUTCOMES["16"]], "--html", "a.html")
    assert (status, len(ran)) == (1, 2)
    assert "echelon: did not write a.html: every combination failed\n" in capsys.readouterr().err


SCRIPT = """
import sys, torch
size = int(sys.argv[-1])
if size == 3: raise ValueError("3 is refused\\nfor no reason")
model = torch.nn.Linear(size, size).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(8, size, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_script_is_foreseen_in_processes_of_its_own(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    status = command(["foresee", "-n", "2", "--gpu", "a100", "--sweep", "--size {64,4096,3}", "--json", "train.py"])
    values = json.loads(capfd.readouterr().out)
    assert status == 0
    assert [entry["arguments"] for entry in values["ranked"]] == [["--size", "4096"], ["--size", "64"]]
    assert values["ranked"][0]["mfu"] > values["ranked"][1]["mfu"]
    (failed,) = values["failed"]
    assert failed["reason"].startswith("rank 0 raised ValueError: 3 is refused")
