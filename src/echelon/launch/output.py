"""Marks the lines that ranks print with their rank, as in "[2] loss 3.1"."""

from __future__ import annotations

from typing import BinaryIO

_COLORS = (36, 33, 35, 32, 34, 31)
"""ANSI: cyan, yellow, magenta, green, blue, red."""

_LONGEST_LINE = 1 << 20
"""Bytes; a longer line is cut, so that a rank without line ends cannot fill the memory."""


class MarkedStream:
    """One stream of one rank, copied line by line to `target`.

    Lines of different ranks never mix, because only whole lines are written.
    """

    def __init__(self, rank: int, target: BinaryIO, *, color: bool = False) -> None:
        mark = f"[{rank}] "
        if color:
            mark = f"\x1b[{_COLORS[rank % len(_COLORS)]}m{mark}\x1b[0m"
        self._mark = mark.encode()
        self._target = target
        self._pending = b""

    def feed(self, data: bytes) -> None:
        """Writes the lines that `data` completes and keeps the rest for later."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _LONGEST_LINE:
            lines.append(self._pending)
            self._pending = b""
        self._write(lines)

    def finish(self) -> None:
        """Writes a last line that has no end."""
        if self._pending:
            self._write([self._pending])
            self._pending = b""

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            self._target.write(b"".join(self._mark + line + b"\n" for line in lines))
            self._target.flush()
