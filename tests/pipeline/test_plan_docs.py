"""The commands and the code in docs/plan.md do what stands there, and its pictures are up to date."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from echelon.cli import main
from echelon.pipeline import Costs, schedules
from echelon.timeline.timeline import Timeline
from tests.helpers import pages

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
COMMANDS = re.compile(r"```console\n(.*?)```", re.DOTALL)
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.fixture(autouse=True)
def plain(monkeypatch, tmp_path):
    for name in ("FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.chdir(tmp_path)


def outputs(block: str, capsys) -> str:
    """Runs the commands of a block and returns it as it should be."""
    written = []
    for line in block.splitlines():
        if line.startswith("$ echelon "):
            main(line.split()[2:])
            output = capsys.readouterr()
            written += [line, *(output.out + output.err).splitlines()]
    return "".join(f"{line}\n" for line in written)


def test_commands_print_what_stands_below_them(capsys):
    blocks = COMMANDS.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) >= 6
    for block in blocks:
        assert block == outputs(block, capsys)


def test_the_code_runs(tmp_path):
    for code in CODE.findall(PAGE.read_text(encoding="utf-8")):
        exec(compile(code, str(PAGE), "exec"), {})
    assert {path.name for path in tmp_path.iterdir()} == {"planned.svg", "planned.html", "planned.json"}


def test_every_picture_is_there():
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGE.parent.rglob("*.md")}
    names = {name: re.findall(r"\((?:\.\./)?images/(.*?)\)", text) for name, text in pages.items()}
    assert len(names[PAGE.name]) == 6
    assert {path.name for path in (PAGE.parent / "images").iterdir()} == {
        each for found in names.values() for each in found
    }


@pytest.mark.parametrize(
    ("file", "name", "num_microbatches", "against"),
    [
        ("1f1b.svg", "1f1b", 8, None),
        ("zb-h1-and-1f1b.svg", "zb-h1", 8, "1f1b"),
        ("dualpipe-v.svg", "dualpipe-v", 10, None),
        ("zb-v-dark.svg", "zb-v", 8, None),
    ],
)
def test_pictures_are_up_to_date(file, name, num_microbatches, against, tmp_path):
    """Other versions of matplotlib may place things otherwise, so only the text is compared."""

    def simulated(name: str) -> Timeline:
        return schedules.build(name, 4, num_microbatches).simulate(Costs(transfer=0.1))

    simulated(name).draw(tmp_path / file, None if against is None else simulated(against))
    assert texts(PAGE.parent / "images" / file) == texts(tmp_path / file)


def test_the_picture_of_the_tutorial_is_up_to_date(tmp_path):
    page = (PAGE.parent / "tutorials" / "write_a_schedule.md").read_text(encoding="utf-8")
    for _ in pages.outputs(page.partition("../images/")[0], tmp_path):
        pass
    assert texts(PAGE.parent / "images" / "waves-split.svg") == texts(tmp_path / "waves-split.svg")


def texts(path: Path) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
