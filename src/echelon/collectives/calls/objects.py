"""Collectives on objects: JSON-like data, sent as text and never pickled."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from echelon.backends.native import Call, NativeCollectives
from echelon.collectives.calls import rows
from echelon.collectives.calls.chunks import RowChunks
from echelon.collectives.calls.operations import Operation, derived, place_of, run_plan
from echelon.collectives.calls.run import Channel
from echelon.errors import ProtocolError, UnsupportedOp

JsonLike = None | bool | int | float | str | list["JsonLike"] | dict[str, "JsonLike"]
"""Values that object collectives accept."""
# Size in bytes of the length prefix.
_HEAD = 8


def all_gather_object(value: JsonLike) -> Operation[list[JsonLike]]:
    """Returns the operation that gathers the values of all ranks on all ranks."""
    data = _encode(value)
    return derived(lambda: rows.all_gather(data), _decode_all, "all_gather_object", data.nbytes)


def gather_object(value: JsonLike, dst: int) -> Operation[list[JsonLike] | None]:
    """Returns the operation that gathers the values of all ranks on rank `dst`. Its result is None on others."""
    data = _encode(value)

    def finish(came: Tensor | None) -> list[JsonLike] | None:
        return None if came is None else _decode_all(came)

    return derived(lambda: rows.gather(data, dst), finish, f"gather_object(dst={dst})", data.nbytes)


def broadcast_object(value: JsonLike, src: int, is_source: bool) -> Operation[JsonLike]:
    """Returns the operation that sends the value of rank `src` to all. The values of other ranks are ignored."""
    data = _encode(value) if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")

    def act(channel: Channel) -> JsonLike:
        made: list[RowChunks] = []

        def chunks(count: int) -> RowChunks:
            parts = data.tensor_split(count) if is_source else ()
            made.append(RowChunks(count, dict(enumerate(parts))))
            return made[0]

        run_plan("broadcast", channel, chunks, root=src)
        (value,) = _decode_all(torch.cat([made[0][number] for number in range(len(made[0]))]))
        return value

    def native(collectives: NativeCollectives, call: Call) -> JsonLike:
        # Not a broadcast: other ranks do not know the size, and only gathers of rows exchange it. They give 0 rows.
        (value,) = _decode_all(collectives.all_gather(call, data, place_of(None, data)))
        return value

    return Operation(f"broadcast_object(src={src})", act, native, data.nbytes)


def scatter_object(values: Sequence[JsonLike] | None, src: int) -> Operation[JsonLike]:
    """Returns the operation that sends each rank its value of rank `src`. Other ranks pass None for `values`."""
    # Rows of equal length, since a scatter splits one tensor; `_decode_all` skips the padding.
    given = None if values is None else pad_sequence([_encode(value) for value in values], batch_first=True)

    def finish(part: Tensor) -> JsonLike:
        (value,) = _decode_all(part.view(-1))
        return value

    note = f"scatter_object(src={src})"
    return derived(lambda: rows.scatter(given, src), finish, note, 0 if given is None else given.nbytes)


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
