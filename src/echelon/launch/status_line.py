"""Status line of a terminal: the progress bar of a rank, below the lines of all ranks.

Programs draw a bar as a line without an end, which each update overwrites after a carriage return. tqdm does so, and
`echelon.logging.progress` under `echelon run`, whose ranks write into pipes.
"""

from __future__ import annotations

import io
import os
from typing import Any, BinaryIO, TextIO, cast

VARIABLE = "ECHELON_TERMINAL"
"""Variable with the columns that the terminal of `echelon run` has for a bar. Not set without a terminal."""

_ERASE = b"\x1b[2K"
_WITHOUT_WRAP, _WITH_WRAP = b"\x1b[?7l", b"\x1b[?7h\x1b[0m"


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook, or a process that one of its cells has started."""
    # Jupyter sets the first. VS Code starts kernels without it, and ipykernel sets the second in all of them.
    return "JPY_PARENT_PID" in os.environ or "backend_inline" in os.environ.get("MPLBACKEND", "")


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal. The output of a cell is none: it would keep all that a terminal overwrites."""
    # IPython runs `!command` under a pseudo-terminal.
    return stream.isatty() and not in_notebook()


def columns_asked_for() -> int:
    """Returns COLUMNS. 0 if it is not set, or no number above 0."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() else 0


def columns_of_text() -> int:
    """Returns the width of reports and lines of text: COLUMNS if it is set, at least 40. 80 otherwise."""
    return max(40, columns_asked_for()) if columns_asked_for() else 80


def bar(text: str) -> str:
    """Returns the text as a bar that overwrites the one before. Empty: removes the bar."""
    # The second carriage return keeps a line that the program writes next apart from the bar.
    return f"\r{_ERASE.decode()}{text}\r" if text else f"\r{_ERASE.decode()}"


def visible(line: bytes) -> bytes:
    """Returns the text that a terminal shows of a line with carriage returns, without cursor movement."""
    before, _, last = line.rpartition(b"\r")
    # A line that ends in a carriage return is still there.
    return (last or before.rpartition(b"\r")[2]).rpartition(_ERASE)[2]


def unfinished(line: bytes) -> bytes:
    """Returns the end of an unfinished line from which `visible` returns the same."""
    before, found, last = line.rpartition(b"\r")
    return b"\r" + last if last else b"\r" + before.rpartition(b"\r")[2] + found


class StatusLine:
    """The bar at the bottom of a terminal: that of the lowest rank that has one."""

    def __init__(self, terminal: BinaryIO) -> None:
        self._terminal = terminal
        self._bars: dict[int, bytes] = {}

    def show(self, rank: int, text: bytes) -> None:
        """Shows the bar of a rank in place of its last one. Empty: removes it."""
        before = self._shown
        self._bars[rank] = text
        if self._shown != before:
            self._terminal.write(b"\r" + _ERASE)
            self._draw()

    def above(self, target: BinaryIO) -> BinaryIO:
        """Returns a stream of whole lines to the same terminal, which appear above the bar."""
        return cast("BinaryIO", _Above(self, target))

    def write_above(self, target: BinaryIO, data: bytes) -> None:
        """Writes whole lines above the bar."""
        if self._shown:
            self._terminal.write(b"\r" + _ERASE)
            self._terminal.flush()
        target.write(data)
        if self._shown:
            target.flush()
            self._draw()

    @property
    def _shown(self) -> bytes:
        return next((text for _, text in sorted(self._bars.items()) if text), b"")

    def _draw(self) -> None:
        if self._shown:
            # A bar wider than the terminal is cut: a second line could not be erased.
            self._terminal.write(_WITHOUT_WRAP + self._shown + _WITH_WRAP)
        self._terminal.flush()


class _Above(io.BufferedIOBase):
    def __init__(self, status: StatusLine, target: BinaryIO) -> None:
        self._status = status
        self._target = target

    def write(self, data: Any, /) -> int:
        self._status.write_above(self._target, bytes(data))
        return len(data)

    def flush(self) -> None:
        self._target.flush()
