"""Memory of one rank: its storages, by weak reference, in the units of PyTorch's caching allocator."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident

import torch

from echelon._torch_private.autograd import is_in_backward
from echelon._torch_private.tensors import FakeTensor, local_part, storage_address, without_functions
from echelon.errors import UnsupportedOp
from echelon.foresight.record.log.callers import REPLICAS, calling_file
from echelon.foresight.record.log.log import Log
from echelon.foresight.trace import Allocate, Entry, Free, MemoryKind

_BETWEEN = tuple(os.path.join("torch", *parts) for parts in (("_ops.py",), ("storage.py",), ("_tensor.py",)))
"""Files of torch between a tensor and the code that makes it."""
_PARALLEL = tuple(os.path.join(os.sep, "torch", "distributed", name, "") for name in ("fsdp", "_composable"))
_BLOCK = 512
"""Bytes to which the allocator rounds."""


@dataclass(slots=True)
class OnHost:
    """Storage that is known to be on the host."""

    place: int
    """Line that made it."""
    is_fixed: bool = False
    """Whether no library moves it by itself, since the program or a library has put it there."""
    is_pinned: bool = False
    """Whether it is in pinned memory."""


class Memory:
    """Storages of one rank that are alive."""

    def __init__(self, log: Log) -> None:
        self.live: dict[int, Allocate] = {}
        """Storages with memory, by number."""
        self.num_bytes = 0
        """Bytes of all of them."""
        self.peak = 0
        """Most bytes so far, as `torch.cuda.max_memory_allocated`."""
        self.on_gpu: set[int] = set()
        """Storages that are known to be on the GPU, see `placement`."""
        self.on_host: dict[int, OnHost] = {}
        """Storages that are known to be on the host."""
        self.making: int | None = None
        """Line whose new storages are on the host. None: they are on the GPU."""
        self._log = log
        self._thread = get_ident()
        self._died_elsewhere: list[int] = []
        """Storages whose last user was another thread, and whose end is no entry yet."""
        # By address, with a reference that keeps the callback alive.
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def number(self, tensor: torch.Tensor) -> int:
        """Returns the number of a tensor's storage, which counts from now on."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            raise sparse_tensor(self._log.line()) from None
        known = self._known.get(storage_address(storage))
        if known is not None:
            return known[0]
        number = self._log.new_storage()
        self.adopt(tensor, number)
        if self.making is not None:
            self.on_host[number] = OnHost(self.making)
        # A storage of the meta device claims its bytes, but has none.
        self._allocate(number, 0 if tensor.device.type == "meta" else storage.nbytes())
        return number

    def known(self, tensor: torch.Tensor) -> int | None:
        """Returns the number of a tensor's storage. None if it does not count yet."""
        found = self._known.get(storage_address(tensor.untyped_storage()))
        return None if found is None else found[0]

    def number_inside(self, value: object) -> int | None:
        """Returns the number of a storage, that of the rank's part for a DTensor. None if it does not count yet."""
        local = local_part(value) if isinstance(value, torch.Tensor) else None
        if not isinstance(local, FakeTensor):
            return None
        with without_functions():
            return self.known(local) if local.layout is torch.strided else None  # others have no storage

    def append(self, entry: Entry) -> None:
        """Writes an entry into the log, and counts its memory."""
        if type(entry) is Allocate:
            self.live[entry.storage] = entry
            if entry.on_host:
                self.on_host.setdefault(entry.storage, OnHost(entry.place))  # of a repeated call
            else:
                self.num_bytes += entry.num_bytes
                self.peak = max(self.peak, self.num_bytes)
        elif type(entry) is Free and (before := self.live.pop(entry.storage, None)) is not None and not before.on_host:
            self.num_bytes -= before.num_bytes
        self._log.entries.append(entry)

    # Storages of the host, see `placement`

    def leave_gpu(self, tensor: torch.Tensor, place: int) -> None:
        """Notes that a new tensor, made by a line, is on the host: it takes no memory of the GPU."""
        if (number := self.known(tensor)) is None:
            with self.on_the_host(place):
                self.number(tensor)
            return
        self.on_gpu.discard(number)
        if number in self.on_host:
            return
        self.on_host[number] = OnHost(place)
        if (before := self.live.get(number)) is not None:
            self._free(number)
            self.append(before._replace(on_host=True))

    @contextmanager
    def on_the_host(self, place: int | None) -> Iterator[None]:
        """Inside, new storages are on the host, made by a line. None: no change."""
        outer = self.making
        self.making = outer if place is None else place
        try:
            yield
        finally:
            self.making = outer

    def fix(self, number: int | None, is_pinned: bool = False) -> None:
        """Notes that no library moves a storage of the host by itself, and whether it is in pinned memory."""
        if (found := self._on_host(number)) is not None:
            found.is_fixed = True
            found.is_pinned |= is_pinned

    def loosen(self, tensors: Iterable[object]) -> None:
        """Notes that a library may move tensors of the host by itself."""
        for each in tensors:
            if isinstance(each, FakeTensor) and (found := self._on_host(self.known(each))) is not None:
                found.is_fixed = False

    def is_fixed(self, number: int | None) -> bool:
        """Whether a storage is on the host, and no library moves it by itself."""
        return (found := self._on_host(number)) is not None and found.is_fixed

    def is_pinned(self, number: int | None) -> bool:
        """Whether a storage is in pinned memory."""
        return (found := self._on_host(number)) is not None and found.is_pinned

    def _on_host(self, number: int | None) -> OnHost | None:
        return None if number is None else self.on_host.get(number)

    def enter_gpu(self, number: int, tensor: torch.Tensor) -> None:
        """Notes that the storage of a tensor may be on the GPU from now on."""
        del self.on_host[number]
        self._free(number)
        self._allocate(number, tensor.untyped_storage().nbytes())

    # Storages of repeated calls, whose entries are copies

    def adopt(self, tensor: torch.Tensor, number: int) -> None:
        """Gives the storage of a new tensor a number whose memory counts already."""
        storage = tensor.untyped_storage()
        address = storage_address(storage)
        # The object lives as long as the storage, since torch keeps it for the next caller.
        self._known[address] = number, weakref.ref(storage, partial(self._died, address, number))

    def disown(self, tensor: torch.Tensor) -> None:
        """Forgets the storage of a tensor, whose end is a copied entry as well."""
        self._known.pop(storage_address(tensor.untyped_storage()), None)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Notes that a storage may have got another size."""
        known = self._known.get(storage_address(storage))
        if known is None:
            return
        number, num_bytes = known[0], storage.nbytes()
        before = self.live.get(number)
        if (0 if before is None else before.num_bytes) != _rounded(num_bytes):
            self._free(number)
            self._allocate(number, num_bytes)

    def mark(self, tensors: Iterable[object], kind: MemoryKind) -> None:
        """Sets the kind of tensors whose holder is known by now."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                local = local_part(tensor)
                if isinstance(local, FakeTensor):
                    self._log.kinds[self.number(local)] = kind

    def _allocate(self, number: int, num_bytes: int) -> None:
        # PyTorch's allocator gives no block for 0 bytes.
        if num_bytes:
            while self._died_elsewhere:
                self._free(self._died_elsewhere.pop())
            log = self._log
            is_on_host = number in self.on_host
            place, module = log.place(), log.module()
            self.append(Allocate(number, _rounded(num_bytes), self._kind(), place, module, log.stream, is_on_host))

    def _free(self, number: int) -> None:
        if number in self.live:
            self.append(Free(number))

    def _died(self, address: int, number: int, _: object) -> None:
        known = self._known.get(address)
        # A new storage may have got the same address meanwhile.
        if known is not None and known[0] == number:
            del self._known[address]
        self.on_gpu.discard(number)
        self.on_host.pop(number, None)
        if get_ident() == self._thread:
            self._free(number)
        else:
            self._died_elsewhere.append(number)

    def _kind(self) -> MemoryKind:
        if self._log.phases.is_in_optimizer:
            # State of an optimizer gets its kind when the step has ended, see `mark`.
            return "other"
        if _is_for_communication():
            return "communication"
        if is_in_backward() or self._log.module() >= 0:
            return "activations"
        return "other"


def _is_for_communication() -> bool:
    """Whether torch's own code for parallelism makes a tensor, such as the buffers of FSDP and the buckets of DDP."""
    path = calling_file(_BETWEEN)
    return any(folder in path for folder in _PARALLEL) or path.endswith(REPLICAS)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK) * _BLOCK


def sparse_tensor(line: str) -> UnsupportedOp:
    """Returns the refusal of a sparse tensor at a line of the program."""
    return UnsupportedOp(
        f"a sparse tensor at {line} is not foreseen, since its size depends on values: foresee the script with dense "
        "tensors there, as by nn.Embedding(sparse=False)"
    )
