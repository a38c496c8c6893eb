"""Loaders of data in a recorded program: their workers run in the rank's own thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils.data import DataLoader

from echelon.foresight.record.here import recording_here

_OF_WORKERS = ("prefetch_factor", "multiprocessing_context", "worker_init_fn")


@contextmanager
def loading_here() -> Iterator[None]:
    """Inside, loaders of recorded ranks start no processes, and pin no memory."""
    with patch.object(DataLoader, "__init__", _without_workers(DataLoader.__init__)):
        yield


def _without_workers(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if recording_here() is not None:
            # dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, ...
            args = (*args[:5], *(0 for _ in args[5:6]), *args[6:7], *(False for _ in args[7:8]), *args[8:9])
            kwargs.update({name: 0 for name in ("num_workers", "timeout") if name in kwargs})
            kwargs.update({name: False for name in ("pin_memory", "persistent_workers") if name in kwargs})
            kwargs.update({name: None for name in _OF_WORKERS if name in kwargs})
        original(self, *args, **kwargs)

    return init
