"""A rank as a process that runs a program of its own, as `echelon run` starts it.

A rank leads a process group, so that a signal reaches its children too, and Ctrl-C reaches the launcher alone,
which passes it on. The kernel kills a rank whose launcher dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from echelon.launch import report
from echelon.launch.failure import RankFailure, describe_exit, exit_status

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
