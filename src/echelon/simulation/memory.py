"""Measures how many bytes of tensors a simulated rank holds: those that its operations make, until they are freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from echelon._torch_private import DispatchMode


class MemoryMeter(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of all new tensors of the thread that it is active in, forward and backward alike.

    Tensors of one storage count once. What existed before, and what torch's kernels use while they run, does not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = 0
        """Bytes held now."""
        self.peak = 0
        """The most bytes ever held."""
        self.is_paused = False
        """Whether what is made now is somebody else's."""
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.is_paused:
            for tensor in _tensors(result):
                self.count(tensor)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Counts a tensor's memory until it is freed."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self._known or not storage.nbytes():
            return
        self._known.add(key)
        self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._freed, key, storage.nbytes()).atexit = False

    def _freed(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.held -= num_bytes


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
