"""The code in docs/checkpoints.md runs and prints the text below it."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)


def test_every_block_prints_what_it_says(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python") == 3
    variables: dict[str, object] = {}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.chdir(tmp_path), contextlib.redirect_stdout(printed):
            exec(compile(code, PAGE.name, "exec"), variables)
        assert printed.getvalue() == expected
