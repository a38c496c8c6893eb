"""Examples at the end of each command's help."""

import shlex

import pytest
import typer
from typer.core import TyperGroup

from echelon.cli.app import EXAMPLES, app, collectives
from tests.helpers.commands import printed

LINES = [(name, line) for name, lines in EXAMPLES.items() for line in lines]


def command_of(name):
    if name == "plan all-reduce":
        return typer.main.get_command(collectives)
    found = typer.main.get_command(app)
    for word in name.split():
        found = found.commands[word]
    return found


def test_every_command_has_examples():
    groups = typer.main.get_command(app).commands
    names = {name for name, one in groups.items() if not isinstance(one, TyperGroup)}
    names |= {f"checkpoint {name}" for name in groups["checkpoint"].commands} | {"plan all-reduce"}
    assert set(EXAMPLES) == names


@pytest.mark.parametrize(("name", "line"), LINES, ids=[line for _, line in LINES])
def test_an_example_can_be_parsed(name, line):
    words = shlex.split(line)
    words = words[words.index("echelon") + 1 :]
    place = len(name.removesuffix(" all-reduce").split())
    assert words[:place] == name.removesuffix(" all-reduce").split()
    one = command_of(name)
    given = one.make_context(name, words[place:]).params
    # Words after a script are its own, so a wrong option would not be noticed there.
    assert not any(word in each.opts for each in one.params for word in given.get("args") or ())


@pytest.mark.parametrize("name", ["foresee", "plan all-reduce", "checkpoint verify"])
def test_help_ends_with_the_examples_a_line_each(capsys, name):
    lines = printed(capsys, *name.split(), "--help").splitlines()
    examples = [f"  {line}" for line in EXAMPLES[name]]
    assert [line.removeprefix("  ") for line in lines[-len(examples) - 1 :]] == ["Examples:", *examples]


def test_examples_fit_80_columns():
    assert [line for _, line in LINES if len(line) > 76] == []
