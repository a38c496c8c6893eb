"""Output of the ranks and their launcher, and the cause of a rank's end in its last lines."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from typing import BinaryIO

from echelon.errors import one_line
from echelon.launch import whereabouts
from echelon.launch.status_line import StatusLine, unfinished, visible


@dataclass(frozen=True)
class Console:
    """Output of the launcher: the ranks' lines and its own messages."""

    stdout: BinaryIO
    stderr: BinaryIO
    color_stdout: bool = False
    color_stderr: bool = False
    status: StatusLine | None = None
    """Shows progress bars of the ranks on stderr. None if that is no terminal."""
    columns: int = 80
    """Columns of the terminal."""

    def say(self, message: str) -> None:
        """Writes a message of the launcher itself."""
        self.stderr.write(f"echelon: {message}\n".encode(errors="backslashreplace"))
        self.stderr.flush()


_COLORS = (36, 33, 35, 32, 34, 31)
"""ANSI: cyan, yellow, magenta, green, blue, red."""

_LONGEST_LINE = 1 << 20
"""Bytes. A longer line is cut, so that output without line ends cannot fill the memory."""

_RECENT_LINES = 50
"""Most lines of a stream that are kept. torch writes some after the traceback of a rank."""

_CRASH = "Fatal Python error: "
"""Beginning of faulthandler's text, which the stacks of all threads follow."""
_WHAT = "what():"
"""Beginning of the text of an exception that ends a program in C++."""
_LONGEST_WORDS = 300
"""Most characters of a rank's last words in a message."""


class MarkedStream:
    """Copy of one rank's stdout or stderr to `target`, with the rank before each line, as in "[2] loss 3.1".

    Lines of different ranks never mix, because only whole lines are written. A progress bar is shown by `status`, if
    `target` is its terminal.
    """

    def __init__(self, rank: int, target: BinaryIO, *, color: bool = False, status: StatusLine | None = None) -> None:
        mark = f"[{rank}] "
        if color:
            mark = f"\x1b[{_COLORS[rank % len(_COLORS)]}m{mark}\x1b[0m"
        self._rank = rank
        self._mark = mark.encode()
        self._target = target
        self._status = status
        self._bar = b""
        self._pending = b""
        self._recent: deque[bytes] = deque(maxlen=_RECENT_LINES)

    def feed(self, data: bytes) -> None:
        """Writes the lines that `data` completes, and keeps the rest until its line ends."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _LONGEST_LINE:
            lines.append(self._pending)
            self._pending = b""
        if self._status is None:
            self._write(lines)
            return
        has_bar = b"\r" in self._pending
        self._pending = unfinished(self._pending) if has_bar else self._pending
        self._show(visible(self._pending) if has_bar else b"")
        self._write([visible(line) for line in lines])

    def finish(self) -> None:
        """Writes the last line if it has no line end."""
        self._show(b"")
        last = self._pending if self._status is None else visible(self._pending)
        if last:
            self._write([last])
        self._pending = b""

    def last_words(self) -> str:
        """Returns the line of the last traceback that has its exception, or else the last line. Empty if none is left.

        A rank that ends before `echelon.init` reports no failure, so its stderr has to say why.
        """
        lines = self._recent_lines()
        begin = max((n for n, line in enumerate(lines) if line.startswith("Traceback (most recent call")), default=-1)
        ends = [line for line in lines[begin + 1 :] if line and not line[0].isspace()]
        words = ends[0 if begin >= 0 else -1] if ends else ""
        if begin >= 0 and words:
            # An indented line goes on with the message, as in torch's errors of a state_dict.
            following = lines[lines.index(words, begin) + 1 :]
            words = one_line("\n".join([words, *takewhile(lambda line: line[:1].isspace(), following)]))
        return _cut(words)

    def crash(self) -> str:
        """Returns the line of the user's code in a crash, and the C++ exception. Empty if nothing tells of a crash."""
        lines = self._recent_lines()
        begin = next((number for number, line in enumerate(lines) if line.startswith(_CRASH)), len(lines))
        stacks = "\n".join(lines[begin:])
        # No thread is the current one if it is none of Python's, such as one of Gloo's.
        place = whereabouts.place_in(stacks.partition("Current thread")[2] or stacks)
        # The last one: a program may go on after others.
        errors = [line.partition(_WHAT)[2].strip() for line in lines[:begin] if line.lstrip().startswith(_WHAT)]
        return ": ".join(filter(None, (place and f"at {place}", _cut(errors[-1]) if errors else "")))

    def _recent_lines(self) -> list[str]:
        # torch prefixes the lines of a traceback by "[rank1]: ".
        return [line.decode(errors="replace").removeprefix(f"[rank{self._rank}]: ").rstrip() for line in self._recent]

    def _show(self, text: bytes) -> None:
        if self._status is not None and text != self._bar:
            self._bar = text
            self._status.show(self._rank, text and self._mark + text)

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            self._recent.extend(lines)
            self._target.write(b"".join(self._mark + line + b"\n" for line in lines))
            self._target.flush()


def _cut(words: str) -> str:
    return words if len(words) <= _LONGEST_WORDS else f"{words[:_LONGEST_WORDS]}..."
