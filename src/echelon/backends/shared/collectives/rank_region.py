"""Data areas of a group's shared region, as tensors and addresses."""

from __future__ import annotations

from typing import NamedTuple

import torch

from echelon._native import copy
from echelon.backends.formats import memory_layout
from echelon.backends.shared.collectives.native_calls import NativeCalls
from echelon.backends.shared.collectives.symmetric import SymmetricMemory
from echelon.backends.shared.collectives.sync_block import SyncBlock
from echelon.backends.shared.memory.segment import Window, words_of
from echelon.errors import ProtocolError

# Shapes whose views are kept: making a view takes microseconds.
_MAX_CACHED = 512


class SmallBuffers(NamedTuple):
    """Buffers of all ranks for small tensors of one shape and dtype."""

    rank: int
    """This rank."""
    own: int
    """Address of this rank's buffer."""
    places: tuple[torch.Tensor, ...]
    """The buffers, by rank."""
    addresses: tuple[int, ...]
    """Their addresses in this process, by rank."""
    num_bytes: int

    def write(self, tensor: torch.Tensor) -> None:
        """Copies a tensor into this rank's buffer."""
        # A call of torch costs a microsecond more.
        if tensor.is_contiguous():
            copy(self.own, tensor.data_ptr(), self.num_bytes)
        else:
            self.places[self.rank].copy_(tensor)

    def read(self, rank: int, tensor: torch.Tensor) -> None:
        """Copies a rank's buffer into a tensor."""
        if tensor.is_contiguous():
            copy(tensor.data_ptr(), self.addresses[rank], self.num_bytes)
        else:
            tensor.copy_(self.places[rank])


class RankRegions:
    """Rank regions of one group, as mapped by this rank."""

    def __init__(self, region: Window, num_ranks: int, rank: int) -> None:
        self._rank = rank
        self._data = region.data
        self._address = region.address
        self._starts = [rank * memory_layout.ROOM_BYTES for rank in range(num_ranks)]
        self._memory = region.memory
        self._words = words_of(region)
        self.known: dict[tuple[int, torch.Size, torch.dtype], SmallBuffers] = {}
        """Buffers that `small` has returned, by number of the copy, shape and dtype. Operations use copies 0 and 1 in
        turns."""
        self._small_parts: dict[tuple[int, torch.Size, torch.dtype], tuple[tuple[torch.Tensor, ...], ...]] = {}
        self.slot_bytes = memory_layout.slot_bytes(num_ranks)
        """Size of a slot."""

    def small(self, number: int, shape: torch.Size, dtype: torch.dtype) -> SmallBuffers:
        """Returns the buffers of all ranks for the data of small operation `number`."""
        key = (number & 1, shape, dtype)
        small = self.known.get(key)
        if small is None:
            if len(self.known) >= _MAX_CACHED:
                self.known.clear()
            size = shape.numel() * dtype.itemsize
            starts = [start + memory_layout.small_at(number) for start in self._starts]
            views = tuple(self._data[start : start + size].view(dtype).view(shape) for start in starts)
            addresses = tuple(self._address + start for start in starts)
            small = self.known[key] = SmallBuffers(self._rank, addresses[self._rank], views, addresses, size)
        return small

    def small_parts(self, number: int, shape: torch.Size, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Returns the buffers of `small`, split as torch.tensor_split does. Indexed by part, then by rank."""
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
        """Returns the address of a rank's buffer for the data of small operation `number`."""
        return self._address + self._starts[rank] + memory_layout.small_at(number)

    def write_text(self, number: int, text: bytes) -> None:
        """Writes a header at the start of this rank's small buffer. Its first word is its length in words."""
        start = self._starts[self._rank] + memory_layout.small_at(number)
        self._memory[start : start + len(text)] = text

    def read_text(self, rank: int, number: int) -> bytes:
        """Returns the header that a rank has written with `write_text`.

        Raises:
            ProtocolError: its length exceeds the buffer.
        """
        start = self._starts[rank] + memory_layout.small_at(number)
        # A peer wrote the length: it is checked before it is used.
        num_words = self._words[start // memory_layout.WORD_BYTES]
        if num_words > memory_layout.PLACE_BYTES // memory_layout.WORD_BYTES:
            raise ProtocolError(
                f"rank {rank} published a header of {num_words} words: {memory_layout.PLACE_BYTES} bytes fit"
            )
        return self._memory[start : start + num_words * memory_layout.WORD_BYTES]

    def elements(self, rank: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns elements at an offset in a rank's region, as a flat tensor."""
        start = self._starts[rank] + offset
        return self._data[start : start + count * dtype.itemsize].view(dtype)


class Shared(NamedTuple):
    """Memory and counters that the ranks of a group share, as seen by one rank."""

    rank: int
    num_ranks: int
    board: SyncBlock
    rooms: RankRegions
    symmetric: SymmetricMemory
    known: NativeCalls
    """Collectives that the native library runs by itself. To be forgotten when their way changes."""
