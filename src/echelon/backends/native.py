"""The collectives that a backend does itself for a group, instead of running plans over messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from echelon.backends.operators import Operator


class Call(Protocol):
    """One call of a collective on one rank."""

    @property
    def sequence(self) -> int:
        """Its number in the group, from 1 on, the same on all ranks."""
        ...

    @property
    def note(self) -> str:
        """What this rank believes it is doing; the same text on all ranks, or they disagree."""
        ...

    @property
    def deadline(self) -> float:
        """When its time is up, in the backend's time."""
        ...


class NativeCollectives(ABC):
    """The collectives of one group as one rank does them. Every call of the group comes here, in its own order.

    All of them raise CollectiveMismatch if ranks give different notes, PeerFailed, Timeout, and Closed.
    """

    @abstractmethod
    def all_reduce(self, call: Call, tensor: torch.Tensor, operator: Operator) -> None:
        """Combines `tensor`, of any strides, over all ranks, in place."""

    @abstractmethod
    def agree(self, call: Call) -> None:
        """Returns when all ranks have come with the same note; what follows is done by messages."""
