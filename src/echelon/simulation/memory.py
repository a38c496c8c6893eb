"""Memory meter of a simulated rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from echelon._torch_private.tensors import DispatchMode, FakeTensor, storage_address
from echelon.replacements import Replacement

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})
"""Classes of tensors that have no other tensors inside."""


class MemoryMeter(DispatchMode):  # type: ignore[no-untyped-call]
    """Meter of a rank's memory: bytes of the tensors that its operations make, forward and backward, until freed.

    It counts in the thread in which it is active. Tensors of one storage count once. Inside of a DTensor or another
    wrapper, only the inner tensors count. These do not count: tensors from before, tensors of the meta device, the
    workspace of torch's kernels.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = 0
        """Bytes held now."""
        self.peak = 0
        """Most bytes ever held."""
        self.is_paused = False
        """Whether new tensors belong to another rank, and do not count."""
        self._known: dict[int, int] = {}
        """Bytes of each counted storage, by its address. The address of its data would change as it is resized."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if kind not in _PLAIN:
                return NotImplemented  # such as DTensor: the operations on its inner tensors come here
        result = func(*args, **(kwargs or {}))
        if not self.is_paused:
            for tensor in _tensors(result):
                self.count(tensor)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Counts a tensor's memory until it is freed."""
        if tensor.layout is torch.sparse_coo:
            self.count(tensor._indices())
            self.count(tensor._values())
            return
        storage = tensor.untyped_storage()
        # Views and results of in-place operations share a storage that is known.
        address = storage_address(storage)
        if address not in self._known:
            # A storage of the meta device claims its bytes, but has none.
            if storage.device.type == "meta":
                return
            self._known[address] = 0
            # atexit = False: at the end of the process nobody reads the count.
            weakref.finalize(storage, self._freed, address).atexit = False
        self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage with its present size. No effect if it did not count before."""
        address = storage_address(storage)
        if (before := self._known.get(address)) is not None:
            self._known[address] = storage.nbytes()
            self.held += storage.nbytes() - before
            self.peak = max(self.peak, self.held)

    def _freed(self, address: int) -> None:
        self.held -= self._known.pop(address)


def resizes_counted(meter_here: Callable[[], MemoryMeter | None]) -> list[Replacement]:
    """Lets `UntypedStorage.resize_` be counted. By it FSDP frees and allocates parameters.

    Args:
        meter_here: returns the meter of the rank that the calling thread runs. None if it runs no rank.
    """

    def counting(resize: Callable[..., object]) -> Callable[..., object]:
        def counted(storage: torch.UntypedStorage, size: int) -> object:
            result = resize(storage, size)
            if (meter := meter_here()) is not None:
                meter.resized(storage)
            return result

        return counted

    return [Replacement(torch.UntypedStorage, "resize_", counting)]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
