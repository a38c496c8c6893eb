"""The chunks that a plan moves: where they are in memory, and the messages that they make up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from echelon.backends.operators import Combine
from echelon.collectives.plan import Copy, Numbers, Recv, Reduce, Send, runs


class Chunks(ABC):
    """What the interpreter needs to know of the chunks. One message of a plan may be several tensors on the wire."""

    @abstractmethod
    def outgoing(self, step: Send) -> list[Tensor]:
        """Returns the tensors that a message consists of. They are not written until they are sent."""

    @abstractmethod
    def places(self, step: Recv | Reduce, busy: Collection[int]) -> list[Tensor | None]:
        """Returns where the tensors of a message are to be written, None for new ones. `busy` chunks are being sent."""

    @abstractmethod
    def keep(self, step: Recv | Reduce, came: Sequence[Tensor], combine: Combine | None) -> None:
        """Takes in the tensors of a message, when none of its chunks is busy any more."""

    @abstractmethod
    def copy(self, step: Copy) -> None:
        """Does a copy step."""


class Parts(Chunks):
    """Chunks that are parts of one flat tensor, one behind the other, and are changed in place.

    Every rank knows the sizes of all of them. Chunks with successive numbers are sent and received as one piece of
    memory, so nothing is copied.
    """

    def __init__(self, flat: Tensor, sizes: Sequence[int]) -> None:
        self._flat = flat
        self._bounds = list(accumulate(sizes, initial=0))
        self._made: dict[Numbers, list[Tensor]] = {}

    @classmethod
    def equal(cls, flat: Tensor, count: int) -> Parts:
        """Divides a tensor as evenly as can be, the larger parts first."""
        size, larger = divmod(flat.numel(), count)
        return cls(flat, [size + 1] * larger + [size] * (count - larger))

    def part(self, number: int) -> Tensor:
        """Returns a chunk."""
        return self._flat[self._bounds[number] : self._bounds[number + 1]]

    def _pieces(self, chunks: Numbers) -> list[Tensor]:
        if len(self._bounds) == 2:  # the one chunk that there is; small tensors have no time to lose
            return [self._flat] if chunks else []
        pieces = self._made.get(chunks)
        if pieces is None:  # most chunks come and go several times
            pieces = [self._flat[self._bounds[run.start] : self._bounds[run.stop]] for run in runs(chunks)]
            self._made[chunks] = pieces
        return pieces

    def outgoing(self, step: Send) -> list[Tensor]:  # noqa: D102
        return self._pieces(step.chunks)

    def places(self, step: Recv | Reduce, busy: Collection[int]) -> list[Tensor | None]:  # noqa: D102
        pieces = self._pieces(step.chunks)
        in_place = isinstance(step, Recv) and not any(chunk in busy for chunk in step.chunks)
        return list(pieces) if in_place else [None] * len(pieces)

    def keep(self, step: Recv | Reduce, came: Sequence[Tensor], combine: Combine | None) -> None:  # noqa: D102
        for own, other in zip(self._pieces(step.chunks), came, strict=True):
            if isinstance(step, Recv):
                if own.data_ptr() != other.data_ptr():
                    own.copy_(other)
                continue
            assert combine is not None, "a plan with Reduce steps needs an operator"
            if step.received_first:
                combine(other, own)
                own.copy_(other)
            else:
                combine(own, other)

    def copy(self, step: Copy) -> None:  # noqa: D102
        self.part(step.chunk).copy_(self.part(step.source))


class Tensors(Chunks):
    """Chunks that are tensors of their own, with rows of one kind but any number of them, and are never written.

    A rank learns the size of a chunk when it comes. Several chunks in one message are sent as their rows, one behind
    the other, and a tensor of how many rows each has.
    """

    def __init__(self, count: int, given: dict[int, Tensor]) -> None:
        self._tensors: list[Tensor | None] = [given.get(number) for number in range(count)]

    def __getitem__(self, number: int) -> Tensor:
        tensor = self._tensors[number]
        assert tensor is not None, "a plan uses a chunk that this rank does not have"
        return tensor

    def outgoing(self, step: Send) -> list[Tensor]:  # noqa: D102
        tensors = [self[number] for number in step.chunks]
        if len(tensors) == 1:
            return tensors
        if not tensors:  # as in a barrier; to make a tensor of a list takes seven times as long
            return [torch.empty(0, dtype=torch.int64, device="cpu")]
        counts = torch.tensor([len(tensor) for tensor in tensors], dtype=torch.int64, device="cpu")
        return [counts, torch.cat(tensors)]

    def places(self, step: Recv | Reduce, busy: Collection[int]) -> list[Tensor | None]:  # noqa: ARG002, D102
        return [None] if len(step.chunks) < 2 else [None, None]

    def keep(self, step: Recv | Reduce, came: Sequence[Tensor], combine: Combine | None) -> None:  # noqa: ARG002, D102
        assert isinstance(step, Recv), "tensors of their own are not combined"
        tensors = came if len(step.chunks) == 1 else torch.split(came[-1], came[0].tolist()) if step.chunks else ()
        for number, tensor in zip(step.chunks, tensors, strict=True):
            self._tensors[number] = tensor

    def copy(self, step: Copy) -> None:  # noqa: D102
        self._tensors[step.chunk] = self[step.source]
