"""Backwards inside of `with torch.autocast`, where a whole step is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Does what is inside in the dtypes that the forward left, as a backward after `with torch.autocast` would."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
