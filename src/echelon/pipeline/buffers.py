"""Memory that received tensors are written into, used again as soon as nothing refers to it any more."""

from __future__ import annotations

from typing import TypeAlias

import torch

from echelon._torch_private import storage_users

_Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


class Buffers:
    """Hands out tensors. There are as many as were in use at once, however many are asked for.

    Nobody gives a buffer back: whether a microbatch's graph, an output that the user kept or a view of either still
    refers to it, its memory knows.
    """

    def __init__(self) -> None:
        self._made: dict[_Kind, list[torch.Tensor]] = {}
        self._asked_for: set[_Kind] = set()

    def __len__(self) -> int:
        """Returns how many buffers there are."""
        return sum(map(len, self._made.values()))

    @property
    def num_bytes(self) -> int:
        """What they hold."""
        return sum(tensor.untyped_storage().nbytes() for made in self._made.values() for tensor in made)

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a contiguous tensor with any content."""
        kind = (shape, dtype, device)
        self._asked_for.add(kind)
        made = self._made.setdefault(kind, [])
        for tensor in made:
            if storage_users(tensor) == 1:
                return tensor.detach()
        with torch.inference_mode(False):
            made.append(torch.empty(shape, dtype=dtype, device=device))
        return made[-1].detach()

    def forget_unused(self) -> None:
        """Frees the kinds that were not asked for since this was called last."""
        for kind in [kind for kind in self._made if kind not in self._asked_for]:
            del self._made[kind]
        self._asked_for.clear()
