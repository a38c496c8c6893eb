"""JSON-like form of state dicts, with their tensors aside.

Python's tuples, counters, sets, bytes, dicts with other keys than text, and numbers that JSON lacks come back as they
were. So the state of a scheduler or a random generator is the same value after it was saved.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from echelon.arguments import named
from echelon.backends.admission import check_values
from echelon.checkpoint.files.layout import free_name
from echelon.checkpoint.state import Json
from echelon.errors import InvalidArgument

_MARK = "!"
"""Begins the only key of a dict that stands for another value. A dict with such a key of its own is stored as pairs."""
_DEEPEST = 50
"""Values inside of each other. Python's own limit of recursion ends at a few hundred."""
_LONGEST = 14_000
"""Bits of the longest number. Python refuses to write or read longer ones as text."""
_EXACT = 2**53
"""Whole numbers from here on are stored as text: many readers of JSON take them for floats."""

_SAMPLES = 64
"""Elements of a tensor that `samples` takes, or up to twice as many."""


class PerRank:
    """Value in `extra` that each rank has for itself. `load` gives each rank its own back, without the wrapper.

    Args:
        value: JSON-like data or tensors of this rank.
    """

    def __init__(self, value: object) -> None:
        """Takes JSON-like data or tensors."""
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class Encoded(NamedTuple):
    """Value as JSON-like data, and the tensors that it refers to by name."""

    data: Json
    tensors: dict[str, Tensor]

    def digest(self) -> str:
        """Returns a digest of the data and of the tensors' shapes, dtypes and bits."""
        found = hashlib.blake2b(json.dumps(self.data, sort_keys=True).encode(), digest_size=16)
        for name, tensor in self.tensors.items():
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {checksum(tensor)}".encode())
        return found.hexdigest()


def checksum(tensor: Tensor) -> int:
    """Returns the CRC32 of a tensor's elements, in their order."""
    data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(cast("Any", data.numpy()))


class Sample(NamedTuple):
    """Some elements of a tensor, from its first to its last."""

    crc32: int
    taken: int
    """Number of the elements."""
    not_finite: int
    """How many of them are NaN or infinite."""


def samples(tensors: Iterable[Tensor]) -> list[Sample]:
    """Returns a sample of each tensor.

    Samples tell replicas apart that were trained differently, and weights that a NaN has spread to. They cost a
    thousandth of a checksum.
    """
    parts, dtypes = [], []
    for tensor in tensors:
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        dtypes.append(flat.dtype)
        parts.append(flat[::step][: 2 * _SAMPLES].contiguous().view(torch.uint8))
    found = []
    for part, dtype in zip(parts if all(each.is_cpu for each in parts) else _to_cpu(parts), dtypes, strict=True):
        values = part.view(dtype)
        bad = 0
        if dtype.is_floating_point or dtype.is_complex:
            # isfinite is not made for the floats of 8 bits.
            finite = (values.float() if dtype.itemsize == 1 else values).isfinite()
            bad = finite.numel() - int(finite.count_nonzero())
        found.append(Sample(zlib.crc32(cast("Any", part.numpy())), len(values), bad))
    return found


def _to_cpu(parts: list[Tensor]) -> list[Tensor]:
    """Returns copies on the CPU. One transfer for each device, since each waits for it."""
    found: dict[int, Tensor] = {}
    for device in {part.device for part in parts}:
        there = [index for index, part in enumerate(parts) if part.device == device]
        sizes = [parts[index].numel() for index in there]
        came = torch.split(torch.cat([parts[index] for index in there]).cpu(), sizes)
        found |= dict(zip(there, came, strict=True))
    return [found[index] for index in range(len(parts))]


def encode(value: object, name: str) -> Encoded:
    """Returns a value as JSON-like data.

    Args:
        value: numbers, text, bytes, tensors, arrays, and lists, tuples, sets and dicts of them.
        name: name of the value; its tensors are called `name`/key/index.

    Raises:
        InvalidArgument: a part of the value is something else. The message has its place.
        UnsupportedOp: a tensor has no values of its own.
    """
    tensors: dict[str, Tensor] = {}
    return Encoded(_encode(value, name, tensors, []), tensors)


def decode(data: Json, tensor_of: Callable[[str], Tensor]) -> Any:
    """Returns the value that `encode` was given.

    Args:
        data: the JSON-like data.
        tensor_of: returns a tensor by its name.
    """
    if isinstance(data, list):
        return [decode(item, tensor_of) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((key, inner),) = data.items()
        if key.startswith(_MARK):
            return _decode_marked(key.removeprefix(_MARK), inner, tensor_of)
    return {key: decode(item, tensor_of) for key, item in data.items()}


def tensor_names(data: Json) -> set[str]:
    """Returns the names of the tensors that encoded data refers to."""
    if isinstance(data, list):
        return set().union(*map(tensor_names, data)) if data else set()
    if not isinstance(data, dict):
        return set()
    if len(data) == 1:
        ((key, inner),) = data.items()
        if key == _MARK + "tensor":
            return {str(inner)}
        if key == _MARK + "array":
            assert isinstance(inner, list)
            return {str(inner[0])}
    return set().union(*map(tensor_names, data.values())) if data else set()


def joined(*parts: str) -> str:
    """Returns the name of a tensor inside a value. A slash inside of a part cannot be mistaken for a border."""
    return "/".join([parts[0], *(part.replace("~", "~0").replace("/", "~1") for part in parts[1:])])


def _encode(value: object, name: str, tensors: dict[str, Tensor], around: list[int]) -> Json:
    # Before bool: numpy's is no bool, and would pass for the int that it is converted to.
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if value.bit_length() > _LONGEST:
            raise InvalidArgument(f"{name} is a number of {value.bit_length()} bits: at most {_LONGEST} can be stored")
        return int(value) if abs(value) < _EXACT else {_MARK + "int": str(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_MARK + "float": repr(float(value))}
    if isinstance(value, complex):
        return {_MARK + "complex": [_encode(part, name, tensors, []) for part in (value.real, value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {_MARK + "bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        check_values(value, f"a checkpoint, {name},")
        tensors[name] = value.detach()
        return {_MARK + "tensor": name}
    if isinstance(value, np.ndarray):
        return {_MARK + "array": [name, *_array(value, name, tensors)]}
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        if id(value) in around:
            raise InvalidArgument(f"{name} contains itself, and JSON-like data cannot: take it out")
        if len(around) >= _DEEPEST:
            raise InvalidArgument(f"{name[:100]} is nested more than {_DEEPEST} deep: flatten it")
        return _encode_nested(value, name, tensors, [*around, id(value)])
    if isinstance(value, PerRank):
        raise InvalidArgument(
            f"{name} is a PerRank inside of another value: wrap the whole entry of extra, once, such as "
            "extra={'seen': PerRank([1, 2])}"
        )
    raise InvalidArgument(
        f"{name} is {named(value)}, and a checkpoint takes numbers, text, tensors, and lists and dicts of them: store "
        "its parts, or give it state_dict and load_state_dict and pass it by a keyword of its own"
    )


def _encode_nested(
    value: Mapping[Any, Any] | Iterable[Any], name: str, tensors: dict[str, Tensor], around: list[int]
) -> Json:
    def items(found: Iterable[Any]) -> list[Json]:
        return [_encode(item, joined(name, str(index)), tensors, around) for index, item in enumerate(found)]

    if isinstance(value, Mapping):
        is_plain = all(isinstance(key, str) and not key.startswith(_MARK) for key in value)
        if is_plain and not isinstance(value, Counter):
            return {str(key): _encode(item, joined(name, str(key)), tensors, around) for key, item in value.items()}
        pairs: list[Json] = []
        taken: set[str] = set()
        for index, (key, item) in enumerate(value.items()):
            encoded = encode(key, f"{name}, key {index},")
            if encoded.tensors:
                raise InvalidArgument(
                    f"{name} has a tensor as a key, which is found by its identity: use names as keys"
                )
            # Keys such as 1 and "1" have the same text: the second one's tensor would replace the first one's.
            text = free_name(str(key), taken)
            pairs.append([encoded.data, _encode(item, joined(name, text), tensors, around)])
        return {_MARK + ("counter" if isinstance(value, Counter) else "dict"): pairs}
    if isinstance(value, tuple):
        return {_MARK + "tuple": items(value)}
    if isinstance(value, set | frozenset):
        # Sorted: text has another hash in each process, and ranks compare digests of their values.
        return {_MARK + ("set" if isinstance(value, set) else "frozenset"): items(sorted(value, key=repr))}
    return items(value)


def _array(value: np.ndarray[Any, Any], name: str, tensors: dict[str, Tensor]) -> list[Json]:
    if value.dtype.kind not in "biufc" or value.dtype.byteorder == ">":
        raise InvalidArgument(f"{name} is an array of {value.dtype}, which has no numbers: store it as a list")
    data = np.ascontiguousarray(value)
    # A copy, since torch warns of arrays that cannot be written to.
    tensors[name] = torch.from_numpy(data.reshape(-1).view(np.uint8).copy())
    return [str(value.dtype), list(value.shape)]


def _decode_marked(kind: str, data: Json, tensor_of: Callable[[str], Tensor]) -> Any:
    if kind == "tensor":
        return tensor_of(str(data))
    if kind == "array":
        name, dtype, shape = cast("tuple[str, str, list[int]]", data)
        return tensor_of(name).numpy().view(np.dtype(dtype)).reshape(shape).copy()
    if kind in ("int", "float"):
        return {"int": int, "float": float}[kind](str(data))
    if kind == "bytes":
        return base64.b64decode(str(data))
    inner = [decode(item, tensor_of) for item in cast("list[Json]", data)]
    if kind == "complex":
        return complex(*inner)
    if kind in ("dict", "counter"):
        pairs = dict(inner)
        return Counter(pairs) if kind == "counter" else pairs
    makers: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
    return makers[kind](inner)
