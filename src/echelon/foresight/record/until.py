"""End of a step at the return of a function of the program, which the profile hook of Python sees."""

from __future__ import annotations

import difflib
import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from echelon.call_site import is_foreign
from echelon.errors import LaunchError

# Python 3.12 and 3.13 have RETURN_CONST.
_RETURNS = ("RETURN_VALUE", "RETURN_CONST")


class Until:
    """Named function of one rank's program, and the functions that it has called.

    Args:
        name: qualified name, with or without its module: "train_step" or "train.Trainer.step".
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last = name.rpartition(".")[2]
        self._called: set[CodeType] = set()

    @contextmanager
    def watched(self, on_return: Callable[[], None]) -> Iterator[None]:
        """Inside, `on_return` is called in the calling thread whenever the function has returned."""
        last, called = self._last, self._called

        # Called for each call and each return of the program and its libraries.
        def noted(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call":
                called.add(code)
            elif event == "return" and code.co_name == last and self._is_meant(frame) and _returns(frame):
                on_return()

        before = sys.getprofile()
        sys.setprofile(noted)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _is_meant(self, frame: FrameType) -> bool:
        module = frame.f_globals.get("__name__", "")
        return _ends(f"{module}.{frame.f_code.co_qualname.replace('<locals>.', '')}", self._name)

    def missing(self, rank: int) -> LaunchError:
        """Returns the error for a function that has never returned, with similar names if it was never called."""
        names = {code.co_qualname.replace("<locals>.", "") for code in self._called if not is_foreign(code.co_filename)}
        if any(_ends(name, self._name) for name in names):
            return LaunchError(
                f"until={self._name!r}: rank {rank} called this function, but it has not returned: name a function "
                "that returns once a step"
            )
        near = difflib.get_close_matches(self._name, sorted(names), n=3, cutoff=0.4)
        hint = (
            f"called were {', '.join(near)}" if near else "give the name of a function, as train_step or Trainer.step"
        )
        return LaunchError(f"until={self._name!r}: rank {rank} called no function of this name; {hint}")


def _ends(name: str, part: str) -> bool:
    return name == part or name.endswith("." + part)


def _returns(frame: FrameType) -> bool:
    """Whether a frame ends by returning a value. The hook is called for exceptions and yielded values as well."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _RETURNS
