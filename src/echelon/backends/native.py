"""The collectives that a backend does itself for a group, instead of running plans over messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from echelon.backends.formats.wire import signed
from echelon.backends.operators import Operator


class LivenessCheck(Protocol):
    """Diagnosis of a pending operation: asks the peer that it waits for."""

    @property
    def next_check_at(self) -> float:
        """Time of the next check, in the backend's time."""
        ...

    def look(self, peer: int, has_come: Callable[[], bool]) -> None:
        """Asks a rank for its status; raises CollectiveMismatch if it will never make the awaited call."""
        ...


class Call(NamedTuple):
    """One call of a collective on one rank.

    sequence: its number in the group, from 1 on, the same on all ranks. operation: what this rank believes it is doing,
    the same text on all ranks or they disagree. signature: 32 bits that stand for all that was called up to here, this
    included; the same on all ranks or they disagree. deadline: when its time is up, in the backend's time. lookout: see
    `LivenessCheck`.
    """

    sequence: int
    operation: str
    signature: int
    deadline: float
    lookout: LivenessCheck

    @property
    def note(self) -> str:
        """The text that ranks compare: operation, sequence and signature."""
        return signed(self.operation, self.sequence, self.signature)


Allocate: TypeAlias = Callable[[Sequence[int]], torch.Tensor]
"""Returns the contiguous tensor of a shape that a result is to be written into."""
AllocateAny: TypeAlias = Callable[[Sequence[int], torch.dtype, torch.device], torch.Tensor]
"""As `Allocate`, of a result whose dtype and device are learned with its shape."""


class Gathered(NamedTuple):
    """Rows that came from all ranks, and how many from each."""

    tensor: torch.Tensor
    counts: list[int]


class NativeCollectives(ABC):
    """Collectives of one group on one rank, without messages. Calls may come in any thread.

    They mean what those of `ProcessGroup` mean; arguments have been checked, tensors may have any strides but no lazy
    conjugate or negative, ranks are those of the group. All raise CollectiveMismatch if ranks give different notes,
    PeerFailed, Timeout, and Closed.
    """

    @abstractmethod
    def all_reduce(self, call: Call, tensor: torch.Tensor, operator: Operator) -> None:
        """Combines `tensor` over all ranks, in place."""

    @abstractmethod
    def reduce(self, call: Call, tensor: torch.Tensor, dst: int, operator: Operator) -> None:
        """Combines `tensor` over all ranks, in place on rank `dst`."""

    @abstractmethod
    def reduce_scatter(self, call: Call, tensor: torch.Tensor, operator: Operator, place: Allocate) -> torch.Tensor:
        """Combines `tensor` over all ranks and returns this rank's part of dim 0, split as torch.tensor_split does."""

    @abstractmethod
    def broadcast(self, call: Call, tensor: torch.Tensor, src: int) -> None:
        """Overwrites `tensor` with that of rank `src`, in place."""

    @abstractmethod
    def all_gather(self, call: Call, rows: torch.Tensor, place: Allocate) -> torch.Tensor:
        """Returns the rows of all ranks, of which each may have another number."""

    @abstractmethod
    def gather(self, call: Call, rows: torch.Tensor, dst: int, place: Allocate) -> torch.Tensor | None:
        """Returns the rows of all ranks on rank `dst`, None on others."""

    @abstractmethod
    def scatter(self, call: Call, tensor: torch.Tensor | None, src: int, place: AllocateAny) -> torch.Tensor:
        """Returns this rank's part of the tensor of rank `src`; others need not know its shape and dtype."""

    @abstractmethod
    def all_to_all(self, call: Call, rows: torch.Tensor, splits: Sequence[int] | None, place: Allocate) -> Gathered:
        """Sends `splits[r]` rows to rank r (None: as torch.tensor_split does), and returns the received rows."""

    @abstractmethod
    def empty(self, call: Call, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a new tensor, the same shape on every rank, where collectives are the fastest."""

    @abstractmethod
    def barrier(self, call: Call) -> None:
        """Blocks until all ranks have called it."""
