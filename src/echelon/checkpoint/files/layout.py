"""Layout of a safetensors file: its header, and the position of each part of a tensor. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

DTYPES = {
    # torch's name: (bytes of an element, name in safetensors)
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "int8": (1, "I8"),
    "uint16": (2, "U16"),
    "int16": (2, "I16"),
    "uint32": (4, "U32"),
    "int32": (4, "I32"),
    "uint64": (8, "U64"),
    "int64": (8, "I64"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float32": (4, "F32"),
    "float64": (8, "F64"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e8m0fnu": (1, "F8_E8M0"),
    "complex64": (8, "C64"),
    # The last ones have no name in safetensors: the file has their bytes, and the manifest their dtype.
    "float8_e4m3fnuz": (1, "U8"),
    "float8_e5m2fnuz": (1, "U8"),
    "complex32": (4, "U8"),
    "complex128": (16, "U8"),
}

_PREFIX = 8
"""Bytes of the header's length."""
_ALIGNMENT = 64
"""Alignment of the first tensor in the file: a cache line, and a multiple of each dtype's size."""


class Entry(NamedTuple):
    """Dtype and shape of a whole tensor."""

    dtype: str
    """torch's name, such as "bfloat16"."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype][0]

    @property
    def row(self) -> int:
        """Number of elements in an index of the first dimension. 1 for a scalar."""
        return math.prod(self.shape[1:])


class Part(NamedTuple):
    """Elements [start, stop) of the flattened tensor `name`."""

    name: str
    start: int
    stop: int


class Placed(NamedTuple):
    """Part of a tensor at bytes [begin, end) of a file."""

    part: Part
    begin: int
    end: int


class FileLayout(NamedTuple):
    """Header of a file, and the parts after it without gaps."""

    header: bytes
    """First bytes of the file: length, JSON and padding."""
    placed: tuple[Placed, ...]
    size: int
    """Bytes of the whole file."""
    begins: Mapping[Part, int]
    """First byte of each part."""


def layout_file(entries: Mapping[str, Entry], parts: Iterable[Part]) -> FileLayout:
    """Returns the layout of a file with the given parts. It follows from the arguments, in any order of the parts.

    A part that is whole rows lies under the name of its tensor, with its shape. So a tensor that one file has is found
    by every reader of safetensors, and torch.distributed.checkpoint puts rows of several files together. Other parts
    are flat, and have their range in the name.
    """
    # Wide elements first, so that each part is aligned to its elements.
    ordered = sorted(parts, key=lambda part: (-entries[part.name].itemsize, part))
    times = Counter(part.name for part in ordered)
    taken = {"__metadata__", *times}
    header: dict[str, object] = {}
    offsets: dict[str, object] = {}
    spans, position = [], 0
    for part in ordered:
        entry = entries[part.name]
        # max: a row of a shape such as [3, 0] has no elements.
        is_rows = part.start % max(entry.row, 1) == part.stop % max(entry.row, 1) == 0
        # A name stands once in a header, and "__metadata__" is a key of the format itself.
        if is_rows and times[part.name] == 1 and part.name != "__metadata__":
            key, shape, first = part.name, _rows(entry, part), [part.start // max(entry.row, 1)]
        else:
            key, shape, first = free_name(f"{part.name}@{part.start}-{part.stop}", taken), [part.stop - part.start], [0]
        spans.append((part, position, end := position + (part.stop - part.start) * entry.itemsize))
        name = DTYPES[entry.dtype][1]
        if name == "U8" and entry.dtype != "uint8":
            shape.append(entry.itemsize)  # a reader sees the bytes of each element as one more dim
        header[key] = {"dtype": name, "shape": shape, "data_offsets": [position, end]}
        offsets[key] = {"saved_offsets": first + [0] * (len(shape) - 1) if shape else []}
        position = end
    # Both keys are asked for by readers: the first by transformers, the second by torch's HuggingFaceStorageReader.
    header["__metadata__"] = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format allows spaces after the JSON.
    text += b" " * (-(_PREFIX + len(text)) % _ALIGNMENT)
    data = len(text).to_bytes(_PREFIX, "little") + text
    first_byte = len(data)
    placed = tuple(Placed(part, first_byte + begin, first_byte + end) for part, begin, end in spans)
    return FileLayout(data, placed, first_byte + position, {place.part: place.begin for place in placed})


def _rows(entry: Entry, part: Part) -> list[int]:
    if not entry.shape:
        return []
    if not entry.numel:
        return list(entry.shape)
    return [(part.stop - part.start) // entry.row, *entry.shape[1:]]


def free_name(key: str, taken: set[str]) -> str:
    """Returns a key like `key` that is not taken, and takes it."""
    while key in taken:
        key += "'"
    taken.add(key)
    return key
