"""Output of the commands: lines and tables for people, JSON for programs, files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from echelon.timeline.timeline import Time


def write(console: Console, text: Text | str = "", style: str = "") -> None:
    """Prints a line verbatim: rich neither wraps nor crops it."""
    # Text and not str: rich would read brackets as markup.
    console.print(text if isinstance(text, Text) else Text(text, style), no_wrap=True, overflow="ignore", crop=False)


def print_table(console: Console, rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> None:
    """Prints a table. The first row has the titles; columns are right-aligned unless their index is in `left`."""
    # rich's own table crops cells to the width of the terminal, and a script would miss them.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for index, cells in enumerate(rows):
        pairs = enumerate(zip(cells, widths, strict=True))
        line = "  ".join(cell.ljust(width) if n in left else cell.rjust(width) for n, (cell, width) in pairs)
        write(console, line.rstrip(), style="" if index else "bold")


def to_json(values: dict[str, Any]) -> str:
    """Returns JSON with one value a line, and one object a line in lists of objects."""
    # json's indent would spread a table of ranks over thousands of lines.
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {_inner_json(value)}" for key, value in values.items()) + "\n}"


def _inner_json(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
    return json.dumps(value)


def exact(value: Time) -> int | float:
    """Returns a number for JSON. Floats have 12 significant digits, since later ones are rounding noise."""
    return value if isinstance(value, int) else float(f"{float(value):.12g}")


def write_files(*wanted: tuple[str | None, Callable[[str], None]]) -> list[str]:
    """Writes the files whose path is not None, each by its function. Returns their paths.

    Raises:
        FileError: a file cannot be written.
        EchelonError: a picture is wanted, and matplotlib is not installed.
    """
    for path, write_to in wanted:
        if path is not None:
            write_to(path)
    return [path for path, _ in wanted if path is not None]
