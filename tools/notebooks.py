"""Makes notebooks of three tutorials, with their outputs: python tools/notebooks.py

A block of Python becomes a cell, a file a cell with %%writefile, a command a cell that begins with an exclamation mark.
Each has the output that the page shows. Tests run the page, so it is the output of a run. A notebook with files begins
with a cell that makes a folder for them.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # `python tools/notebooks.py` has the folder of the script alone

from tests.helpers.pages import blocks_of  # noqa: E402

NAMES = ("choose_a_schedule", "debug_torch_distributed", "write_a_schedule")
_OWN_FOLDER = """\
# The files of this notebook go into a new folder, where they overwrite none of yours.
import os
import tempfile

os.chdir(tempfile.mkdtemp())
"""
_NOTE = re.compile(r"^This page is also a notebook: .*\n\n", re.MULTILINE)


def notebook(page: str) -> dict[str, Any]:
    """Returns the notebook of a page in the format of Jupyter, version 4.5."""
    page = _NOTE.sub("", page)
    cells, end = [], 0
    has_files = any(block.kind not in ("python", "console") for block in blocks_of(page))
    for block in blocks_of(page):
        cells += _prose(page[end : block.start], len(cells))
        end = block.end
        cells.append(_code(block.kind, block.code, block.expected, len(cells)))
    cells += _prose(page[end:], len(cells))
    if has_files:
        cells.insert(1, _code("python", _OWN_FOLDER, "", len(cells)))  # below the title
    for count, cell in enumerate((cell for cell in cells if cell["cell_type"] == "code"), 1):
        cell["execution_count"] = count
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _prose(text: str, number: int) -> list[dict[str, Any]]:
    text = text.strip()
    if not text:
        return []
    return [{"cell_type": "markdown", "id": _name(text, number), "metadata": {}, "source": _lines(text)}]


def _code(kind: str, code: str, output: str, number: int) -> dict[str, Any]:
    if kind == "console":
        code = f"!{code}"
    elif kind != "python":
        code, output = f"%%writefile {kind}\n{code}", f"Writing {kind}\n"
    code = code.rstrip()
    outputs = [{"name": "stdout", "output_type": "stream", "text": _lines(output)}] if output else []
    cell = {"cell_type": "code", "execution_count": 0, "id": _name(code, number), "metadata": {}, "outputs": outputs}
    return cell | {"source": _lines(code)}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _name(text: str, number: int) -> str:
    # Jupyter wants a name of each cell that stays the same: a random one would change at each making.
    return hashlib.sha256(f"{number} {text}".encode()).hexdigest()[:8]


def main() -> None:
    """Writes the notebooks beside their pages."""
    for name in NAMES:
        path = ROOT / "docs" / "tutorials" / f"{name}.md"
        made = notebook(path.read_text(encoding="utf-8"))
        path.with_suffix(".ipynb").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
