"""Launcher of `echelon run`: runs a program as all the ranks of one host.

Strategy. One thread waits for everything at once: output of the ranks, their ends (pidfd), signals, and the next
deadline. After the first failure the other ranks get a grace period to report theirs; then they get SIGTERM, and a
second later SIGKILL. So the job ends at most grace + 1 s after its first failed rank, even if the others hang.

torch.distributed.elastic.multiprocessing is not used. It ends the other ranks as soon as it notices a failure, so the
cause may be a rank that was about to report. It polls once a second, and copies output through files that it polls. Its
ranks outlive it when it is killed. Importing it takes seconds.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from echelon.call_site import is_foreign, shortened
from echelon.errors import InvalidWorldSize, LaunchError
from echelon.launch import report, whereabouts
from echelon.launch.advice import advice_on_last_words
from echelon.launch.at_start import sitecustomize as at_start
from echelon.launch.backends import on_this_host
from echelon.launch.environment import on_one_host, without_launcher
from echelon.launch.output import Console, MarkedStream
from echelon.launch.report import (
    ERROR_FILE,
    GRACE,
    RankFailure,
    are_alike,
    consequences,
    describe_exit,
    exit_status,
    first_cause,
)
from echelon.launch.status_line import VARIABLE as TERMINAL
from echelon.launch.variables import ReservedPort, is_in_use, threads_per_rank
from echelon.temporary import temporary_folder
from echelon.wording import counted, listed

MAX_RANKS = 1024
"""Most ranks on one host. A larger number is taken for a typing error."""


_PYTHON = ("python", "python3")


@dataclass(frozen=True)
class Program:
    """Program that every rank runs: a script, or a module as with `python -m`."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    def command(self) -> list[str]:
        """Returns the command line."""
        return [sys.executable, *(["-m"] if self.is_module else []), self.name, *self.args]

    def check(self) -> None:
        """Raises LaunchError if there is no such script."""
        if not self.is_module and os.path.isdir(self.name):
            raise LaunchError(f"script {self.name!r} is a folder: name a file in it, or run a package with -m")
        if not self.is_module and os.path.exists(self.name) and not os.path.isfile(self.name):
            raise LaunchError(f"script {self.name!r} is a device or pipe, which ranks cannot share: name a file")
        if not self.is_module and not os.path.isfile(self.name):
            advice = "leave it out, as Python runs each script" if self.name in _PYTHON else "check its path"
            raise LaunchError(f"script {self.name!r} does not exist in {os.getcwd()}: {advice}")
        if not self.is_module and not os.access(self.name, os.R_OK):
            raise LaunchError(f"script {self.name!r} cannot be read: give yourself the right to: chmod u+r {self.name}")
        if self.is_module and self.name.endswith(".py") and os.path.isfile(self.name):
            raise LaunchError(f"-m {self.name}: -m takes the name of a module: leave -m out, or write {self.name[:-3]}")


def run(
    program: Program,
    num_ranks: int,
    console: Console,
    environ: Mapping[str, str],
    grace: float = GRACE,
    *,
    tells: bool = False,
) -> int:
    """Runs `program` as `num_ranks` ranks on this host, blocks until all have ended, and returns the exit status.

    Call it from the main thread: it takes over SIGINT, SIGTERM and SIGHUP while it runs.

    Args:
        program: script or module to run.
        num_ranks: number of ranks, at least 1.
        console: destination of the output.
        environ: environment of the ranks, without their ranks and rendezvous.
        grace: seconds that the other ranks get to report after the first failure.
        tells: whether to write a line that says what is started.

    Returns:
        0, or the status of the first rank that failed, or 128 + the number of the signal that ended that rank or the
        launcher.

    Raises:
        InvalidWorldSize, LaunchError: nothing was started.
    """
    if num_ranks < 1:
        raise InvalidWorldSize(f"-n {num_ranks}: a world has at least 1 rank: give -n 1 or more")
    if num_ranks > MAX_RANKS:
        raise InvalidWorldSize(f"-n {num_ranks}: one host starts at most {MAX_RANKS} ranks: give a smaller number")
    if not grace >= 0:  # not a number, too
        raise LaunchError(f"--grace {grace:g}: use a number of seconds, 0 or more")
    program.check()
    with temporary_folder("echelon-run-") as folder, ReservedPort() as port:
        environs = rank_environs(num_ranks, port, environ)
        for rank, each in enumerate(environs):
            each[ERROR_FILE] = os.path.join(folder, f"rank{rank}.json")
            each["PYTHONPATH"] = os.pathsep.join(filter(None, (at_start.FOLDER, each.get("PYTHONPATH"))))
            each.pop(TERMINAL, None)  # of a launcher around this one
            if console.status is not None:
                each[TERMINAL] = str(console.columns - len(f"[{rank}] "))
        if tells:
            console.say(_started(program, environs))
        with Launcher(console, grace) as launcher:
            status = launcher.run(program.command(), environs)
        is_alone = tells and status == 0 and num_ranks > 1 and not launcher.has_group
        if is_alone and not knows_ranks(program.name, is_module=program.is_module):
            console.say(f"note: no rank seems to have joined a group, so {BY_ITSELF}")
        return status


BY_ITSELF = (
    "each of them ran the whole program by itself: call group = echelon.init(), or "
    "torch.distributed.init_process_group(), at its beginning"
)
"""End of a line on ranks that never meet."""


def _started(program: Program, environs: Sequence[Mapping[str, str]]) -> str:
    """Returns a line on a job: ranks, threads, backend and program."""
    threads = environs[0]["OMP_NUM_THREADS"]
    # The program may choose another one by init(backend=).
    backend = on_this_host(environs[0].get("ECHELON_BACKEND") or "auto", len(environs))
    per_rank = f"{threads} thread{'' if threads == '1' else 's'} each"
    return f"starting {counted(len(environs), 'rank')} of {program.name}, {per_rank}, backend {backend}"


def rank_environs(num_ranks: int, port: ReservedPort, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the environment of every rank: `environ` with rank, world size, rendezvous and secret."""
    common = {
        # Before `environ`: the user's own values of these three count.
        "OMP_NUM_THREADS": str(threads_per_rank(num_ranks)),
        "PYTHONFAULTHANDLER": "1",  # a crash in C code prints where Python was
        "PYTHONUNBUFFERED": "1",  # the launcher marks lines as they are written
        **without_launcher(environ),
        "MASTER_ADDR": port.host,
        "MASTER_PORT": str(port.port),
        # New ones for each start, so ranks of another job or of an earlier one are refused.
        "ECHELON_SECRET": secrets.token_hex(32),
        "ECHELON_RUN_ID": secrets.token_hex(4),
    }
    return [common | on_one_host(rank, num_ranks) for rank in range(num_ranks)]


_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class RankProcess:
    """Process of one rank, running its own program.

    The rank leads a process group: a signal to the group reaches its children too, and Ctrl-C reaches the launcher
    only, which passes it on. The kernel kills a rank whose launcher dies.

    error_file: file in which the rank reports its failure. Empty if it has none.
    stdout, stderr: non-blocking file descriptors to read from. pidfd: readable once the process has ended.
    """

    def __init__(self, rank: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.rank = rank
        self.error_file = environ.get(ERROR_FILE, "")
        self.port = int(environ.get("MASTER_PORT", "0"))
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

    def failure(self, at: float, stderr: MarkedStream) -> RankFailure:
        """Returns the rank's failure: its own report, or a record made from its exit code. Call it after `reap`.

        Args:
            at: time at which the end was noticed, on the clock of `time.monotonic`.
            stderr: the rank's stderr, which may say why it ended.
        """
        if reported := self.reported():
            return reported
        code = self._process.returncode
        words = stderr.last_words() if code > 0 else stderr.crash() if -code in _CRASHES else ""
        summary = f"{describe_exit(code)}{f': {words}' if words else ''}"
        hint = advice_on_last_words(words)
        return RankFailure(rank=self.rank, at=at, summary=summary, status=exit_status(code), hint=hint)

    def reported(self) -> RankFailure | None:
        """Returns the failure that the rank reported itself. None if it did not."""
        return report.read(self.error_file) if self.error_file else None

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


_PATIENCE = 1.0
"""Seconds between SIGTERM and SIGKILL."""

_LAST_READS = 16
"""Most reads of a stream whose rank has ended. Bounded, because a child may hold the pipe, too, and write for ever."""

_CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
"""Signals by which C code crashes. The name of another one says more than stderr."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the job. Each is passed on to all ranks."""


class FailureLog:
    """Failures of a run. Writes the first cause as soon as it is known, and the other failures at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._failures: list[RankFailure] = []
        self._explained: RankFailure | None = None

    @property
    def ranks(self) -> set[int]:
        """Ranks that have failed."""
        return {failure.rank for failure in self._failures}

    def add(self, failure: RankFailure) -> None:
        """Adds the failure of a rank that has ended."""
        self._failures.append(failure)

    def explain_if_known(self, reported: Iterable[RankFailure]) -> None:
        """Writes the first cause, once. Waits for more failures while all known ones blame another rank.

        Args:
            reported: failures that ranks have reported which still run.
        """
        own = [failure for failure in (*self._failures, *reported) if failure.blames is None]
        if own and self._explained is None:
            self._explain(first_cause(own))

    def conclude(self, num_ranks: int, ended: set[int], grace: float) -> int:
        """Writes the failures after the first cause. Returns the exit status of the run.

        Args:
            num_ranks: number of all ranks.
            ended: ranks that were still running `grace` seconds after the first failure, and were ended.
            grace: seconds.
        """
        if not self._failures:
            return 0
        cause = self._explained or first_cause(self._failures)
        if self._explained is None:
            self._explain(cause)
        if are_alike(self._failures, num_ranks):
            self._say(f"all {num_ranks} ranks failed alike: each {cause.brief}")
            return cause.status
        after = consequences(cause, (failure for failure in self._failures if failure.rank != cause.rank))
        if silent := ended - self.ranks:
            after.append(
                f"{listed(silent)} kept running for {grace:g} s and {'was' if len(silent) == 1 else 'were'} terminated"
            )
        for line in after:
            self._say(f"then {line}")
        # Last, where one looks: below the traceback, and the failures that it led to.
        if after or cause.traceback:
            self._say(f"root cause: rank {cause.rank} {cause.brief}")
        return cause.status

    def _say(self, text: str) -> None:
        self._console.say(shortened(text))

    def _explain(self, failure: RankFailure) -> None:
        self._explained = failure
        self._say(f"rank {failure.rank} {failure.hinted}")
        trace = MarkedStream(failure.rank, self._console.stderr, color=self._console.color_stderr)
        trace.feed(failure.told_once(failure.traceback).encode(errors="backslashreplace"))
        trace.finish()


class Launcher:
    """Ranks of one run: starts them, copies their output, and ends the others after a failure or a signal."""

    def __init__(self, console: Console, grace: float) -> None:
        self._console = console
        self._grace = grace
        self._selector = selectors.DefaultSelector()
        self._ranks: list[RankProcess] = []
        self._running: set[RankProcess] = set()
        self._streams: dict[int, MarkedStream] = {}
        self._failures = FailureLog(console)
        self._ended: set[int] = set()
        self._interrupted_by = 0
        self._places: list[str] = []
        """Lines on where the ranks were when a signal came."""
        self.has_group = False
        """Whether a rank seems to have joined a group, of Echelon or of torch."""
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
                if self._interrupted_by or self._failures.ranks:
                    break
            while self._running:
                timeout = None if self._deadline == float("inf") else max(0.0, self._deadline - time.monotonic())
                self._handle(timeout)
                if time.monotonic() >= self._deadline:
                    self._escalate()
        if self._interrupted_by:
            self._console.say(f"ended by {signal.Signals(self._interrupted_by).name}")
            for line in self._places:
                self._console.say(shortened(line))
            self._tell_of_checkpoint()
            return 128 + self._interrupted_by
        status = self._failures.conclude(len(environs), self._ended, self._grace)
        if status:
            self._tell_of_checkpoint()
        return status

    def _handle(self, timeout: float | None) -> None:
        """Waits up to `timeout` seconds for events and runs their callbacks. None: without limit."""
        for key, _ in self._selector.select(timeout):
            # `_on_end` unregisters streams that may be ready in the same batch of events.
            if key.fd in self._selector.get_map():
                key.data()

    def _start(self, rank: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        try:
            process = RankProcess(rank, command, environ)
        except OSError as error:
            reason = f"rank {rank} cannot be started ({error.strerror})"
            raise LaunchError(f"{reason}: start fewer ranks, or raise the limits, as by ulimit -n or -u") from None
        self._ranks.append(process)
        self._running.add(process)
        console = self._console
        self._streams[process.stdout] = MarkedStream(rank, console.stdout, color=console.color_stdout)
        self._streams[process.stderr] = MarkedStream(
            rank, console.stderr, color=console.color_stderr, status=console.status
        )
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
        # Asked at each end, as the connections of the last rank end with it.
        self.has_group = self.has_group or whereabouts.has_group(process.error_file) or is_in_use(process.port)
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
        if code == 0 or (ended_by_us and process.reported() is None):
            return
        is_first = not self._failures.ranks
        self._failures.add(process.failure(at, self._streams[process.stderr]))
        if self._interrupted_by:
            return
        if is_first:
            self._deadline = time.monotonic() + self._grace
        # A rank may have reported the cause and still be running its exit handlers.
        self._failures.explain_if_known(filter(None, (process.reported() for process in self._running)))

    def _tell_of_checkpoint(self) -> None:
        """Says which checkpoint this run wrote last, as the next run resumes from it."""
        noted = [noted for process in self._ranks if (noted := report.noted_checkpoint(process.error_file))]
        for step, path in noted[:1]:  # rank 0 of a group writes it
            self._console.say(f"the last checkpoint is of step {step}, in {path}")

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
        self._places = self._find_places()
        for process in self._running:
            process.send_signal(number)
        self._deadline = time.monotonic() + self._grace

    def _find_places(self) -> list[str]:
        """Returns lines on where the running ranks are. Blocks for 0.3 s at most."""
        running = sorted(self._running, key=lambda process: process.rank)
        stacks = whereabouts.stacks({process.pid: process.error_file for process in running if process.error_file})
        places = {process.rank: whereabouts.place_in(stacks.get(process.pid, "")) for process in running}
        return whereabouts.in_words(places, [each.rank for each in self._ranks if each not in self._running])

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


_OF_RANKS = (b"init_process_group", b"RANK", b"WORLD_SIZE")
"""torch's call for a group, which may use any address or a file; variables by which ranks share work without one."""


def knows_ranks(name: str, *, is_module: bool) -> bool:
    """Whether the sources of a program name torch's call for a group, or the variables with rank and world size."""
    return any(word in source for source in _sources(name, is_module=is_module) for word in _OF_RANKS)


def _sources(name: str, *, is_module: bool) -> Iterator[bytes]:
    """Yields each source once. Modules that are named by a text alone, as for importlib, are not found."""
    first = Path.cwd() if is_module else Path(name).resolve().parent
    folders = [first, *(Path(each) for each in sys.path if not is_foreign(os.path.join(each, "")))]
    pending = _files(folders, name) + _files(folders, f"{name}.__main__") if is_module else [Path(name).resolve()]
    seen: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in seen or is_foreign(str(path)):
            continue
        seen.add(path)
        try:
            source = path.read_bytes()
            yield source
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError):  # such as one for another version of Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                pending += [file for each in node.names for file in _files(folders, each.name)]
            elif isinstance(node, ast.ImportFrom):
                within = [path.parents[node.level - 1]] if 0 < node.level <= len(path.parents) else folders
                names = [f"{node.module}.{each.name}" if node.module else each.name for each in node.names]
                pending += [file for each in names for file in _files(within, each)]


def _files(folders: list[Path], name: str) -> list[Path]:
    """Returns the files of a module and of the packages around it."""
    parts = name.split(".")
    bases = [folder.joinpath(*parts[:count]) for folder in folders for count in range(1, len(parts) + 1)]
    return [file for base in bases for file in (base / "__init__.py", Path(f"{base}.py")) if file.is_file()]
