"""The collectives on objects: JSON-like data, never pickled."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from echelon.calls.collectives import Collectives
from echelon.calls.member import Seconds

JsonLike = None | bool | int | float | str | list["JsonLike"] | dict[str, "JsonLike"]
"""What the object collectives carry."""


class ObjectCollectives(Collectives):
    """What all ranks of a group call together with objects."""

    def all_gather_object(self, value: JsonLike, timeout: Seconds = None) -> list[JsonLike]:
        """Returns the values of all ranks, in rank order. Values are JSON-like; nothing is pickled."""
        data = _encode(value)
        sizes = self.all_gather(torch.tensor([data.numel()], device="cpu"), timeout=timeout)
        parts = torch.split(self.all_gather(data, timeout=timeout), sizes.tolist())
        return [_decode(part) for part in parts]

    def broadcast_object(self, value: JsonLike = None, src: int = 0, timeout: Seconds = None) -> JsonLike:
        """Returns the value of rank `src` on every rank; what other ranks pass does not matter."""
        self._check_rank(src, "src")
        mine = value if self.rank == src else None
        return self.all_gather_object(mine, timeout)[src]


def _encode(value: JsonLike) -> Tensor:
    with torch.device("cpu"):  # whatever the caller's default is
        return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: Tensor) -> JsonLike:
    value: JsonLike = json.loads(bytes(data.numpy()))
    return value
