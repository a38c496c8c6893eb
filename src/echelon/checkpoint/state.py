"""Values between a program's objects and the files of a checkpoint."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
"""JSON-like data. Keys of dicts are text; a tuple comes back as a list."""


class Spec(NamedTuple):
    """Shape and dtype of a whole, unsplit tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Piece(NamedTuple):
    """Range of a tensor's elements that a rank holds.

    Replicas hold the same ranges. A writer decides which of them stores an element.
    """

    name: str
    start: int
    """First element, in the flattened tensor."""
    values: Tensor
    """Elements [start, start + numel), of any shape and strides, on any device."""


class State(NamedTuple):
    """One rank's part of a checkpoint."""

    specs: dict[str, Spec]
    """Every tensor that this rank knows, by name."""
    pieces: list[Piece]
    data: dict[str, Json]
    """Values that are the same on all ranks."""
    own: dict[str, Json]
    """Values of this rank alone."""


class Wanted(NamedTuple):
    """Range of a tensor's elements to be read."""

    name: str
    start: int
    out: Tensor
    """Flat and contiguous target of elements [start, start + numel)."""
