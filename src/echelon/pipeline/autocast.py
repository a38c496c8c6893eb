"""Autocast around forwards and backwards, wherever the program that calls them is."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple

import torch

_DEVICES = ("cpu", "cuda")


class Autocast(NamedTuple):
    """What autocast was set to when a forward was run, which may be run again elsewhere."""

    dtypes: tuple[torch.dtype | None, ...]
    """For each kind of device what its products are cast to; None: they are not."""

    @staticmethod
    def now() -> Autocast:
        """Returns what it is set to."""
        return Autocast(tuple(_dtype(device) for device in _DEVICES))

    def again(self) -> AbstractContextManager[object]:
        """Does what is inside under the same setting."""
        changed = [pair for pair in zip(_DEVICES, self.dtypes, strict=True) if _dtype(pair[0]) != pair[1]]
        if not changed:
            return nullcontext()
        stack = ExitStack()
        for device, dtype in changed:
            stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
        return stack


_OFF = Autocast((None,) * len(_DEVICES))


def outside_autocast() -> AbstractContextManager[object]:
    """Does what is inside in the dtypes that the forward left, as a backward after `with torch.autocast` would."""
    return _OFF.again()


def is_casting() -> bool:
    """Says whether autocast is on, so that a backward has to leave it."""
    return Autocast.now() != _OFF


def _dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
