"""docs/hangs_from_the_field.md: its programs print what it shows, and its table says what the simulation says."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

from tests.helpers.field_bugs import BUGS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hangs_from_the_field.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)


# One of the programs has a __del__ that fails. It is collected after each test, since it would warn in another one.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("collected"),
]


def test_every_program_prints_what_the_page_shows():
    blocks = BLOCK.findall(PAGE)
    assert len(blocks) == 3
    names = {}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "program.py", "exec"), names)
        assert printed.getvalue() == expected


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of a name that torch replaced in 2.13
def test_the_table_says_what_the_simulation_says(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("field_run", ROOT / "benchmarks" / "field" / "run.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| .*? \| (.*) \|$", PAGE, re.MULTILINE))
    assert list(rows) == list(BUGS)
    for name, said in rows.items():
        found, _ = script.simulated(BUGS[name])
        assert script.in_short(found) == said
    assert all(bug.what in PAGE and bug.thread in PAGE for bug in BUGS.values())
