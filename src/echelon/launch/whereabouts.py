"""Places of the ranks of `echelon run`, which the launcher asks for by a signal before it ends them.

Strategy. From its start on a rank has faulthandler answer the signal ASK: it writes the stack of the main thread into a
file. That is C code inside of a signal handler, so a rank answers in a call that never returns, too. The file's name
has the process, so that no child writes there. It exists only if the rank answers: the signal ends a process without
handler. The launcher waits 0.3 s at most, and goes on without the ranks that have not answered.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from echelon.call_site import is_foreign, source_line
from echelon.launch.at_start.sitecustomize import ASK, place_file
from echelon.wording import listed

_PATIENCE = 0.3
"""Seconds for all ranks together to answer."""
_INTERVAL = 0.01
"""Seconds between two looks. A file that has not grown meanwhile is whole."""
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)
"""Mask of the signals for which a process has a handler."""
STARTING = "still starting"
"""Place of a process that has not come to its program yet."""
_IN_SITE = "<frozen site>"
"""File of Python's outermost frame before the program."""
_CUT = re.compile(r"^  \.\.\.$", re.MULTILINE)
"""Last line of a stack of more than 100 frames, whose outer ones are left out."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)


def note_group(error_file: str) -> None:
    """Tells the launcher that this process joins a group.

    Args:
        error_file: name of the file in which this rank reports failures.
    """
    with contextlib.suppress(OSError):  # the launcher's folder may be gone
        Path(_group_file(error_file)).touch()


def has_group(error_file: str) -> bool:
    """Whether a rank with this error file has begun to join a group."""
    return os.path.exists(_group_file(error_file))


def _group_file(error_file: str) -> str:
    return f"{error_file}.group"


def stacks(error_files: Mapping[int, str]) -> dict[int, str | None]:
    """Asks ranks for their stacks and returns one for each process: empty if it has not answered. Blocks for 0.3 s.

    None for a process in which Python has not started yet.

    Args:
        error_files: file for the failures of each rank, by its process, which was not reaped yet.
    """
    files = {pid: place_file(path, pid) for pid, path in error_files.items()}
    there = [pid for pid, path in files.items() if os.path.exists(path)]
    asked = [pid for pid in there if _answers(pid)]
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
    return {pid: found[pid] if pid in there else None for pid in files}


def _answers(pid: int) -> bool:
    """Whether a process has a handler for `ASK`. It has none any more after `exec`, and the signal would end it."""
    try:
        status = Path("/proc", str(pid), "status").read_text()
    except OSError:
        return False
    found = _CAUGHT.search(status)
    return found is not None and bool(int(found[1], 16) >> (ASK - 1) & 1)


def place_in(stack: str | None) -> str:
    """Returns "file:line: source text" of the innermost line of the user's code in a stack. Empty without a stack.

    `STARTING` if the process has not come to its program yet, as one whose stack is None.
    """
    if stack is None:
        return STARTING
    frames = [(path, int(line)) for path, line in _FRAME.findall(stack)]
    own = [frame for frame in frames if not is_foreign(frame[0])]
    if own:
        return source_line(*own[0])
    if not frames:
        return "the start or the end of the program" if stack else ""
    if frames[-1][0] == _IN_SITE:
        return STARTING
    # The lines of imports themselves say nothing.
    place = source_line(*next((frame for frame in frames if not frame[0].startswith("<")), frames[0]))
    return f"a line of a library, in calls too deep to see the program's: {place}" if _CUT.search(stack) else place


_UNKNOWN = (
    "where the ranks were is not known, as none has answered: run a script that hangs by echelon simulate, or on the "
    "backend of echelon.interop"
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
    lines = [
        f"{listed(alike)} {'was' if len(alike) == 1 else 'were'} {'' if place == STARTING else 'at '}{place}"
        for place, alike in ranks.items()
    ]
    if silent:
        lines.append(f"{listed(silent)} did not answer")
    if ended:
        lines.append(f"{listed(ended)} had ended")
    return lines
