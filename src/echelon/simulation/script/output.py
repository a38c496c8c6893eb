"""Output of simulated ranks: whole lines, each marked with its rank, as `echelon run` marks them."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, TextIO, cast

from echelon.launch.output import Console, MarkedStream
from echelon.simulation.process.state import State


class CallingRank(State):
    """Rank of the calling thread, and the rank whose program runs at the moment."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._process = os.getpid()
        self._installed: int | None = None

    @contextmanager
    def belongs(self, rank: int) -> Iterator[None]:
        """Inside, the calling thread belongs to a rank."""
        self._local.rank = rank
        try:
            yield
        finally:
            del self._local.rank

    def here(self) -> int | None:
        """Returns the rank that is the calling thread. None in other threads, and in a child process of a rank."""
        return getattr(self._local, "rank", None) if os.getpid() == self._process else None

    def nearest(self) -> int | None:
        """Returns the rank of the calling thread. In a thread of no rank, that whose program runs. None without one."""
        rank: int | None = getattr(self._local, "rank", self._installed)
        return rank

    def first(self, rank: int) -> int:  # noqa: D102
        return rank

    def take(self) -> int | None:  # noqa: D102
        return self._installed

    def put(self, state: int | None) -> None:  # noqa: D102
        self._installed = state


class RankOutput:
    """Standard streams of a script: one object for all ranks, which marks the lines of each.

    One object, and not one for each rank: a handler of `logging` that one rank has made writes for all.
    """

    def __init__(self, console: Console, rank: CallingRank) -> None:
        self._streams = (
            _MarkedBytes(console.stdout, console.color_stdout, rank),
            _MarkedBytes(console.stderr, console.color_stderr, rank),
        )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, `sys.stdout` and `sys.stderr` are the streams of the ranks."""
        before = sys.stdout, sys.stderr
        files = [
            # write_through: each print reaches the stream at once, which writes whole lines only.
            _Text(cast("IO[bytes]", stream), original.encoding, original.errors, write_through=True)
            for stream, original in zip(self._streams, before, strict=True)
        ]
        sys.stdout, sys.stderr = files
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            for stream in self._streams:
                stream.finish()

    @property
    def broken(self) -> OSError | None:
        """Error of a stream that takes no more output, such as one whose reader has gone. None if there is none."""
        return next((each.broken for each in self._streams if each.broken), None)

    def finish(self, rank: int) -> None:
        """Writes the last lines of a rank that has ended."""
        for stream in self._streams:
            stream.finish(rank)


def pass_on(stream: TextIO, data: bytes) -> None:
    """Writes output of a child process as it is, since the child has marked its lines with the rank."""
    target = getattr(stream, "buffer", None)
    if isinstance(target, _MarkedBytes):
        target.pass_on(data)
    else:
        stream.write(data.decode(errors="replace"))


class _Text(io.TextIOWrapper):
    """Stream that a rank does not close for the others."""

    def close(self) -> None:
        self.flush()


class _MarkedBytes(io.BufferedIOBase):
    """Stream of bytes of all ranks."""

    def __init__(self, target: BinaryIO, color: bool, rank: CallingRank) -> None:
        self._target = target
        self._color = color
        self._rank = rank
        self._of_rank: dict[int, MarkedStream] = {}
        # A program's own threads write beside its rank. Reentrant: a destructor may print in the middle of a write.
        self._lock = threading.RLock()
        # Kept, as the rank that has printed may catch it, or seem to have failed by it.
        self.broken: OSError | None = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as error:
                self.broken = error
                raise

    def write(self, data: Any, /) -> int:
        """Writes the lines that are complete, marked with the rank of the calling thread."""
        rank, received = self._rank.nearest(), bytes(data)
        with self._writing():
            if rank is None:
                self.pass_on(received)
            else:
                if rank not in self._of_rank:
                    self._of_rank[rank] = MarkedStream(rank, self._target, color=self._color)
                self._of_rank[rank].feed(received)
        return len(received)

    def pass_on(self, data: bytes) -> None:
        """Writes data as it is."""
        with self._writing():
            self._target.write(data)
            self._target.flush()

    def finish(self, rank: int | None = None) -> None:
        """Writes the last line of a rank, or of all, if it has no line end."""
        with self._writing():
            for whose, stream in sorted(self._of_rank.items()):
                if rank in (None, whose):
                    stream.finish()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._target.fileno()

    def isatty(self) -> bool:
        return False  # as under `echelon run`, whose ranks write into pipes


class Kept:
    """Output that is kept, to be written later or never."""

    def __init__(self, console: Console) -> None:
        self._written: list[tuple[BinaryIO, bytes]] = []
        self.console = Console(
            _KeptBytes(console.stdout, self._written),
            _KeptBytes(console.stderr, self._written),
            console.color_stdout,
            console.color_stderr,
        )

    def release(self) -> None:
        """Writes all that was kept."""
        for target, data in self._written:
            target.write(data)
            target.flush()
        self._written.clear()


class _KeptBytes(io.BytesIO):
    """Stream that puts its output into a list."""

    def __init__(self, target: BinaryIO, written: list[tuple[BinaryIO, bytes]]) -> None:
        super().__init__()
        self._target = target
        self._written = written

    def write(self, data: Any, /) -> int:
        """Keeps the data."""
        self._written.append((self._target, bytes(data)))
        return len(self._written[-1][1])

    def fileno(self) -> int:
        return self._target.fileno()
