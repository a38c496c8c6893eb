"""The code in docs/interop.md runs, and every rank prints what stands below it."""

import contextlib
import io
import re
from pathlib import Path

from tests.helpers.torch_groups import launched

PAGE = Path(__file__).parents[2] / "docs" / "interop.md"
BLOCK = re.compile(r"```python\n(.*?)```.*?```text\n(.*?)```\n", re.DOTALL)


def printed_by(group, code):
    with launched(group):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, PAGE.name, "exec"), {})
        return printed.getvalue()


def test_the_block_prints_what_it_says(pool):
    text = PAGE.read_text(encoding="utf-8")
    ((code, expected),) = BLOCK.findall(text)
    assert text.count("```python") == 1
    assert pool.run(printed_by, 2, code) == [expected] * 2
