"""Combinations of arguments, such as "--tp {1,2} --pp {1,4}". Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import product

from echelon.errors import LaunchError

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
