"""docs/bench.md: the commands exist, and those in virtual time print what stands there."""

import re
from pathlib import Path

import pytest

from echelon.bench.measure import measure_case
from echelon.bench.request import Case
from echelon.cli import main

TEXT = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = re.findall(r"^\$ echelon (.*)$", TEXT, re.MULTILINE)


@pytest.mark.slow
def test_what_is_simulated_prints_what_it_says(capsys):
    (block,) = (block for block in BLOCKS if "simulated" in block)
    command, _, expected = block.removeprefix("$ echelon ").partition("\n")
    assert main(command.split()) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command, capsys, monkeypatch):
    started = []
    monkeypatch.setattr("echelon.bench.measure.spawn", lambda *arguments: started.append(arguments) or [0])
    monkeypatch.setattr("echelon.bench.mpi.measure_under_mpi", lambda *arguments: started.append(arguments) or 0)
    monkeypatch.setattr("echelon.bench.measure.simulate", lambda *_, **__: started.append(_) or Simulated())
    monkeypatch.setattr("echelon.bench.tune.spawn", lambda *arguments: started.append(arguments))
    assert main(command.split()) == 0, capsys.readouterr().err
    assert len(started) == 1


class Simulated:
    results = (0,)


def test_the_defaults_are_those_of_the_code():
    assert "the median of 5 turns" in TEXT
    assert "as take 50 ms" in TEXT
    assert measure_case.__defaults__ == (None, 0.05)
    assert Case.of("all_gather", 4, 64).num_elements == 4
