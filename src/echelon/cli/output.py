"""Output of the commands: lines and tables for people, JSON for programs, files."""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, BinaryIO, TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from echelon.launch.status_line import columns_asked_for, in_notebook
from echelon.long_work import lines_of_time
from echelon.timeline.timeline import Time


def rich_console(stderr: bool = False) -> Console:
    """Returns rich's console of standard output or error. A notebook's cell gets plain text."""
    # The stream of now: a program that runs meanwhile may have others, one for each rank.
    stream = sys.stderr if stderr else sys.stdout
    # With COLUMNS=0, which stands for an unknown width, rich would print nothing.
    width = shutil.get_terminal_size().columns if os.environ.get("COLUMNS") and not columns_asked_for() else None
    # A kernel sets FORCE_COLOR, by which rich takes even a pipe for a terminal.
    return Console(file=stream, highlight=False, force_terminal=False if in_notebook() else None, width=width)


def write(console: Console, text: Text | str = "", style: str = "") -> None:
    """Prints a line verbatim: rich neither wraps nor crops it."""
    # Text and not str: rich would read brackets as markup.
    console.print(text if isinstance(text, Text) else Text(text, style), no_wrap=True, overflow="ignore", crop=False)


def has_width(console: Console) -> bool:
    """Whether lines of text keep to the width of the console: on a terminal, and where COLUMNS is set."""
    return console.is_terminal or columns_asked_for() > 0


def print_table(console: Console, rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> None:
    """Prints a table. The first row has the titles; columns are right-aligned unless their index is in `left`.

    On a terminal, and where COLUMNS is set, a table that is too wide is wrapped in its last column, if that is
    left-aligned. Otherwise its columns move together. A file or a pipe gets a line for each row.
    """
    # rich's own table crops cells to the width of the terminal, and a script would miss them.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    is_wide = has_width(console) and sum(widths) + 2 * last > console.width
    gap = " " if is_wide and last not in left else "  "
    room = console.width - sum(widths[:-1]) - len(gap) * last
    wraps = is_wide and last in left and room >= 10
    for index, cells in enumerate(rows):
        parts = textwrap.wrap(cells[-1], room) if wraps and cells[-1] else [cells[-1]]
        before = [c.ljust(w) if n in left else c.rjust(w) for n, (c, w) in enumerate(zip(cells, widths, strict=True))]
        for part in parts:
            text = part if last in left else part.rjust(widths[-1])
            write(console, gap.join([*before[:-1], text]).rstrip(), style="" if index else "bold")
            before = [" " * width for width in widths]


@contextmanager
def working(
    what: str, console: Console | None = None, per_second: float = 10.0, plain_after: float | None = 10.0
) -> Iterator[None]:
    """Shows, inside the with block, that work is under way and for how long.

    Strategy. A terminal gets a line that is drawn again and again. A file or a pipe gets a line after some seconds, and
    each next one after twice as long.

    Args:
        what: the work, such as "searching schedules".
        console: rich's console. None: standard error.
        per_second: how often the line is drawn. Each time takes about a millisecond of a core.
        plain_after: seconds until the first line for a file or a pipe. None: it gets none.
    """
    shown = rich_console(stderr=True) if console is None else console
    if not shown.is_terminal:
        lines = nullcontext() if plain_after is None else lines_of_time(what, partial(write, shown), plain_after)
        with lines:
            yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(
        *columns,
        console=shown,
        transient=True,
        refresh_per_second=per_second,
        redirect_stdout=False,  # a program that runs meanwhile finds its own streams
        redirect_stderr=False,
    ) as progress:
        progress.add_task(what, total=None)
        yield


class _Onward(io.BufferedIOBase):
    """Stream in front of another one."""

    def __init__(self, target: BinaryIO) -> None:
        self._target = target

    def flush(self) -> None:
        """Writes buffered data."""
        self._target.flush()

    def fileno(self) -> int:
        return self._target.fileno()


class Counted(_Onward):
    """Stream that counts its bytes."""

    num_bytes = 0

    def write(self, data: Any, /) -> int:
        """Writes the data."""
        self.num_bytes += len(data)
        return self._target.write(data)


class WarnedOnce(_Onward):
    """Stream of marked lines. Leaves out a warning of Python that another rank has written already."""

    def __init__(self, target: BinaryIO) -> None:
        super().__init__(target)
        self._mark_of: dict[bytes, bytes] = {}
        """Rank that has written a warning, by its text."""
        self._left_out: bytes | None = None
        """Rank whose warning was left out, if its line of source may follow."""

    def write(self, data: Any, /) -> int:
        """Writes all lines but warnings that another rank wrote first, each with its line of source."""
        for line in bytes(data).splitlines(keepends=True):
            found = _MARK.match(line)
            mark, text = (found[0], line[found.end() :]) if found else (b"", line)
            if b"Warning: " in text:
                is_known = self._mark_of.setdefault(text, mark) != mark
            else:
                is_known = self._left_out == mark and text.startswith(b"  ")
            self._left_out = mark if is_known else None
            if not is_known:
                self._target.write(line)
        return len(data)


_MARK = re.compile(rb"(\x1b\[\d+m)?\[\d+\] (\x1b\[0m)?")


class AboveProgress(_Onward):
    """Stream of whole lines that are written while `working` shows its line: they appear above it."""

    def __init__(self, target: BinaryIO, terminal: BinaryIO) -> None:
        """Writes to `target`. `terminal` shows the line of `working`."""
        super().__init__(target)
        self._terminal = terminal

    def write(self, data: Any, /) -> int:
        """Removes the line of `working`, which draws it again below, and writes the data."""
        self._terminal.write(b"\r\x1b[2K")
        self._terminal.flush()
        return self._target.write(data)


@contextmanager
def only_json(as_json: bool) -> Iterator[TextIO]:
    """Yields standard output. If JSON is to be printed, all but this stream goes to standard error from now on.

    This holds for C code, child processes and threads of a program, too, which know the file descriptor alone and may
    print until the process ends. So it is not undone here: `main` does so if its process goes on.
    """
    if not as_json:
        yield sys.stdout
        return
    sys.stdout.flush()
    with ExitStack() as stack:
        stdout, before = sys.stdout, sys.__stdout__
        if before is not None and stdout is before:  # else a caller in this process has another one, such as a test
            kept = os.dup(_STDOUT)
            stdout = stack.enter_context(open(kept, "w", encoding=before.encoding, errors=before.errors))
        os.dup2(_STDERR, _STDOUT)
        yield stdout
        # Text in the buffers of Python and of C belongs to the program. It may have closed its stream.
        if not sys.stdout.closed:
            sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)


_STDOUT, _STDERR = 1, 2
"""File descriptors."""


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
