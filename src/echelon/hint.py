"""Hints: notes of exceptions that reports repeat beside the message. Pure."""

from __future__ import annotations


class Hint(str):
    """Note of an exception of Python or torch that a report repeats beside the message."""


def hint_of(error: BaseException) -> str:
    """Returns the hints among the notes of an exception, in one line. Empty if it has none."""
    notes = getattr(error, "__notes__", ())  # a program may set it to anything
    return "; ".join(note for note in notes if type(note) is Hint) if isinstance(notes, list) else ""
