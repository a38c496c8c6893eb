"""The code in docs/train.md runs and prints the text below it, and its diff is that of the examples."""

import contextlib
import io
import re

from tests.helpers.examples import EXAMPLES

TEXT = (EXAMPLES.parent / "docs" / "train.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)


def test_every_block_prints_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(TEXT)
    assert len(blocks) == TEXT.count("```python")
    variables: dict[str, object] = {}
    for code, expected in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "train.md", "exec"), variables)
        assert printed.getvalue().replace("\r\n", "\n") == expected


def test_the_diff_is_that_of_the_examples():
    (diff,) = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("digits.py", "digits_ddp.py"))
    for line in diff.splitlines():
        assert line[1:] in (after if line.startswith("+") else before), line
