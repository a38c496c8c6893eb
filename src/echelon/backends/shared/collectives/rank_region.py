"""The data in the rooms of a group, as tensors."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from echelon.backends.formats import memory_layout
from echelon.backends.shared.collectives.symmetric import SymmetricMemory
from echelon.backends.shared.collectives.sync_block import SyncBlock
from echelon.backends.shared.memory.segment import Window
from echelon.errors import ProtocolError

_MAX_CACHED = 512
"""How many shapes to keep views for; making one takes microseconds."""


class SmallBuffers(NamedTuple):
    """Where small tensors of one shape and dtype stand."""

    rank: int
    """This one."""
    places: tuple[torch.Tensor, ...]
    """By rank."""
    addresses: tuple[int, ...]
    """Of the places, in this process."""
    num_bytes: int

    def write(self, tensor: torch.Tensor) -> None:
        """Copies a tensor into this rank's place."""
        if tensor.is_contiguous():
            ctypes.memmove(self.addresses[self.rank], tensor.data_ptr(), self.num_bytes)
        else:
            self.places[self.rank].copy_(tensor)

    def read(self, rank: int, tensor: torch.Tensor) -> None:
        """Copies what a rank has written into a tensor."""
        if tensor.is_contiguous():
            ctypes.memmove(tensor.data_ptr(), self.addresses[rank], self.num_bytes)
        else:
            tensor.copy_(self.places[rank])


class RankRegions:
    """Where each rank of a group writes the data of operations, as this rank sees it."""

    def __init__(self, region: Window, num_ranks: int, rank: int) -> None:
        self._rank = rank
        self._data = region.data
        self._address = region.address
        self._starts = [rank * memory_layout.ROOM_BYTES for rank in range(num_ranks)]
        self._memory = region.memory
        self._words = memoryview(region.memory).cast("Q")
        self._small: dict[tuple[int, torch.Size, torch.dtype], SmallBuffers] = {}
        self._small_parts: dict[tuple[int, torch.Size, torch.dtype], tuple[tuple[torch.Tensor, ...], ...]] = {}
        self.slot_bytes = memory_layout.slot_bytes(num_ranks)
        """How large a slot is."""
        self._slots: dict[torch.dtype, list[list[torch.Tensor]]] = {}

    def small(self, number: int, shape: torch.Size, dtype: torch.dtype) -> SmallBuffers:
        """Returns the places of all ranks for the data of a small operation."""
        key = (number & 1, shape, dtype)
        small = self._small.get(key)
        if small is None:
            if len(self._small) >= _MAX_CACHED:
                self._small.clear()
            size = shape.numel() * dtype.itemsize
            starts = [start + memory_layout.small_at(number) for start in self._starts]
            views = tuple(self._data[start : start + size].view(dtype).view(shape) for start in starts)
            addresses = tuple(self._address + start for start in starts)
            small = self._small[key] = SmallBuffers(self._rank, views, addresses, size)
        return small

    def small_parts(self, number: int, shape: torch.Size, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Returns the parts of `small`, one for each rank as torch.tensor_split makes them."""
        key = (number & 1, shape, dtype)
        parts = self._small_parts.get(key)
        if parts is None:
            if len(self._small_parts) >= _MAX_CACHED:
                self._small_parts.clear()
            places = self.small(number, shape, dtype).places
            parts = tuple(zip(*(place.tensor_split(len(places)) for place in places), strict=True))
            self._small_parts[key] = parts
        return parts

    def small_at(self, rank: int, number: int) -> int:
        """Returns where in this process a rank's place for the data of a small operation begins."""
        return self._address + self._starts[rank] + memory_layout.small_at(number)

    def write_text(self, number: int, text: bytes) -> None:
        """Writes at the beginning of this rank's place for small data; the first word says how many words it is."""
        start = self._starts[self._rank] + memory_layout.small_at(number)
        self._memory[start : start + len(text)] = text

    def read_text(self, rank: int, number: int) -> bytes:
        """Returns what a rank has written with `write_text`.

        Raises:
            ProtocolError: it would be longer than its place.
        """
        start = self._starts[rank] + memory_layout.small_at(number)
        num_words = self._words[start // memory_layout.WORD_BYTES]
        if num_words > memory_layout.PLACE_BYTES // memory_layout.WORD_BYTES:
            raise ProtocolError(
                f"rank {rank} of the group showed a text of {num_words} words: {memory_layout.PLACE_BYTES} bytes fit"
            )
        return self._memory[start : start + num_words * memory_layout.WORD_BYTES]

    def slots(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Returns the slots of every rank, by rank and slot, each a flat tensor."""
        slots = self._slots.get(dtype)
        if slots is None:
            starts = [start + memory_layout.SLOTS for start in self._starts]
            areas = [self._data[start : start + memory_layout.SLOTS_BYTES].view(dtype) for start in starts]
            slots = [list(torch.split(area, self.slot_bytes // dtype.itemsize)) for area in areas]
            self._slots[dtype] = slots
        return slots

    def slot_at(self, rank: int, slot: int) -> int:
        """Returns where in this process a slot of a rank begins."""
        return self._address + self._starts[rank] + memory_layout.SLOTS + slot * self.slot_bytes


class Shared(NamedTuple):
    """What the ranks of a group share, as one of them sees it."""

    rank: int
    num_ranks: int
    takes_turns: bool
    """Whether the ranks have to take turns on the cores, as far as this one knows."""
    board: SyncBlock
    rooms: RankRegions
    symmetric: SymmetricMemory
