"""A script of one process becomes data parallel by four lines, and learns as much."""

import ast
import difflib
import re

import pytest

import echelon
from tests.helpers.examples import EXAMPLES, run_example, run_example_as_rank


def code(name):
    """Returns the lines of a script without its docstring and blank lines."""
    text = (EXAMPLES / name).read_text()
    docstring = ast.parse(text).body[0].end_lineno
    return [line for line in text.splitlines()[docstring:] if line]


def test_four_lines_are_changed():
    lines = list(difflib.ndiff(code("digits.py"), code("digits_ddp.py")))
    added, removed = ([line for line in lines if line.startswith(mark)] for mark in "+-")
    assert len(removed) <= len(added) <= 4, lines


def accuracy_of(text):
    return float(re.fullmatch(r"accuracy (0\.\d+)\n", text)[1])


@pytest.mark.slow
def test_both_learn(capsys, pool, tmp_path):
    run_example("digits.py")
    assert accuracy_of(capsys.readouterr().out) > 0.9
    first, second = pool.run(run_example_as_rank, 2, "digits_ddp.py", tmp_path)
    assert first == second, "all ranks have the same model"
    assert accuracy_of(first) > 0.85


def test_on_simulated_ranks_too(capsys):
    echelon.simulate(lambda _: run_example("digits_ddp.py"), 3)
    lines = capsys.readouterr().out.splitlines(keepends=True)
    assert len(lines) == 3
    assert len(set(lines)) == 1
