"""Sweep of `echelon foresee`: a script foreseen with each combination of arguments, and a ranked table."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, TypeAlias

from rich.console import Console
from rich.progress import track

from echelon.cli import signal_of
from echelon.cli.output import print_table, to_json
from echelon.errors import LaunchError
from echelon.foresight.report import seconds_text, size_text

_MARK = "echelon: "
"""Start of a line that the command itself writes."""
_RANK = re.compile(r"^\[\d+\] ")
"""Mark of a rank before a line of the program."""
_WORKERS = 2
"""Processes at once at most. Each takes up to 4 GiB."""
_PATIENCE = 3.0
"""Seconds that processes of a sweep which has ended get to end by themselves."""
_LOOK = 0.2


class Ended(NamedTuple):
    """Outcome of a process."""

    status: int
    stdout: str
    stderr: str


RunAll: TypeAlias = Callable[[Sequence[Sequence[str]]], Generator[tuple[int, Ended], None, None]]
"""Function that runs `echelon` with each of several lists of arguments.

It yields each one's number and its outcome, as soon as it has ended.
"""


class Swept(NamedTuple):
    """Combinations that were foreseen, and the signal that has ended the sweep."""

    entries: list[Entry]
    """Entries that fit come first, the best at the top, and failures last."""
    num_left: int = 0
    """Combinations that were not foreseen."""
    signal: signal.Signals | None = None
    """Signal that has ended the sweep before its last combination. None if there was none."""


@dataclass(frozen=True)
class Entry:
    """One combination of arguments: its figures, or the reason why there are none."""

    arguments: tuple[str, ...]
    figures: dict[str, Any] | None
    reason: str = ""

    @property
    def name(self) -> str:
        """Arguments as one would type them. "-" if there are none."""
        return shlex.join(self.arguments) or "-"

    @property
    def summary(self) -> str:
        """One line: the step and whether it fits, or the reason why there is none."""
        if self.figures is None:
            return f"{self.name} failed: {self.reason}"
        verdict = "does not fit" if not self.fits else "fits narrowly" if self.fits_narrowly else "fits"
        return f"{self.name} takes {seconds_text(self.figures['step_seconds'])}, {verdict}"

    @property
    def fits(self) -> bool:
        """Whether it runs, and every rank has enough memory."""
        return self.figures is not None and bool(self.figures["memory"]["fits"])

    @property
    def fits_narrowly(self) -> bool:
        """Whether it fits, with less room than the uncounted CUDA context and NCCL buffers need."""
        return self.figures is not None and bool(self.figures["memory"]["fits_narrowly"])

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as plain values."""
        if self.figures is None:
            return {"arguments": list(self.arguments), "reason": self.reason}
        names = ("step_seconds", "tokens_per_second", "mfu", "bubble", "memory", "problems")
        found = {name: self.figures[name] for name in names if name in self.figures}
        return {"arguments": list(self.arguments), **found}


def sweep(
    options: Sequence[str],
    program: Sequence[str],
    each: Sequence[tuple[str, ...]],
    run_all: RunAll,
    tell: Callable[[str], None],
) -> Swept:
    """Foresees a program with each combination of arguments, until SIGINT or `Terminated`.

    Args:
        options: options of `echelon foresee`.
        program: script and its own arguments. Those of the combination come after them.
        each: combinations of arguments.
        run_all: runs the processes.
        tell: called with a line on each combination when it is foreseen.
    """
    commands = [["foresee", *options, "--json", *program, *arguments] for arguments in each]
    entries: dict[int, Entry] = {}
    ended_by = None
    began = time.monotonic()
    try:
        with closing(run_all(commands)) as outcomes:
            for number, ended in outcomes:
                entries[number] = entry_of(each[number], ended)
                left = time_left(time.monotonic() - began, len(entries), len(each))
                tell(f"{len(entries)} of {len(each)}: {entries[number].summary}{left}")
    except KeyboardInterrupt as error:
        ended_by = signal_of(error)
    found = ranked([entries[number] for number in sorted(entries)], is_same_work="--tokens" in options)
    return Swept(found, len(each) - len(entries), ended_by)


def time_left(seconds: float, num_ended: int, num_all: int) -> str:
    """Returns a guess of the time that a sweep still takes, as "; about 40 s left". Empty below a second.

    Args:
        seconds: seconds so far.
        num_ended: combinations that were foreseen so far.
        num_all: number of all combinations.
    """
    # When the first process ends, the others that run beside it are nearly done, too.
    left = seconds / max(num_ended, at_once(num_all)) * (num_all - num_ended)
    if left < 1:
        return ""
    return f"; about {left:.0f} s left" if left < 100 else f"; about {left / 60:.0f} min left"


def ranked(entries: Sequence[Entry], is_same_work: bool) -> list[Entry]:
    """Returns entries, the best first. A narrow fit comes after all that leave room.

    Args:
        is_same_work: whether each step has the same number of tokens. Then the shortest step is the best. Otherwise it
            is the highest MFU, since a longer step may have a larger batch.
    """

    def key(entry: Entry) -> tuple[bool, bool, bool, float]:
        figures = entry.figures
        if figures is None:
            return True, True, True, 0.0
        time = figures["step_seconds"] if is_same_work else -figures["mfu"]
        return False, not entry.fits, entry.fits_narrowly, time

    return sorted(entries, key=key)


def entry_of(arguments: tuple[str, ...], ended: Ended) -> Entry:
    """Returns the entry of a process that has ended."""
    try:
        figures = json.loads(ended.stdout)
    except ValueError:
        figures = None
    if isinstance(figures, dict) and "step_seconds" in figures:
        return Entry(arguments, figures)
    said = [line.removeprefix(_MARK) for line in ended.stderr.splitlines() if line.startswith(_MARK)]
    if said:
        # The program's own last line says more than the status with which it exited.
        own = [_RANK.sub("", line) for line in ended.stderr.splitlines() if not line.startswith(_MARK)]
        return Entry(arguments, None, own[-1] if own and " exited with status " in said[0] else said[0])
    end = f"killed by signal {-ended.status}" if ended.status < 0 else f"ended with status {ended.status}"
    return Entry(arguments, None, (ended.stderr.strip().splitlines() or [end])[-1])


def show(entries: Sequence[Entry], console: Console) -> None:
    """Prints a table of the foreseen steps, and a line for each combination that failed."""
    has_tokens = any(entry.figures and entry.figures["tokens_per_second"] for entry in entries)
    has_bubbles = any(entry.figures and entry.figures["bubble"] is not None for entry in entries)
    heads = "arguments", "step", *["tokens/s"] * has_tokens, "MFU", *["bubble"] * has_bubbles
    rows = [[*heads, "needs", "of", "fits"]]
    for entry in entries:
        if (figures := entry.figures) is None:
            continue
        memory = figures["memory"]
        # That of a rank which does not fit, if there is one. The device reserves no more than it has.
        needs, limit = (size_text(memory[name]) for name in ("needed_peak", "limit"))
        sizes = [f"over {limit}" if needs == limit and not memory["fits"] else needs, limit]
        tokens = [f"{figures['tokens_per_second'] or 0:,.0f}"] * has_tokens
        # A layout without a pipeline has no messages, and so no bubble.
        bubble = ["-" if figures["bubble"] is None else f"{figures['bubble']:.1%}"] * has_bubbles
        verdict = "NO" if not entry.fits else "narrowly" if entry.fits_narrowly else "yes"
        step, mfu = seconds_text(figures["step_seconds"]), f"{figures['mfu']:.1%}"
        rows.append([entry.name, step, *tokens, mfu, *bubble, *sizes, verdict])
    if len(rows) > 1:
        print_table(console, rows)
    failed = [entry for entry in entries if entry.figures is None]
    if failed:
        print_table(console, [["failed", "reason"], *([entry.name, entry.reason] for entry in failed)], left=(0, 1))


def as_json(entries: Sequence[Entry], files: Sequence[str] = ()) -> str:
    """Returns the entries as JSON: "ranked" have figures, "failed" have a reason.

    Args:
        entries: combinations, the best first.
        files: files that were written of the best one.
    """
    groups = {"ranked": [], "failed": []}  # type: dict[str, list[dict[str, Any]]]
    for entry in entries:
        groups["failed" if entry.figures is None else "ranked"].append(entry.to_json())
    return to_json({**groups, "files": list(files)})


def at_once(num_commands: int) -> int:
    """Returns how many processes of a sweep run at the same time."""
    return min(_WORKERS, os.cpu_count() or 1, num_commands)


def run_all(commands: Sequence[Sequence[str]], shown: Console) -> Generator[tuple[int, Ended], None, None]:
    """Runs `echelon` with each list of arguments, two at a time where cores allow; see `RunAll`.

    Args:
        commands: lists of arguments.
        shown: console on which the progress is shown meanwhile, if it is a terminal.
    """
    processes = _Processes()
    with ThreadPoolExecutor(at_once(len(commands))) as pool:
        try:
            running = {pool.submit(processes.run, command): number for number, command in enumerate(commands)}
            hides = not shown.is_terminal
            ended = _as_completed(running)
            for each in track(ended, "foreseeing", len(commands), console=shown, transient=True, disable=hides):
                yield running[each], each.result()
        finally:
            processes.stop()  # before the pool waits for its threads


def _as_completed(futures: Iterable[Future[Ended]]) -> Iterator[Future[Ended]]:
    """Yields futures as they end. A signal is handled within `_LOOK` seconds.

    Python does not handle one that comes right before it waits for a lock: a wait without a limit would go on.
    """
    pending = set(futures)
    while pending:
        ended, pending = wait(pending, _LOOK, return_when=FIRST_COMPLETED)
        yield from ended


class _Processes:
    """Processes of `echelon`.

    Strategy: threads start a process each and wait for it. `stop` ends the processes that run, so that the threads
    return, and keeps others from starting.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_stopped = False

    def run(self, arguments: Sequence[str]) -> Ended:
        """Runs `echelon` with arguments. Blocks until it has ended."""
        # -P: as the installed command, without the current folder before the installed packages.
        command = [sys.executable, "-P", "-m", "echelon", *arguments]
        pipe = subprocess.PIPE
        with self._lock:
            if self._is_stopped:
                return Ended(1, "", "stopped")
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace"
            )
            self._running.add(process)
        out, err = process.communicate()
        with self._lock:
            self._running.discard(process)
        return Ended(process.returncode, out, err)

    def stop(self) -> None:
        """Ends the processes that run, and starts none any more. Blocks for a few seconds at most."""
        with self._lock:
            self._is_stopped = True
            running = list(self._running)
        # They remove their temporary files then.
        for process in running:
            process.send_signal(signal.SIGINT)
        until = time.monotonic() + _PATIENCE
        for process in running:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


_CHOICE = re.compile(r"\{([^{}]*)\}")
_BLANK = "\0"
"""Separator of the words of an alternative. No argument holds it."""
_MOST = 500
"""Combinations at most. More are a slip of the keyboard, or a week of work."""


def combinations(option: str, text: str) -> list[tuple[str, ...]]:
    """Returns the words of each combination: every {a,b} is replaced by each of its alternatives.

    An alternative may have several words: "{--batch 8 --steps 1,--batch 4 --steps 2}" has two combinations. Words are
    split as by a shell, so a space inside of an argument is quoted: "'{a b,c}'". The last choice changes first. A word
    that becomes empty is left out: "{--recompute,}" is with and without that option.

    Args:
        option: name of the option, for errors.
        text: words with choices.

    Raises:
        LaunchError: a quote or a brace is not closed, a choice has no alternatives, or combinations are too many.
    """
    try:
        words = list(_joined(shlex.split(text)))
    except ValueError as error:
        raise LaunchError(f"{option} {text!r}: {str(error).lower()}: close each quote") from None
    # Literal text at even places, the alternatives of a choice at odd ones.
    parts = [_CHOICE.split(word) for word in words]
    for word, literals in zip(words, parts, strict=True):
        if any(brace in literal for literal in literals[::2] for brace in "{}"):
            shown = word.replace(_BLANK, " ")
            raise LaunchError(f"{option} {text!r}: {shown!r} has an open brace: write choices as {{1,2}}")
    choices = [choice.split(",") for literals in parts for choice in literals[1::2]]
    if not choices or any(choice == [""] for choice in choices):
        raise LaunchError(f"{option} {text!r}: give alternatives in braces, as --tp {{1,2,4}}")
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > _MOST:
        raise LaunchError(f"{option} {text!r}: {count} combinations: give at most {_MOST}")
    return [_words(parts, taken) for taken in product(*choices)]


def _joined(words: Sequence[str]) -> Iterator[str]:
    """Yields the words. All words from an open brace to the one that closes it come as one."""
    left = iter(words)
    for word in left:
        joined = word
        while joined.count("{") > joined.count("}") and (following := next(left, None)) is not None:
            joined += _BLANK + following
        yield joined


def _words(parts: list[list[str]], taken: tuple[str, ...]) -> tuple[str, ...]:
    left = iter(taken)
    joined = ["".join(part if place % 2 == 0 else next(left) for place, part in enumerate(word)) for word in parts]
    words = [(word.split(_BLANK), given == [""]) for word, given in zip(joined, parts, strict=True)]
    # A word that was empty from the start, as in "--name ''", is meant.
    return tuple(word for several, is_meant in words for word in several if word or is_meant)
