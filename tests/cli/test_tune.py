"""`echelon tune`: what it prints, what it writes, and that groups read it."""

import json
import os
import sys
from pathlib import Path

import pytest

import echelon
import echelon.bench.tune
from echelon.cli import main
from echelon.collectives.plans.tuning import from_text
from tests.helpers.commands import above_progress, refusal, spawned_by

SIMULATED = ["--backend", "simulated", "--max", "4K"]


def test_it_says_what_it_found_and_where_it_is(capsys, tmp_path):
    assert main(["tune", "-n", "4", "--hosts", "2x2", "--output", "new/tuned.json", *SIMULATED]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("inside a host: ")
    assert "all_reduce, 4 ranks or more, several hosts: hierarchical_doubling" in lines
    assert "all_reduce, 2 ranks or more, one host: recursive_doubling" in lines
    last = (
        "wrote new/tuned.json: new jobs whose rank 0 is on this host use it where ECHELON_TUNED=new/tuned.json is set"
    )
    assert lines[-1] == last
    assert from_text((tmp_path / "new" / "tuned.json").read_text(), "it")["barrier"][0].algorithm == "hierarchical"
    assert os.listdir("new") == ["tuned.json"]


def test_json_is_what_is_written_and_a_terminal_shows_progress(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["tune", "-n", "3", "--json", "--output", "t.json", *SIMULATED]) == 0
    text, progress = capsys.readouterr()
    assert "measuring algorithms" in progress
    assert above_progress(progress)[0].startswith("between hosts: ")
    assert text == (tmp_path / "t.json").read_text()
    measured = json.loads(text)["measured"]
    assert measured["ranks"] == 3
    assert measured["links"]["between hosts"]["bandwidth"] == pytest.approx(1.17e9, rel=1e-3)


def test_processes_tune_and_new_ones_go_by_it(pool, capsys, monkeypatch, tmp_path):
    """The whole way: written where jobs look, read by the next job."""
    monkeypatch.setattr(echelon.bench.tune, "spawn", spawned_by(pool, XDG_CONFIG_HOME=str(tmp_path), ECHELON_TUNED=""))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("ECHELON_TUNED")
    assert main(["tune", "-n", "2", "--max", "8", "--turns", "1"]) == 0
    path = tmp_path / "echelon" / "tuned.json"
    assert f"wrote {path}: new jobs whose rank 0 is on this host use it\n" in capsys.readouterr().out
    assert json.loads(path.read_text())["measured"]["backend"] == "tcp"
    assert echelon.init().table == from_text(path.read_text(), "it")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-n 1", "-n "),
        ("-n 1000000", "-n "),
        ("--backend shm", "--backend shm: algorithms are for messages; give tcp or simulated"),
        (
            "--backend simulated",
            "--backend simulated is not this system: name a file of its own, as --output tuned.json",
        ),
        ("--hosts 1x2", "--hosts 1x2: only simulated ranks have that; add --backend simulated"),
        ("--turns 0", "--turns "),
        ("--max 4", "--min 8 --max 4: give bytes from 1 on, the smallest first"),
        ("--output .", "cannot write .: give a file in a folder that can be written to, with --output"),
    ],
)
def test_a_wrong_command_line_is_an_error_of_one_line(capsys, arguments, message):
    assert refusal(capsys, "tune", *arguments.split()).startswith(message)
    assert not list(Path().iterdir())


def test_what_overrules_the_measurement_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("ECHELON_BARRIER", "dissemination")
    assert main(["tune", "--output", "t.json"]) == 2
    assert "ECHELON_BARRIER is set and would override the measured algorithms: unset it" in capsys.readouterr().err
