"""The code in docs/schedules.md runs and prints what stands below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def test_every_block_prints_what_it_says():
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) >= 6
    names: dict[str, object] = {}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(PAGE), "exec"), names)
        assert printed.getvalue() == expected


def test_the_example_of_an_own_schedule_is_20_lines():
    (code,) = [code for code, _ in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if "def waves" in code]
    body = code[code.index("def waves") : code.index("schedule = waves")]
    assert len(body.strip().splitlines()) <= 20


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "dualpipe-v"])
def test_every_schedule_is_in_the_table(name):
    assert f"| `{name}` |" in PAGE.read_text(encoding="utf-8")
