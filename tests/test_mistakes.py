"""Typical mistakes in `tests/mistakes.txt`, each with the one line that answers it.

A mistake is a command line, as "$ echelon run s.py -n 2", or a program. A program runs on two simulated ranks with the
names of `names`. The answer is the first line of its exception with its notes of advice, its warning, or the line that
the command prints.
An answer after "->" says what to do. "!>" marks the few that do not, because they are Python's or torch's own.
"""

import copy
import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon
from echelon.cli import main
from echelon.pipeline import Costs, Pipeline, Schedule, schedules, split

BLOCKS = (Path(__file__).parent / "mistakes.txt").read_text().strip().split("\n\n")
MISTAKES = [re.fullmatch(r"(.+)\n([-!]>) (.+)", block, re.DOTALL).groups() for block in BLOCKS]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.second(self.first(x))


def names():
    return {
        **{"torch": torch, "nn": nn, "echelon": echelon, "copy": copy, "Pipeline": Pipeline, "Schedule": Schedule},
        **{"Costs": Costs, "schedules": schedules, "split": split, "main": lambda: 0},
        **{"ones": torch.ones(2), "batch": torch.ones(8, 2), "Net": Net, "loss_fn": nn.functional.mse_loss},
        **{"model": nn.Linear(2, 2), "layers": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))},
    }


def answer_of_command(code, capfd):
    # A path of Windows keeps its backslashes.
    assert main(shlex.split(code.removeprefix("$ echelon "), posix="\\" not in code)) in (1, 2)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, "one line"
    return captured.err


def answer_of_program(code):
    # Compiled here: errors then name this line of the program, and not the file of the tests.
    program = compile(code, "train.py", "exec")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            echelon.simulate(lambda group: exec(program, {**names(), "group": group}), 2, timeout=5.0)
        except Exception as error:
            first = f"{type(error).__name__}: {error}".partition("\n")[0]
            notes = () if isinstance(error, echelon.EchelonError) else error.__notes__
            advice = [note for note in notes if not note.startswith(("raised on rank", "on rank"))]
            return "; ".join([first, *advice])
    warning = caught[0]  # each rank may have its own
    return f"warning: {warning.message}"


@pytest.mark.parametrize(("code", "mark", "answer"), MISTAKES, ids=[code.splitlines()[0] for code, _, _ in MISTAKES])
def test_the_answer(code, mark, answer, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "train.py").write_text("import echelon\ngroup = echelon.init()\n")
    got = answer_of_command(code, capfd) if code.startswith("$") else answer_of_program(code)
    assert got.strip().replace(str(tmp_path), "{here}") == answer


def test_nearly_all_say_what_to_do():
    assert len(MISTAKES) >= 80
    assert len({code for code, _, _ in MISTAKES}) == len(MISTAKES)
    assert sum(mark == "!>" for _, mark, _ in MISTAKES) <= 5
