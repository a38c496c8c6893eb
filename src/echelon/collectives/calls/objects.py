"""Collectives on objects: JSON-like data, sent as text and never pickled."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from echelon.backends.collective import Collective
from echelon.backends.modes import in_normal_mode
from echelon.collectives.calls.coalesced import Packed
from echelon.errors import ProtocolError, UnsupportedOp

JsonLike = None | bool | int | float | str | list["JsonLike"] | dict[str, "JsonLike"]
"""Values that object collectives accept."""
# Size in bytes of the length prefix.
_HEAD = 8


@in_normal_mode
def all_gather_object(value: JsonLike, purpose: str = "") -> Packed:
    """Returns the collective that gathers the values of all ranks on all ranks.

    Args:
        value: JSON-like.
        purpose: the user's call, if the library exchanges objects for it. So ranks in two calls do not exchange.
    """
    data = _encode(value)
    name = f"all_gather_object of {purpose}" if purpose else "all_gather_object"
    return Packed(Collective("all_gather", data.shape, data.dtype, name=name), data, _decode_all)


@in_normal_mode
def gather_object(value: JsonLike, dst: int) -> Packed:
    """Returns the collective that gathers the values of all ranks on rank `dst`. Its result is None on others."""
    data = _encode(value)
    collective = Collective("gather", data.shape, data.dtype, root=dst, name=f"gather_object(dst={dst})")
    return Packed(collective, data, lambda came: None if came is None else _decode_all(came))


@in_normal_mode
def broadcast_object(value: JsonLike, src: int, is_source: bool) -> Packed:
    """Returns the collective that sends the value of rank `src` to all. The values of other ranks are ignored."""
    data = _encode(value) if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")
    collective = Collective("broadcast_rows", data.shape, data.dtype, root=src, name=f"broadcast_object(src={src})")
    return Packed(collective, data, _decode_one)


@in_normal_mode
def scatter_object(values: Sequence[JsonLike] | None, src: int) -> Packed:
    """Returns the collective that sends each rank its value of rank `src`. Other ranks pass None for `values`."""
    name = f"scatter_object(src={src})"
    if values is None:
        return Packed(Collective("scatter", root=src, name=name), None, _decode_one)
    # Rows of equal length, since a scatter splits one tensor; `_decode_all` skips the padding.
    given = pad_sequence([_encode(value) for value in values], batch_first=True)
    return Packed(Collective("scatter", given.shape, given.dtype, root=src, name=name), given, _decode_one)


def _decode_one(data: Tensor) -> JsonLike:
    (value,) = _decode_all(data.view(-1))
    return value


def _encode(value: JsonLike) -> Tensor:
    """Returns the text of a value as bytes, after their number.

    Raises:
        UnsupportedOp: the value is not JSON-like.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedOp(f"an object that is not JSON-like: {error}; give lists, dicts, text and numbers") from error
    _check_keys(value)
    data = text.encode()
    with torch.device("cpu"):  # the caller may have set another default device
        return torch.frombuffer(bytearray(len(data).to_bytes(_HEAD, "little") + data), dtype=torch.uint8)


def _check_keys(value: JsonLike) -> None:
    """Raises UnsupportedOp for a key of a dict that JSON would change, such as 1 to "1"."""
    # A list of pending values, not recursion: deep nesting must not end in a RecursionError here.
    rest: list[object] = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    raise UnsupportedOp(f"a dict with the key {key!r}: keys are text in JSON, make it {str(key)!r}")
            rest.extend(item.values())
        elif isinstance(item, list | tuple):
            rest.extend(item)


def _decode_all(data: Tensor) -> list[JsonLike]:
    """Decodes consecutive values up to the padding.

    Raises:
        ProtocolError: the bytes of a value are not JSON.
    """
    memory, begin = data.numpy().tobytes(), 0
    values: list[JsonLike] = []
    # No value has length 0, so a length of 0 is padding.
    while begin < len(memory) and (size := int.from_bytes(memory[begin : begin + _HEAD], "little")):
        try:
            values.append(json.loads(memory[begin + _HEAD : begin + _HEAD + size]))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(
                f"an object of {size} bytes that is not JSON, or is nested too deeply: {error}"
            ) from error
        begin += _HEAD + size
    return values
