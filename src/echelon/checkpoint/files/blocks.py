"""Blocks of 4 MiB, each with a checksum, in which files are written and read.

Strategy. One helper thread writes a block while the calling thread computes the next checksum; both release the
interpreter's lock. At most two blocks are in flight, so a ring of three buffers never overwrites one of them.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

from echelon.checkpoint.files.fs import FileSystem, Input
from echelon.checkpoint.files.layout import FileLayout
from echelon.checkpoint.files.manifest import BLOCK, StoredFile, file_name
from echelon.errors import CheckpointError

RING = 3
"""Buffers for blocks that are made one by one."""


_CHUNK = 256 << 10
"""Bytes that are read at once: their checksum finds them in the cache. It takes 0.65 of the time of whole blocks."""
_SHORT = 64 << 10
"""Bytes for which a copy is cheaper than a call of the file system."""
_AHEAD = 2
"""Blocks that are read from the disk ahead of their use."""


class Read(NamedTuple):
    """Bytes of a file to be read into memory: from `begin` on, as many as `out` has."""

    begin: int
    out: memoryview


def write_file(fs: FileSystem, path: str, blocks: Iterable[memoryview]) -> StoredFile:
    """Writes a new file to disk and returns its size and checksums.

    Args:
        fs: the file system.
        path: name of the file.
        blocks: bytes of the file, 4 MiB each but the last. A block may be overwritten once the next but one is asked
            for.

    Raises:
        OSError: the file exists or cannot be written.
    """
    size, crcs = 0, []
    last: Future[None] | None = None
    with closing(fs.create(path)) as file:
        with ThreadPoolExecutor(1, "checkpoint") as helper:
            for block in blocks:
                # Before the wait: the helper writes the last block meanwhile.
                crcs.append(zlib.crc32(block))
                if last is not None:
                    last.result()
                last = helper.submit(file.write, block)
                size += len(block)
            if last is not None:
                last.result()
        file.sync()
    return StoredFile(size, tuple(crcs))


def cut(memory: memoryview) -> Iterator[memoryview]:
    """Yields memory in blocks."""
    for begin in range(0, len(memory), BLOCK):
        yield memory[begin : begin + BLOCK]


def read_file(fs: FileSystem, path: str) -> bytes:
    """Returns a whole small file. Raises OSError if it cannot be read."""
    with closing(fs.open(path)) as file:
        data = bytearray(file.size)
        return bytes(data[: file.read_into(0, memoryview(data))])


class CheckedFile:
    """File of a checkpoint of which each block is checked when it is read."""

    def __init__(self, fs: FileSystem, folder: str, number: int, stored: StoredFile, layout: FileLayout) -> None:
        """Opens the file.

        Args:
            fs: the file system.
            folder: folder of the checkpoint.
            number: number of the file.
            stored: its size and checksums, from the manifest.
            layout: its header and parts.

        Raises:
            CheckpointError: the file is missing or has another size.
            OSError: it cannot be read.
        """
        self._path = f"{folder}/{file_name(number)}"
        self._stored = stored
        self._layout = layout
        try:
            self._file: Input = fs.open(self._path)
        except FileNotFoundError:
            raise CheckpointError(f"{self._path} is missing; it holds {self._parts(0, stored.size)}") from None
        if self._file.size != stored.size:
            size = self._file.size
            self._file.close()
            raise CheckpointError(
                f"{self._path} has {size} bytes instead of {stored.size}: it is damaged, and holds "
                f"{self._parts(0, stored.size)}"
            )

    def close(self) -> None:
        """Frees the file."""
        self._file.close()

    def read(self, reads: Iterable[Read]) -> None:
        """Reads bytes into memory, and the header.

        Raises:
            CheckpointError: a block that has some of these bytes is damaged.
            OSError: the file cannot be read.
        """
        by_block: dict[int, list[tuple[int, memoryview]]] = {
            number: [] for number in range(-(-len(self._layout.header) // BLOCK))
        }
        for begin, out in reads:
            done = 0
            while done < len(out):
                number, inside = divmod(begin + done, BLOCK)
                count = min(BLOCK - inside, len(out) - done)
                by_block.setdefault(number, []).append((inside, out[done : done + count]))
                done += count
        spare = self._spare()
        numbers = sorted(by_block)
        for place, number in enumerate(numbers):
            if place + _AHEAD < len(numbers):  # the disk goes on while a checksum is computed
                self._file.prefetch(numbers[place + _AHEAD] * BLOCK, BLOCK)
            self._read_block(number, by_block[number], spare)

    def check(self) -> Iterator[str]:
        """Yields the problems of the whole file."""
        spare = self._spare()
        for number in range(len(self._stored.crcs)):
            try:
                self._read_block(number, [], spare)
            except CheckpointError as error:
                yield str(error)

    def _spare(self) -> memoryview:
        # Unlike a bytearray, only the pages that are used take time.
        return memoryview(mmap.mmap(-1, min(BLOCK, self._stored.size)))

    def _read_block(self, number: int, targets: list[tuple[int, memoryview]], spare: memoryview) -> None:
        begin = number * BLOCK
        size = min(BLOCK, self._stored.size - begin)
        header = self._layout.header[begin : begin + BLOCK]
        cover = _cover(targets, spare[:size])
        position, crc = begin, 0
        for memory in cover.memory:
            for first in range(0, len(memory), _CHUNK):
                chunk = memory[first : first + _CHUNK]
                position += self._file.read_into(position, chunk)
                crc = zlib.crc32(chunk, crc)
        if position < begin + size or crc != self._stored.crcs[number] or spare[: len(header)] != header:
            raise CheckpointError(
                f"{self._path} is damaged: bytes {begin} to {begin + size} differ from their CRC32; they hold "
                f"{self._parts(begin, begin + size)}"
            )
        for inside, out in cover.copies:
            out[:] = spare[inside : inside + len(out)]

    def _parts(self, begin: int, end: int) -> str:
        """Returns the tensors in bytes [begin, end) of the file as text."""
        names = [place.part.name for place in self._layout.placed if place.begin < end and place.end > begin]
        names = list(dict.fromkeys(names))
        text = ", ".join(names[:3]) or "no tensor"
        return f"{text} and {len(names) - 3} more" if len(names) > 3 else text


class _Cover(NamedTuple):
    """Memory for all bytes of a block."""

    memory: list[memoryview]
    """In the order of the file."""
    copies: list[tuple[int, memoryview]]
    """Targets to be filled out of the spare memory, with their place in it."""


def _cover(targets: list[tuple[int, memoryview]], spare: memoryview) -> _Cover:
    """Returns memory for a block: its targets where they are long, and spare memory elsewhere."""
    ordered = sorted(targets, key=lambda target: target[0])
    ends = [inside + len(out) for inside, out in ordered]
    if any(inside < end for (inside, _), end in zip(ordered[1:], ends, strict=False)):
        return _Cover([spare], ordered)  # two targets want the same bytes
    memory, copies, position = [], [], 0
    for inside, out in ordered:
        if len(out) < _SHORT:
            copies.append((inside, out))
        else:
            memory += [spare[position:inside], out]
            position = inside + len(out)
    return _Cover([*memory, spare[position:]], copies)
