"""The code in the documents about pipelines and schedules runs and prints what stands below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from echelon.pipeline.schedules import names

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "schedules.md"
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


@pytest.mark.parametrize(
    ("page", "least"), [("pipeline.md", 2), ("train_pipeline.md", 3), ("schedules.md", 5), ("search.md", 3)]
)
def test_every_block_prints_what_it_says(page, least):
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert len(blocks) >= least
    variables: dict[str, object] = {}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), variables)
        assert printed.getvalue() == expected


def test_the_example_of_an_own_schedule_is_20_lines():
    text = (DOCS / "tutorials" / "write_a_schedule.md").read_text(encoding="utf-8")
    (code,) = [code for code, _ in BLOCK.findall(text) if "def waves" in code]
    body = code[code.index("def waves") : code.index("schedule = waves")]
    assert len(body.strip().splitlines()) <= 20


@pytest.mark.parametrize("name", names())
def test_every_schedule_is_in_the_table(name):
    assert f"| `{name}` |" in PAGE.read_text(encoding="utf-8")
