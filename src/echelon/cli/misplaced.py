"""Options of a command that stand after the script, which gets them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from echelon.cli.options import options_of
from echelon.launch.output import Console
from echelon.wording import in_words

_NUM_RANKS = ("-n", "--num-ranks")


def no_ranks(command: Callable[..., object], program: str, args: Sequence[str], *, is_module: bool) -> str:
    """Returns an error text for a missing -n. Points out options that stand after the script.

    Args:
        command: the command as a function, with its options as parameters.
        program: the script.
        args: words after it.
        is_module: whether the program is a module.
    """
    if program.isdecimal() and args:  # echelon run 2 train.py
        return f"{program} is taken for the script: write echelon {command.__name__} -n {program} {' '.join(args)}"
    found = _misplaced(command, program, args, always=_NUM_RANKS)
    has_number = any(option in _NUM_RANKS for option in found.options)
    number = [] if has_number else ["-n", "2"]
    wanted = ["echelon", command.__name__, *number, *found.moved, *["-m"] * is_module, program, *found.others]
    if not found.options:
        return f"Missing option '-n' / '--num-ranks': say how many ranks to start: {shlex.join(wanted)}"
    missing = "" if has_number else "-n is missing, and "
    return f"{missing}{_stand_after(found.words)}; options go before: {shlex.join(wanted)}"


class _Misplaced(NamedTuple):
    """Options of a command that stand after the script.

    options: their names. words: as they were typed, without a separate value. moved: with their values, as words to put
    before the script. others: words after the script that are its own.
    """

    options: list[str]
    words: list[str]
    moved: list[str]
    others: list[str]


def _misplaced(
    command: Callable[..., object], program: str, args: Sequence[str], always: Collection[str] = ()
) -> _Misplaced:
    """Returns the long options of a command after a script which seems to have none of these names.

    Args:
        command, program, args: as for `no_ranks`.
        always: options that count in any case.
    """
    known = options_of(command)
    source = _source(program)
    found = _Misplaced([], [], [], [])
    words = iter(args)
    for word in words:
        joined = re.fullmatch(r"(-n)=?(\d+)|(--[^=]+)=(.*)", word)
        option, value = (word, None) if joined is None else (joined[1] or joined[3], joined[2] or joined[4])
        is_ours = option in known and option.startswith("--") and not _declares(source, option)
        if not is_ours and option not in always:
            found.others.append(word)
            continue
        if known[option] and value is None:
            value = next(words, None)
        found.options.append(option)
        found.words.append(word)
        found.moved.extend([option] if value is None else [option, value])
    return found


def _stand_after(words: Sequence[str]) -> str:
    verb, them = ("stands", "it") if len(words) == 1 else ("stand", "them")
    return f"{in_words(words)} {verb} after the script, which gets {them}"


def note_misplaced(shown: Console, command: Callable[..., object], program: str, args: Sequence[str]) -> None:
    """Writes a line on options of a command that stand after a script which seems to have none of these names.

    Args:
        shown: output of the launcher.
        command: the command as a function, with its options as parameters.
        program: path of the script.
        args: words after it.
    """
    if names := list(dict.fromkeys(_misplaced(command, program, args).options)):
        shown.say(f"note: {_stand_after(names)}; options of echelon {command.__name__} go before {program}")


def _source(program: str) -> str | None:
    """Returns the text of a script. None for a module, and for a mistake that the command itself answers."""
    if not os.path.isfile(program):  # opening a pipe would wait for its writer
        return None
    try:
        with open(program, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _declares(source: str | None, option: str) -> bool:
    """Whether a script may have an option: as a text, or as a parameter or field with a type. None: it may have any."""
    return source is None or bool(re.search(rf"{option}\b|\b{option[2:].replace('-', '_')}\s*:", source))
