"""Backwards inside of `with torch.autocast`, where a whole step is."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch


def outside_autocast() -> AbstractContextManager[object]:
    """Does what is inside in the dtypes that the forward left, as a backward after `with torch.autocast` would."""
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not devices:
        return nullcontext()
    stack = ExitStack()
    for device in devices:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
