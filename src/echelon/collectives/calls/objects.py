"""The collectives on objects: JSON-like data, moved as text and never pickled."""

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
"""What the object collectives carry."""
_HEAD = 8
"""Bytes of the number of bytes that follow."""


def all_gather_object(value: JsonLike) -> Operation[list[JsonLike]]:
    """Returns the values of all ranks."""
    data = _encode(value)
    return derived(lambda: rows.all_gather(data), _decode_all, "all_gather_object", data.nbytes)


def gather_object(value: JsonLike, dst: int) -> Operation[list[JsonLike] | None]:
    """Returns the values of all ranks on rank `dst`, None on others."""
    data = _encode(value)

    def finish(came: Tensor | None) -> list[JsonLike] | None:
        return None if came is None else _decode_all(came)

    return derived(lambda: rows.gather(data, dst), finish, f"gather_object(dst={dst})", data.nbytes)


def broadcast_object(value: JsonLike, src: int, is_source: bool) -> Operation[JsonLike]:
    """Returns the value of rank `src`; what the others give is not looked at."""
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
        """Others do not know the size, which is what gathering rows is for."""
        (value,) = _decode_all(collectives.all_gather(call, data, place_of(None, data)))
        return value

    return Operation(f"broadcast_object(src={src})", act, native, data.nbytes)


def scatter_object(values: Sequence[JsonLike] | None, src: int) -> Operation[JsonLike]:
    """Returns this rank's of the values of rank `src`; the others give None."""
    given = None if values is None else pad_sequence([_encode(value) for value in values], batch_first=True)

    def finish(part: Tensor) -> JsonLike:
        (value,) = _decode_all(part.view(-1))
        return value

    note = f"scatter_object(src={src})"
    return derived(lambda: rows.scatter(given, src), finish, note, 0 if given is None else given.nbytes)


def _encode(value: JsonLike) -> Tensor:
    """Returns the text of a value as bytes, their number in front.

    Raises:
        UnsupportedOp: it is not JSON-like.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedOp(f"an object that is not JSON-like: {error}; give lists, dicts, text and numbers") from error
    _check_keys(value)
    data = text.encode()
    with torch.device("cpu"):  # whatever the caller's default is
        return torch.frombuffer(bytearray(len(data).to_bytes(_HEAD, "little") + data), dtype=torch.uint8)


def _check_keys(value: JsonLike) -> None:
    """Raises UnsupportedOp for a key of a dict that would come as another than it is."""
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
    """Returns the values that were encoded one behind the other; nothing more is padding."""
    memory, begin = data.numpy().tobytes(), 0
    values: list[JsonLike] = []
    while begin < len(memory) and (size := int.from_bytes(memory[begin : begin + _HEAD], "little")):
        try:
            values.append(json.loads(memory[begin + _HEAD : begin + _HEAD + size]))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(
                f"an object of {size} bytes that is not JSON, or is nested too deeply: {error}"
            ) from error
        begin += _HEAD + size
    return values
