"""Waits for the ranks of one host, copies their output and decides when which of them has to end.

Strategy. One thread waits for everything at once: output of the ranks, their ends (pidfd), signals, and the next
deadline. After the first failure the other ranks get a grace to report theirs; then they get SIGTERM, and a second
later SIGKILL. So the job ends at most grace + 1 s after its first rank, whatever the others do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from echelon.launch import report
from echelon.launch.report import RankFailure, describe_exit, exit_status, first_cause
from echelon.wording import listed

# A rank as a process that runs a program of its own, as `echelon run` starts it.
#
# A rank leads a process group, so that a signal reaches its children too, and Ctrl-C reaches the launcher alone, which
# passes it on. The kernel kills a rank whose launcher dies.

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class RankProcess:
    """A running rank.

    stdout, stderr: file descriptors to read from, which never block. pidfd: readable once the process has ended.
    """

    def __init__(self, rank: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.rank = rank
        self._error_file = environ.get(report.ERROR_FILE, "")
        # preexec_fn is safe here because the launcher has one thread.
        self._process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=_die_with(os.getpid()),
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.stdout = self._process.stdout.fileno()
        self.stderr = self._process.stderr.fileno()
        os.set_blocking(self.stdout, False)
        os.set_blocking(self.stderr, False)

    def send_signal(self, number: int) -> None:
        """Sends a signal to the rank and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def reap(self) -> int:
        """Waits for the end of the process and returns its code, negative for a signal.

        The children of a rank that failed are killed.
        """
        info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        if info is not None and (info.si_code != os.CLD_EXITED or info.si_status != 0):
            self.send_signal(signal.SIGKILL)  # before the pid is free for another process
        return self._process.wait()

    def failure(self, at: float) -> RankFailure:
        """Returns how the rank failed, after `reap`: as it reported itself, or else as its exit shows.

        Args:
            at: when the end was noticed, on the clock of `time.monotonic`.
        """
        code = self._process.returncode
        reported = self.reported()
        return reported or RankFailure(rank=self.rank, at=at, summary=describe_exit(code), status=exit_status(code))

    def reported(self) -> RankFailure | None:
        """Returns the failure that the rank reported itself, None if it did not."""
        return report.read(self._error_file) if self._error_file else None

    def close(self) -> None:
        """Kills whatever is left of the rank and frees its descriptors."""
        if self._process.returncode is None:
            self.send_signal(signal.SIGKILL)
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        os.close(self.pidfd)


def _die_with(parent: int) -> Callable[[], None]:
    """Returns what a child does right after the fork: it asks the kernel to kill it when `parent` dies.

    The C library is loaded here, because a child that was just forked may do next to nothing.
    """
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask


# Marks the lines that ranks print with their rank, as in "[2] loss 3.1".

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


_PATIENCE = 1.0
"""Seconds between SIGTERM and SIGKILL."""

_LAST_READS = 16
"""Reads of a stream whose rank has ended. One empties the pipe, but a child may hold it too, and write for ever."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends the job: each is passed on to all ranks."""


@dataclass(frozen=True)
class Console:
    """Where the launcher writes: the output of the ranks and its own messages."""

    stdout: BinaryIO
    stderr: BinaryIO
    color_stdout: bool = False
    color_stderr: bool = False

    def say(self, message: str) -> None:
        """Writes a message of the launcher itself."""
        self.stderr.write(f"echelon: {message}\n".encode())
        self.stderr.flush()


class Launcher:
    """The ranks of one run: which live, which failed, and what happens when to those that live on."""

    def __init__(self, console: Console, grace: float) -> None:
        self._console = console
        self._grace = grace
        self._selector = selectors.DefaultSelector()
        self._ranks: list[RankProcess] = []
        self._running: set[RankProcess] = set()
        self._streams: dict[int, MarkedStream] = {}
        self._failures: list[RankFailure] = []
        self._explained: RankFailure | None = None
        self._ended: set[int] = set()
        self._interrupted_by = 0
        self._deadline = float("inf")
        self._next_signal = signal.SIGTERM

    def run(self, command: Sequence[str], environs: Sequence[Mapping[str, str]]) -> int:
        """Runs `command` once with each of `environs`, as ranks 0, 1, ..., and returns the exit status.

        That is 0, or the status of the first rank that failed, or 128 + the number of the signal that ended the job.
        """
        with self._signals():
            for rank, environ in enumerate(environs):
                self._start(rank, command, environ)
                self._handle(0.0)
                if self._interrupted_by or self._failures:
                    break
            while self._running:
                timeout = None if self._deadline == float("inf") else max(0.0, self._deadline - time.monotonic())
                self._handle(timeout)
                if time.monotonic() >= self._deadline:
                    self._escalate()
        return self._conclude()

    def _handle(self, timeout: float | None) -> None:
        """Waits for something to happen and does what it asks for."""
        for key, _ in self._selector.select(timeout):
            if key.fd in self._selector.get_map():  # not if a callback before has dropped it
                key.data()

    def _start(self, rank: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        process = RankProcess(rank, command, environ)
        self._ranks.append(process)
        self._running.add(process)
        console = self._console
        self._streams[process.stdout] = MarkedStream(rank, console.stdout, color=console.color_stdout)
        self._streams[process.stderr] = MarkedStream(rank, console.stderr, color=console.color_stderr)
        for source in (process.stdout, process.stderr):
            self._watch(source, partial(self._copy, source))
        self._watch(process.pidfd, partial(self._on_end, process))

    def _watch(self, source: int, callback: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _copy(self, source: int) -> bool:
        """Copies what there is to read; says whether there may be more."""
        try:
            data = os.read(source, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(source)
            return False
        self._streams[source].feed(data)
        return True

    def _on_end(self, process: RankProcess) -> None:
        at = time.monotonic()
        self._selector.unregister(process.pidfd)
        for source in (process.stdout, process.stderr):
            for _ in range(_LAST_READS):
                if source not in self._selector.get_map() or not self._copy(source):
                    break
            self._streams[source].finish()
        self._running.discard(process)
        code = process.reap()
        ended_by_us = self._interrupted_by or self._next_signal != signal.SIGTERM
        if code != 0 and not (ended_by_us and process.reported() is None):
            self._fail(process.failure(at))

    def _fail(self, failure: RankFailure) -> None:
        self._failures.append(failure)
        if self._interrupted_by:
            return
        if len(self._failures) == 1:
            self._deadline = time.monotonic() + self._grace
        # A rank may have reported the cause and still be on its way out.
        known = [*self._failures, *filter(None, (process.reported() for process in self._running))]
        own = [failure for failure in known if failure.blames is None]
        if own and self._explained is None:
            self._explain(first_cause(own))

    def _explain(self, failure: RankFailure) -> None:
        """Writes the whole of the first cause: once, as soon as it is known."""
        self._explained = failure
        self._console.say(_line(failure))
        trace = MarkedStream(failure.rank, self._console.stderr, color=self._console.color_stderr)
        trace.feed(failure.traceback.encode())
        trace.finish()

    def _escalate(self) -> None:
        """Sends the ranks that still run the next, stronger signal."""
        for process in self._running:
            process.send_signal(self._next_signal)
            self._ended.add(process.rank)
        self._next_signal = signal.SIGKILL
        self._deadline = time.monotonic() + _PATIENCE

    def _interrupt(self, number: int) -> None:
        """Passes a signal on to the ranks; the second one kills them."""
        self._next_signal = signal.SIGKILL
        if self._interrupted_by:
            self._escalate()
            return
        self._interrupted_by = number
        for process in self._running:
            process.send_signal(number)
        self._deadline = time.monotonic() + self._grace

    def _conclude(self) -> int:
        if self._interrupted_by:
            self._console.say(f"ended by {signal.Signals(self._interrupted_by).name}")
            return 128 + self._interrupted_by
        if not self._failures:
            return 0
        cause = self._explained or first_cause(self._failures)
        if self._explained is None:
            self._explain(cause)
        after = [_line(failure) for failure in self._failures if failure.rank != cause.rank]
        silent = self._ended - {failure.rank for failure in self._failures}
        if silent:
            after.append(
                f"{listed(silent)} went on for {self._grace:g} s and {'was' if len(silent) == 1 else 'were'} ended"
            )
        for line in after:
            self._console.say(f"then {line}")
        if after:
            self._console.say(f"all of that because {cause}")
        return cause.status

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turns signals into bytes on a socket that the loop waits on, so that nothing is interrupted halfway."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        self._watch(ours.fileno(), lambda: self._on_wakeup(ours))
        caught = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores
        previous = {number: signal.signal(number, lambda *_: None) for number in caught}
        wakeup = signal.set_wakeup_fd(theirs.fileno())
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._selector.unregister(ours)
            ours.close()
            theirs.close()

    def _on_wakeup(self, ours: socket.socket) -> None:
        for number in ours.recv(64):
            if number in _SIGNALS:
                self._interrupt(number)

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._ranks:
            process.close()
        self._selector.close()


def _line(failure: RankFailure) -> str:
    return f"{failure} ({failure.where})" if failure.where else str(failure)
