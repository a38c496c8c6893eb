"""The program of docs/simulate_torch.md prints what the page shows."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "simulate_torch.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about a view that FSDP2 returns
def test_the_program_prints_what_the_page_shows(capsys):
    ((code, expected),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```\n", PAGE, re.DOTALL)
    exec(compile(code, "program.py", "exec"), {})
    assert capsys.readouterr().out == expected
