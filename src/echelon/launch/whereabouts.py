"""Places of the ranks of `echelon run`, which the launcher asks for by a signal before it ends them.

Strategy. A rank with a group has faulthandler answer the signal ASK: it writes the stack of the main thread into a
file. That is C code inside of a signal handler, so a rank answers in a call that never returns, too. The file's name
has the process, so that no child writes there. It exists only if the rank answers: the signal ends a process without
handler. The launcher waits 0.3 s at most, and goes on without the ranks that have not answered.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from echelon.call_site import is_foreign, source_line
from echelon.wording import listed

# Programs and their libraries use SIGUSR1 and SIGUSR2, and the C library the first ones of real time.
ASK = signal.SIGRTMAX - 7
"""Signal that asks a rank for its place."""
_PATIENCE = 0.3
"""Seconds for all ranks together to answer."""
_INTERVAL = 0.01
"""Seconds between two looks. A file that has not grown meanwhile is whole."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)


def answer(error_file: str) -> None:
    """Lets this process answer its launcher from now on. Does nothing if the program uses the signal itself.

    Args:
        error_file: name of the file in which this rank reports failures.
    """
    path = _place_file(error_file, os.getpid())
    if os.path.exists(path) or signal.getsignal(ASK) != signal.SIG_DFL:
        return
    # Best effort, as the report of a failure: the launcher's folder may be gone.
    with contextlib.suppress(OSError):
        # Stays open until the process ends: faulthandler writes to the number.
        file = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(ASK, file, all_threads=False)
        os.rename(f"{path}.new", path)


def has_group(error_file: str) -> bool:
    """Whether a rank with this error file has begun to join a group, from which on it answers."""
    return any(True for _ in Path(error_file).parent.glob(f"{Path(error_file).name}.place-*"))


def stacks(error_files: Mapping[int, str]) -> dict[int, str]:
    """Asks ranks for their stacks and returns one for each process: empty if it has not answered. Blocks for 0.3 s.

    Args:
        error_files: file for the failures of each rank, by its process, which was not reaped yet.
    """
    files = {pid: _place_file(path, pid) for pid, path in error_files.items()}
    asked = [pid for pid, path in files.items() if os.path.exists(path)]
    for pid in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, ASK)
    found, before = dict.fromkeys(files, ""), dict.fromkeys(files, "")
    end = time.monotonic() + _PATIENCE
    while asked and time.monotonic() < end:
        time.sleep(_INTERVAL)
        before = dict(found)
        for pid in asked:
            with open(files[pid], encoding="utf-8", errors="replace") as file:
                found[pid] = file.read()
        if all(found[pid] and found[pid] == before[pid] for pid in asked):
            break
    return found


def place_in(stack: str) -> str:
    """Returns "file:line: source text" of the innermost line of the user's code in a stack. Empty without a stack."""
    frames = [(path, int(line)) for path, line in _FRAME.findall(stack)]
    own = [frame for frame in frames if not is_foreign(frame[0])]
    if not frames:
        return "the end of its program" if stack else ""
    return source_line(*(own or frames)[0])


_UNKNOWN = (
    "where the ranks were is not known, as none has a group of Echelon: run a script that hangs by echelon simulate, "
    "or on the backend of echelon.interop"
)


def in_words(places: Mapping[int, str], ended: Sequence[int]) -> list[str]:
    """Returns a line for each place, with its ranks. If no place is known, a line on how to find it.

    Args:
        places: place of each running rank. Empty if it is not known.
        ended: ranks that have ended.
    """
    if not any(places.values()):
        return [_UNKNOWN]
    ranks: dict[str, list[int]] = {}
    for rank, place in places.items():
        ranks.setdefault(place, []).append(rank)
    silent = ranks.pop("", [])
    lines = [f"{listed(alike)} {'was' if len(alike) == 1 else 'were'} at {place}" for place, alike in ranks.items()]
    if silent:
        lines.append(f"{listed(silent)} {'has' if len(silent) == 1 else 'have'} no group yet, or did not answer")
    if ended:
        lines.append(f"{listed(ended)} had ended")
    return lines


def _place_file(error_file: str, pid: int) -> str:
    return f"{error_file}.place-{pid}"
