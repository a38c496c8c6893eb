"""Errors of Echelon inside of the RuntimeErrors into which torch's C++ turns them.

torch's C++ keeps the text of a Python exception alone, after words of its own and before lines "At:". The exception
itself is still held by the future that failed, and so it is found among the objects of this process.
"""

from __future__ import annotations

import gc

from echelon.errors import EchelonError, message_of

_PLACES = "\n\nAt:\n"
"""Words before the places in the text of such a RuntimeError."""


def unwrapped(error: BaseException) -> BaseException:
    """Returns a copy of the error of Echelon that `error` repeats, with the traceback and notes of `error`.

    Returns `error` itself if it repeats none.
    """
    text = message_of(error)
    if type(error) is not RuntimeError or _PLACES not in text:
        return error
    text = text.partition(_PLACES)[0]
    # By type(), since isinstance asks values of the user for their class.
    alive = [each for each in gc.get_objects() if issubclass(type(each), EchelonError)]
    for inner in alive:
        if text.endswith(f"{type(inner).__name__}: {message_of(inner)}"):
            make, arguments = inner.__reduce__()[:2]
            copy: EchelonError = make(*arguments)
            copy.__notes__ = [*getattr(inner, "__notes__", ()), *getattr(error, "__notes__", ())]
            return copy.with_traceback(error.__traceback__)
    return error
