"""The code in docs/foresee.md runs and prints the text below it."""

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "foresee.md"


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of torch, for a model under tensor parallelism
def test_the_block_prints_what_it_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    [(code, expected)] = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```\n", PAGE.read_text(), re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, PAGE.name, "exec"), {})
    assert printed.getvalue() == expected
