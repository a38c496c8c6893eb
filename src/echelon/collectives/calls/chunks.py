"""Chunks of a plan in memory, and the messages that carry them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from echelon.backends.operators import Combine
from echelon.collectives.plans.plan import Copy, Numbers, Recv, Reduce, Send, runs


class Chunks(ABC):
    """Chunks of one rank, as the interpreter sees them. A message of a plan may be several tensors on the wire."""

    sizes_are_known: bool
    """Whether a message that does not fit its buffer is an error."""
    combines_in_place: bool
    """Whether a message for a Reduce can be combined into its buffer while it arrives."""

    @abstractmethod
    def outgoing(self, step: Send) -> list[Tensor]:
        """Returns the tensors of a message. They must not be written until they are sent."""

    @abstractmethod
    def places(self, step: Recv | Reduce, busy: frozenset[int]) -> list[Tensor | None]:
        """Returns a buffer for each tensor of a message, to receive or combine into. None: a new tensor.

        `busy` chunks are being sent in the same round.
        """

    @abstractmethod
    def keep(self, step: Recv | Reduce, came: Sequence[Tensor], combine: Combine | None) -> None:
        """Stores the tensors of a received message, unless they are in their buffers already.

        Called only when none of its chunks is being sent any more.
        """

    @abstractmethod
    def copy(self, step: Copy) -> None:
        """Runs a Copy step."""


class FlatChunks(Chunks):
    """Chunks that are consecutive parts of one flat tensor, changed in place.

    Every rank knows all of their sizes. Chunks with successive numbers are sent and received as one piece of memory, so
    nothing is copied.
    """

    sizes_are_known = True
    combines_in_place = True

    def __init__(self, flat: Tensor, sizes: Sequence[int]) -> None:
        self._flat = flat
        self._bounds = list(accumulate(sizes, initial=0))
        self._made: dict[Numbers, list[Tensor]] = {}

    @classmethod
    def equal(cls, flat: Tensor, count: int) -> FlatChunks:
        """Divides a tensor as evenly as possible, the larger parts first."""
        return cls(flat, even_sizes(flat.numel(), count))

    def part(self, number: int) -> Tensor:
        """Returns a chunk as a view."""
        return self._flat[self._bounds[number] : self._bounds[number + 1]]

    def _pieces(self, chunks: Numbers) -> list[Tensor]:
        if len(self._bounds) == 2:  # fast path for one chunk: algorithms for small tensors have only one
            return [self._flat] if chunks else []
        pieces = self._made.get(chunks)
        if pieces is None:  # cached: most chunks are sent or received several times
            pieces = [self._flat[self._bounds[run.start] : self._bounds[run.stop]] for run in runs(chunks)]
            self._made[chunks] = pieces
        return pieces

    def outgoing(self, step: Send) -> list[Tensor]:  # noqa: D102
        return self._pieces(step.chunks)

    def places(self, step: Recv | Reduce, busy: frozenset[int]) -> list[Tensor | None]:  # noqa: D102
        pieces = self._pieces(step.chunks)
        # A chunk that is being sent must not change: its message is received elsewhere, and stored by `keep`.
        in_place = busy.isdisjoint(step.chunks)
        return list(pieces) if in_place else [None] * len(pieces)

    def keep(self, step: Recv | Reduce, came: Sequence[Tensor], combine: Combine | None) -> None:  # noqa: D102
        for own, other in zip(self._pieces(step.chunks), came, strict=True):
            # Received, or combined, in place already.
            if own.data_ptr() == other.data_ptr():
                continue
            if isinstance(step, Reduce):
                in_order(step, combine)(own, other)
            else:
                own.copy_(other)

    def copy(self, step: Copy) -> None:  # noqa: D102
        self.part(step.chunk).copy_(self.part(step.source))


def in_order(step: Reduce, combine: Combine | None) -> Combine:
    """Returns the operator of a step, with own and received values in the order that it demands."""
    assert combine is not None, "a plan with Reduce steps needs an operator"
    if not step.received_first:
        return combine

    def received_first(own: Tensor, other: Tensor) -> None:
        combine(other, own)
        own.copy_(other)

    return received_first


class ReadOnlyChunks(Chunks):
    """Chunks that are parts of one flat tensor, which is never written. On the wire they equal `FlatChunks`.

    A result is stored in the memory of the received message, so nothing is copied.
    """

    sizes_are_known = True
    combines_in_place = False

    def __init__(self, flat: Tensor, sizes: Sequence[int], wanted: int = -1, place: Tensor | None = None) -> None:
        """Divides a tensor.

        Args:
            flat: Tensor of shape (sum(sizes),).
            sizes: Number of elements of each chunk.
            wanted: Number of the chunk that should end up in `place`, if it is received in a message of its own.
            place: Flat tensor for that chunk. None: a new one.
        """
        self._sizes = sizes
        self._chunks = list(torch.split(flat, list(sizes)))
        self._owned: set[int] = set()
        self._wanted, self._place = wanted, place

    def take(self, number: int) -> Tensor:
        """Returns a chunk in memory of its own."""
        # Copied only if it is a view of the caller's tensor, or of a message that holds other chunks as well.
        chunk = self._chunks[number]
        is_alone = number in self._owned and chunk.untyped_storage().nbytes() == chunk.nbytes
        return chunk if is_alone or self._is_placed(number) else chunk.clone()

    def _is_placed(self, number: int) -> bool:
        return self._place is not None and self._chunks[number].data_ptr() == self._place.data_ptr()

    def outgoing(self, step: Send) -> list[Tensor]:  # noqa: D102
        return [_join(self._chunks[run.start : run.stop]) for run in runs(step.chunks)]

    def places(self, step: Recv | Reduce, busy: frozenset[int]) -> list[Tensor | None]:  # noqa: ARG002, D102
        if step.chunks == (self._wanted,) and not self._is_placed(self._wanted):
            return [self._place]
        return [None] * len(runs(step.chunks))

    def keep(self, step: Recv | Reduce, came: Sequence[Tensor], combine: Combine | None) -> None:  # noqa: D102
        for run, piece in zip(runs(step.chunks), came, strict=True):
            if isinstance(step, Reduce):
                assert combine is not None, "a plan with Reduce steps needs an operator"
                own = _join(self._chunks[run.start : run.stop])
                if len(run) == 1 and self._is_placed(run.start):
                    combine(own, piece)
                    continue
                # The order of the two does not matter here: a chunk ends on one rank only, so no other rank has to have
                # the same bits. This order leaves the result in the memory of the message.
                combine(piece, own)
            self._chunks[run.start : run.stop] = torch.split(piece, list(self._sizes[run.start : run.stop]))
            self._owned.update(run)

    def copy(self, step: Copy) -> None:  # noqa: D102
        self._chunks[step.chunk] = self._chunks[step.source]
        (self._owned.add if step.source in self._owned else self._owned.discard)(step.chunk)


class RowChunks(Chunks):
    """Chunks that are separate tensors with equal row shapes and any number of rows. They are never written.

    A rank learns the size of a chunk when it arrives. Several chunks in one message are sent as a tensor of their row
    counts and a tensor of all rows. A chunk is received in its buffer if it fits.
    """

    sizes_are_known = False
    combines_in_place = False

    def __init__(self, count: int, given: Mapping[int, Tensor], places: Mapping[int, Tensor] | None = None) -> None:
        """Starts with the chunks that this rank has.

        Args:
            count: Number of chunks of the plan.
            given: Chunks of this rank, by number.
            places: Buffers for chunks to receive, by number. Used if a chunk has the size of its buffer.
        """
        self._tensors: list[Tensor | None] = [given.get(number) for number in range(count)]
        self._places = places or {}

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, number: int) -> Tensor:
        tensor = self._tensors[number]
        assert tensor is not None, "a plan uses a chunk that this rank does not have"
        return tensor

    def outgoing(self, step: Send) -> list[Tensor]:  # noqa: D102
        tensors = [self[number] for number in step.chunks]
        if len(tensors) == 1:
            return tensors
        if not tensors:  # fast path for a barrier: torch.tensor of a list takes seven times as long as torch.empty
            return [torch.empty(0, dtype=torch.int64, device="cpu")]
        counts = torch.tensor([len(tensor) for tensor in tensors], dtype=torch.int64, device="cpu")
        return [counts, _join(tensors)]

    def places(self, step: Recv | Reduce, busy: frozenset[int]) -> list[Tensor | None]:  # noqa: ARG002, D102
        places = [self._places.get(number) for number in step.chunks]
        if len(places) == 1:
            return places
        known = [place for place in places if place is not None]
        # The row counts come first. The rows fit in place only if the buffers of all chunks are adjacent in memory.
        return [None, _adjacent(known) if len(known) == len(places) else None] if places else [None]

    def keep(self, step: Recv | Reduce, came: Sequence[Tensor], combine: Combine | None) -> None:  # noqa: ARG002, D102
        assert isinstance(step, Recv), "tensors of their own are not combined"
        tensors = came if len(step.chunks) == 1 else torch.split(came[-1], came[0].tolist()) if step.chunks else ()
        for number, tensor in zip(step.chunks, tensors, strict=True):
            self._tensors[number] = tensor

    def copy(self, step: Copy) -> None:  # noqa: D102
        self._tensors[step.chunk] = self[step.source]


def even_sizes(total: int, count: int) -> list[int]:
    """Divides a number as evenly as possible, the larger parts first, as torch.tensor_split does."""
    size, larger = divmod(total, count)
    return [size + 1] * larger + [size] * (count - larger)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates tensors along dim 0. Copies nothing if they are adjacent in memory."""
    whole = _adjacent(tensors)
    return torch.cat(list(tensors)) if whole is None else whole


def _adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns contiguous tensors that are adjacent in memory as one tensor. None if they are not adjacent."""
    if len(tensors) == 1:
        return tensors[0]
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return None
    first, memory = filled[0], filled[0].untyped_storage().data_ptr()
    end = first.storage_offset()
    for tensor in filled:
        if tensor.storage_offset() != end or tensor.untyped_storage().data_ptr() != memory:
            return None
        end += tensor.numel()
    flat = first.as_strided((end - first.storage_offset(),), (1,), first.storage_offset())
    return flat.view(-1, *first.shape[1:])
