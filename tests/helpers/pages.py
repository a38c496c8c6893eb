"""Pages of the docs as programs: their blocks run in order, in a folder of their own, and print what the page shows.

A block of ```python runs in this process, with the variables of the blocks before. A block of ```py with a `title` is a
file of that name. A block of ```console is a command and what it prints. The block of ```text that follows a block is
its output.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"^```(python|py title=\"[^\"]+\"|console)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)
LONG_WORK = re.compile(r"^echelon: (?:.* so far|foreseeing .* at once|\d+ of \d+: .*)\n", re.M)
"""Lines on long work, which come by the clock: a slow machine prints others, in another order."""
FORECAST_OF = "2.13"
"""Version of torch whose operators the forecast on a page was recorded with: others fuse and allocate otherwise."""


class Block(NamedTuple):
    """Block of code on a page, with the output that the page shows."""

    kind: str
    """"python", "console", or the name of a file."""
    code: str
    expected: str
    start: int
    """Place in the text of the page."""
    end: int


def blocks_of(text: str) -> Iterator[Block]:
    """Yields the blocks of a page that run."""
    for match in _BLOCK.finditer(text):
        language, code, expected = match[1], match[2], match[3] or ""
        kind = language.partition('"')[2].rstrip('"') or language
        if kind == "console":
            code, _, expected = code.removeprefix("$ ").partition("\n")
        yield Block(kind, code, expected, match.start(), match.end())


def outputs(text: str, folder: Path, name: str = "page") -> Iterator[tuple[Block, str]]:
    """Runs the blocks of a page in a folder and yields each with what it prints."""
    variables: dict[str, object] = {"__name__": name}
    with _imports_from(folder):
        yield from _outputs(text, folder, name, variables)


@contextlib.contextmanager
def _imports_from(folder: Path) -> Iterator[None]:
    """As in a notebook, blocks import the files of their own folder."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for module in set(sys.modules) - before:
            if str(getattr(sys.modules[module], "__file__", "")).startswith(str(folder)):
                del sys.modules[module]


def _outputs(text: str, folder: Path, name: str, variables: dict[str, object]) -> Iterator[tuple[Block, str]]:
    for block in blocks_of(text):
        if block.kind == "python":
            with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(block.code, f"{name}.py", "exec"), variables)
            yield block, printed.getvalue()
        elif block.kind == "console":
            yield block, _printed_by(block.code, folder)
        else:
            (folder / block.kind).write_text(block.code, encoding="utf-8")
            yield block, ""


def _printed_by(command: str, folder: Path) -> str:
    words = shlex.split(command)
    # The interpreter of the tests, wherever its scripts are; torchrun is a module too.
    module = {"echelon": ["-m", "echelon"], "torchrun": ["-m", "torch.distributed.run"], "python": []}[words[0]]
    # The report of a forecast as it is without the variable; pictures are wider.
    columns = "80" if words[:2] == ["echelon", "foresee"] else "100"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": columns}
    command_line = [sys.executable, *module, *words[1:]]
    done = subprocess.run(
        command_line, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    # Of launchers the ranks' output alone: what they say of themselves is no part of the program.
    is_launcher = words[0] == "torchrun" or words[:2] == ["echelon", "run"]
    return done.stdout if is_launcher and done.returncode == 0 else done.stdout + LONG_WORK.sub("", done.stderr)


def with_outputs(text: str, folder: Path, name: str) -> str:
    """Returns a page with the outputs that its blocks have now."""
    parts, end = [], 0
    for block, printed in outputs(text, folder, name):
        shown = text[block.start : block.end]
        if block.kind == "python":
            shown = f"```python\n{block.code}```\n" + (f"\n```text\n{printed}```\n" if printed else "")
        elif block.kind == "console":
            shown = f"```console\n$ {block.code}\n{printed}```\n"
        parts += [text[end : block.start], shown]
        end = block.end
    return "".join([*parts, text[end:]])


def main(names: list[str]) -> None:
    os.environ["ECHELON_TUNED"] = "off"
    warnings.simplefilter("ignore")
    for path in map(Path, names):
        with tempfile.TemporaryDirectory() as folder:
            path.write_text(with_outputs(path.read_text(encoding="utf-8"), Path(folder), path.stem), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
