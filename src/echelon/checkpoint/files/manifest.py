"""Manifest of a checkpoint: its tensors, files and checksums, as JSON with a checksum of itself. Pure."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from echelon.checkpoint.files.layout import DTYPES, Entry, FileLayout, Part, layout_file
from echelon.errors import CheckpointError

FORMAT = 1
"""Version of the format that this library writes, and the newest that it reads."""
NAME = "manifest.json"
BLOCK = 4 << 20
"""Bytes of a file under one CRC32."""
MAX_MANIFEST = 1 << 30
"""Bytes of the longest manifest that is read. The manifest of 100,000 tensors on 1,000 ranks has 200 MB."""
_MAX_FILES = 1 << 17
_MAX_DIMS = 64
_MAX_BYTES = 1 << 60
"""Bytes of the largest tensor: an exabyte."""
# Text at the begin, so that the version is known without a parser: a newer format may have any body.
_HEAD = re.compile(rb'\{"echelon checkpoint": (\d{1,9}), "crc32": "([0-9a-f]{8})", "content": ')
_TAIL = b"}\n"


class StoredFile(NamedTuple):
    """Size of a file in bytes, and the CRC32 of each of its blocks of 4 MiB."""

    size: int
    crcs: tuple[int, ...]


class Stored(NamedTuple):
    """Elements [start, stop) of a tensor in a file."""

    file: int
    start: int
    stop: int


class Tensors:
    """Tensors of a checkpoint, and the file of each element."""

    def __init__(self, entries: dict[str, Entry], pieces: dict[str, tuple[Stored, ...]], num_files: int) -> None:
        """`pieces` of a tensor are in order and without gaps."""
        self.entries = entries
        self.pieces = pieces
        self.num_files = num_files

    @classmethod
    def assigned(cls, entries: dict[str, Entry], parts: Sequence[Sequence[Part]]) -> Tensors:
        """Returns the tensors whose parts lie in the file of each rank."""
        pieces: dict[str, list[Stored]] = {name: [] for name in entries}
        for number, each in enumerate(parts):
            for name, start, stop in each:
                pieces[name].append(Stored(number, start, stop))
        ordered = {
            name: tuple(sorted(places, key=lambda place: place.start)) for name, places in sorted(pieces.items())
        }
        return cls(entries, ordered, len(parts))

    @cached_property
    def layouts(self) -> list[FileLayout]:
        """Layout of each file."""
        parts: list[list[Part]] = [[] for _ in range(self.num_files)]
        for name, places in self.pieces.items():
            if not places:  # a tensor without elements, which readers of the files find in the first one
                parts[0].append(Part(name, 0, 0))
            for place in places:
                parts[place.file].append(Part(name, place.start, place.stop))
        return [layout_file(self.entries, each) for each in parts]


class Manifest(NamedTuple):
    """All that is known about a checkpoint without its tensors' values."""

    step: int
    seed: int | None
    versions: dict[str, Any]
    layout: dict[str, Any]
    tensors: Tensors
    data: dict[str, Any]
    own: list[dict[str, Any]]
    files: tuple[StoredFile, ...]


def file_name(number: int) -> str:
    """Returns the name of a rank's file."""
    return f"rank-{number:05d}.safetensors"


def content_of(manifest: Manifest) -> dict[str, Any]:
    """Returns a manifest as JSON-like data."""
    tensors = manifest.tensors
    return {
        "step": manifest.step,
        "seed": manifest.seed,
        "versions": manifest.versions,
        "layout": manifest.layout,
        "tensors": {
            name: {"dtype": entry.dtype, "shape": entry.shape, "pieces": tensors.pieces[name]}
            for name, entry in tensors.entries.items()
        },
        "data": manifest.data,
        "own": manifest.own,
        "files": [{"size": size, "crc32": crcs} for size, crcs in manifest.files],
    }


def encode(content: dict[str, Any]) -> bytes:
    """Returns the bytes of a manifest."""
    body = json.dumps(content).encode()
    head = f'{{"echelon checkpoint": {FORMAT}, "crc32": "{zlib.crc32(body):08x}", "content": '
    return head.encode() + body + _TAIL


def decode(data: bytes) -> Manifest:
    """Returns the manifest in the bytes of its file.

    Raises:
        CheckpointError: the bytes are damaged, of a newer version, or describe a checkpoint that cannot be.
    """
    head = _HEAD.match(data)
    if head is None:
        raise CheckpointError("it is not a manifest of Echelon")
    if is_newer(data):
        raise CheckpointError(
            f"a newer version of Echelon wrote it: it has format {int(head[1])}, and this one reads up to {FORMAT}; "
            "update Echelon"
        )
    body = memoryview(data)[head.end() : -len(_TAIL)]
    if not data.endswith(_TAIL) or f"{zlib.crc32(body):08x}".encode() != head[2]:
        raise CheckpointError("it is damaged: its CRC32 differs")
    try:
        return _parse(json.loads(bytes(body), object_pairs_hook=_unique))
    # RecursionError: lists inside of each other, more than Python's parser takes.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"it describes no checkpoint: {type(error).__name__}: {error}") from None


def is_newer(data: bytes) -> bool:
    """Whether the first bytes of a manifest are of a newer format."""
    head = _HEAD.match(data)
    return head is not None and int(head[1]) > FORMAT


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON leaves equal names to the reader, and Python takes the last one without a word.
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return values


def _parse(content: dict[str, Any]) -> Manifest:
    files = tuple(
        StoredFile(_count(file["size"]), tuple(_count(crc, 1 << 32) for crc in file["crc32"]))
        for file in content["files"]
    )
    if not 0 < len(files) <= _MAX_FILES:
        raise ValueError(f"{len(files)} files")
    entries, pieces = {}, {}
    for name, value in content["tensors"].items():
        entries[name] = _entry(name, value)
        pieces[name] = _pieces(name, entries[name].numel, value["pieces"], len(files))
    tensors = Tensors(entries, pieces, len(files))
    # Places in a file are not stored. They follow from the tensors, so none can lie outside of it.
    for number, (file, layout) in enumerate(zip(files, tensors.layouts, strict=True)):
        if (file.size, len(file.crcs)) != (layout.size, -(-layout.size // BLOCK)):
            raise ValueError(
                f"{file_name(number)} has {file.size} bytes and {len(file.crcs)} checksums, "
                f"and its tensors need {layout.size}"
            )
    seed, own = content["seed"], content["own"]
    if seed is not None and not isinstance(seed, int):
        raise ValueError("a seed that is no number")
    for value in (content["versions"], content["layout"], content["data"], *own):
        if not isinstance(value, dict):
            raise ValueError("a list or value in place of a dict")
    if len(own) != len(files):
        raise ValueError(f"{len(files)} files of {len(own)} ranks")
    return Manifest(
        *(_count(content["step"]), seed, content["versions"], content["layout"], tensors, content["data"], own, files)
    )


def _count(value: object, end: int = _MAX_BYTES) -> int:
    # True is an int, too.
    if type(value) is not int or not 0 <= value < end:
        raise ValueError(f"{str(value)[:40]} in place of a number from 0 to {end - 1}")
    return value


def _entry(name: str, value: dict[str, Any]) -> Entry:
    if value["dtype"] not in DTYPES:
        raise ValueError(f"{name} has the dtype {value['dtype']!r}, which this version does not know")
    shape = tuple(_count(size) for size in value["shape"])
    entry = Entry(value["dtype"], shape)
    if len(shape) > _MAX_DIMS or entry.numel * entry.itemsize >= _MAX_BYTES:
        raise ValueError(f"{name} has the shape {list(shape)}")
    return entry


def _pieces(name: str, numel: int, value: list[list[int]], num_files: int) -> tuple[Stored, ...]:
    """Returns the pieces of a tensor. Raises ValueError unless they have each element once."""
    end, pieces = 0, []
    for file, start, stop in value:
        place = Stored(_count(file, num_files), _count(start), _count(stop))
        if start < end:
            raise ValueError(f"{name}: elements {start} to {min(end, stop)} are doubled, also in {file_name(file)}")
        if start > end:
            raise ValueError(f"{name}: elements {end} to {start} are missing, before those in {file_name(file)}")
        if stop <= start:
            raise ValueError(f"{name}: elements {start} to {stop} in {file_name(file)}")
        pieces.append(place)
        end = stop
    if end != numel:
        raise ValueError(f"{name} has {numel} elements, and pieces of {end}: some are missing or too many")
    return tuple(pieces)
