"""Launcher of `echelon run`: rank processes, their output and their end.

Strategy. One thread waits for everything at once: output of the ranks, their ends (pidfd), signals, and the next
deadline. After the first failure the other ranks get a grace period to report theirs; then they get SIGTERM, and a
second later SIGKILL. So the job ends at most grace + 1 s after its first failed rank, even if the others hang.
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

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class RankProcess:
    """Process of one rank, running its own program.

    The rank leads a process group: a signal to the group reaches its children too, and Ctrl-C reaches the launcher
    only, which passes it on. The kernel kills a rank whose launcher dies.

    stdout, stderr: non-blocking file descriptors to read from. pidfd: readable once the process has ended.
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
        # Non-blocking: the launcher's one thread must not wait for one rank while others write.
        os.set_blocking(self.stdout, False)
        os.set_blocking(self.stderr, False)

    def send_signal(self, number: int) -> None:
        """Sends a signal to the rank and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def reap(self) -> int:
        """Waits for the end of the process and returns its exit code, negative for a signal.

        Kills the children of a failed rank.
        """
        # WNOWAIT leaves a zombie, so pid and process group are still the rank's when its children are killed. After
        # `wait` the kernel may give the number to another process.
        info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        if info is not None and (info.si_code != os.CLD_EXITED or info.si_status != 0):
            self.send_signal(signal.SIGKILL)
        return self._process.wait()

    def failure(self, at: float) -> RankFailure:
        """Returns the rank's failure: its own report, or a record made from its exit code. Call it after `reap`.

        Args:
            at: time at which the end was noticed, on the clock of `time.monotonic`.
        """
        code = self._process.returncode
        reported = self.reported()
        return reported or RankFailure(rank=self.rank, at=at, summary=describe_exit(code), status=exit_status(code))

    def reported(self) -> RankFailure | None:
        """Returns the failure that the rank reported itself. None if it did not."""
        return report.read(self._error_file) if self._error_file else None

    def close(self) -> None:
        """Kills the rank if it still runs, and closes its file descriptors."""
        if self._process.returncode is None:
            self.send_signal(signal.SIGKILL)
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        os.close(self.pidfd)


def _die_with(parent: int) -> Callable[[], None]:
    """Returns a preexec function that has the kernel kill the child when `parent` dies."""
    # Loaded before the fork: between fork and exec a child may do next to nothing.
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before prctl, so the kernel will send no signal
            os._exit(1)

    return ask


_COLORS = (36, 33, 35, 32, 34, 31)
"""ANSI: cyan, yellow, magenta, green, blue, red."""

_LONGEST_LINE = 1 << 20
"""Bytes. A longer line is cut, so that output without line ends cannot fill the memory."""


class MarkedStream:
    """Copy of one rank's stdout or stderr to `target`, with the rank before each line, as in "[2] loss 3.1".

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
        """Writes the lines that `data` completes, and keeps the rest until its line ends."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _LONGEST_LINE:
            lines.append(self._pending)
            self._pending = b""
        self._write(lines)

    def finish(self) -> None:
        """Writes the last line if it has no line end."""
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
"""Most reads of a stream whose rank has ended. Bounded, because a child may hold the pipe, too, and write for ever."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the job. Each is passed on to all ranks."""


@dataclass(frozen=True)
class Console:
    """Output of the launcher: the ranks' lines and its own messages."""

    stdout: BinaryIO
    stderr: BinaryIO
    color_stdout: bool = False
    color_stderr: bool = False

    def say(self, message: str) -> None:
        """Writes a message of the launcher itself."""
        self.stderr.write(f"echelon: {message}\n".encode())
        self.stderr.flush()


class Launcher:
    """Ranks of one run: starts them, copies their output, and ends the others after a failure or a signal."""

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
        """Runs `command` once with each of `environs`, as ranks 0, 1, ..., and returns the exit status. Blocks.

        The status is 0, or that of the first failed rank, or 128 + the number of the signal that ended the job.
        """
        with self._signals():
            for rank, environ in enumerate(environs):
                self._start(rank, command, environ)
                self._handle(0.0)  # acts on signals and failures while ranks are still being started
                if self._interrupted_by or self._failures:
                    break
            while self._running:
                timeout = None if self._deadline == float("inf") else max(0.0, self._deadline - time.monotonic())
                self._handle(timeout)
                if time.monotonic() >= self._deadline:
                    self._escalate()
        return self._conclude()

    def _handle(self, timeout: float | None) -> None:
        """Waits up to `timeout` seconds for events and runs their callbacks. None: without limit."""
        for key, _ in self._selector.select(timeout):
            # `_on_end` unregisters streams that may be ready in the same batch of events.
            if key.fd in self._selector.get_map():
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
        """Copies one chunk of output. False if the stream is empty or has ended."""
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
        # A rank that the launcher's own signal ended has not failed, unless it reported a failure before.
        ended_by_us = self._interrupted_by or self._next_signal != signal.SIGTERM
        if code != 0 and not (ended_by_us and process.reported() is None):
            self._fail(process.failure(at))

    def _fail(self, failure: RankFailure) -> None:
        self._failures.append(failure)
        if self._interrupted_by:
            return
        if len(self._failures) == 1:
            self._deadline = time.monotonic() + self._grace
        # A rank may have reported the cause and still be running its exit handlers.
        known = [*self._failures, *filter(None, (process.reported() for process in self._running))]
        # While all known failures blame another rank, wait for that one's report, until the grace is over.
        own = [failure for failure in known if failure.blames is None]
        if own and self._explained is None:
            self._explain(first_cause(own))

    def _explain(self, failure: RankFailure) -> None:
        """Writes the first cause with its traceback. Called once, as soon as the cause is known."""
        self._explained = failure
        self._console.say(_line(failure))
        trace = MarkedStream(failure.rank, self._console.stderr, color=self._console.color_stderr)
        trace.feed(failure.traceback.encode())
        trace.finish()

    def _escalate(self) -> None:
        """Sends SIGTERM to the running ranks, and SIGKILL the next time."""
        for process in self._running:
            process.send_signal(self._next_signal)
            self._ended.add(process.rank)
        self._next_signal = signal.SIGKILL
        self._deadline = time.monotonic() + _PATIENCE

    def _interrupt(self, number: int) -> None:
        """Passes a signal on to the ranks. The second signal kills them."""
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
            self._console.say(f"root cause: {cause}")
        return cause.status

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Inside, signals become bytes on a socket that the loop waits on, so they interrupt nothing halfway."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        self._watch(ours.fileno(), lambda: self._on_wakeup(ours))
        caught = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
        # A handler that does nothing: without one, Python writes nothing to the wakeup descriptor.
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
