"""The data in the rooms of a group, as tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from echelon.backends.shared import layout
from echelon.backends.shared.board import Board
from echelon.backends.shared.segment import Window
from echelon.backends.shared.symmetric import SymmetricMemory

_MEMMOVE_BYTES = 2048
"""Up to so many, moving bytes is faster than calling torch."""
_MAX_CACHED = 512
"""How many shapes to keep views for; making one takes microseconds."""


class Small(NamedTuple):
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
        if self.num_bytes <= _MEMMOVE_BYTES and tensor.is_contiguous():
            ctypes.memmove(self.addresses[self.rank], tensor.data_ptr(), self.num_bytes)
        else:
            self.places[self.rank].copy_(tensor)

    def read(self, rank: int, tensor: torch.Tensor) -> None:
        """Copies what a rank has written into a tensor."""
        if self.num_bytes <= _MEMMOVE_BYTES and tensor.is_contiguous():
            ctypes.memmove(tensor.data_ptr(), self.addresses[rank], self.num_bytes)
        else:
            tensor.copy_(self.places[rank])


class Rooms:
    """Where each rank of a group writes the data of operations, as this rank sees it."""

    def __init__(self, region: Window, num_ranks: int, rank: int) -> None:
        self._rank = rank
        self._data = region.data
        self._address = region.address
        self._starts = [rank * layout.ROOM_BYTES for rank in range(num_ranks)]
        self._words = memoryview(region.memory).cast("Q")
        self._small_bytes = [
            [
                self._data[start + at : start + at + layout.SMALL_BYTES]
                for at in (layout.small_at(0), layout.small_at(1))
            ]
            for start in self._starts
        ]
        self._small: dict[tuple[int, torch.Size, torch.dtype], Small] = {}
        self.slot_bytes = layout.slot_bytes(num_ranks)
        """How large a slot is."""
        self._slots: dict[torch.dtype, list[list[torch.Tensor]]] = {}

    def small(self, number: int, shape: torch.Size, dtype: torch.dtype) -> Small:
        """Returns the places of all ranks for the data of a small operation."""
        key = (number & 1, shape, dtype)
        small = self._small.get(key)
        if small is None:
            if len(self._small) >= _MAX_CACHED:
                self._small.clear()
            size = shape.numel() * dtype.itemsize
            starts = [start + layout.small_at(number) for start in self._starts]
            views = tuple(self._data[start : start + size].view(dtype).view(shape) for start in starts)
            addresses = tuple(self._address + start for start in starts)
            small = self._small[key] = Small(self._rank, views, addresses, size)
        return small

    def small_bytes(self, rank: int, number: int) -> torch.Tensor:
        """Returns the place of a rank for the data of a small operation, as bytes."""
        return self._small_bytes[rank][number & 1]

    def write_numbers(self, rank: int, number: int, values: Sequence[int]) -> None:
        """Writes numbers at the beginning of the place for a rank's small data."""
        start = self._first_word(rank, number)
        for index, value in enumerate(values, start):
            self._words[index] = value

    def read_numbers(self, rank: int, number: int, start: int, count: int) -> tuple[int, ...]:
        """Reads numbers that a rank has written."""
        first = self._first_word(rank, number) + start
        return tuple(self._words[first : first + count])

    def _first_word(self, rank: int, number: int) -> int:
        return (self._starts[rank] + layout.small_at(number)) // layout.WORD_BYTES

    def slots(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Returns the slots of every rank, by rank and slot, each a flat tensor."""
        slots = self._slots.get(dtype)
        if slots is None:
            starts = [start + layout.SLOTS for start in self._starts]
            areas = [self._data[start : start + layout.SLOTS_BYTES].view(dtype) for start in starts]
            slots = [list(torch.split(area, self.slot_bytes // dtype.itemsize)) for area in areas]
            self._slots[dtype] = slots
        return slots


class Shared(NamedTuple):
    """What the ranks of a group share, as one of them sees it."""

    rank: int
    num_ranks: int
    takes_turns: bool
    """Whether the ranks have to take turns on the cores, as far as this one knows."""
    board: Board
    rooms: Rooms
    symmetric: SymmetricMemory
