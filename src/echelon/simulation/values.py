"""Values of a collective that is played whole: computed once for all ranks, then copied by each.

The values that ranks give are kept in memory that is nobody's result, because a rank that has ended may change its
tensor before another one ends.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from echelon.backends.collective import Collective, can_hold, result_buffer
from echelon.backends.memory import as_bytes, new_tensor, plain, without_class
from echelon.backends.modes import normal_mode, overwrite
from echelon.backends.operators import accumulation_dtype, combine_in_order
from echelon.collectives.calls.chunks import Chunks, FlatChunks, ReadOnlyChunks, even_sizes, in_order
from echelon.collectives.calls.run import rounds_of
from echelon.collectives.plans.plan import Plan, Reduce
from echelon.operation_records import OperationRecord

Take: TypeAlias = Callable[[int, Tensor | None, Tensor | None, OperationRecord], Any]
"""Returns a rank's result, of the rank in the group, its tensor, `out`, and the record of its call."""


class Calls(NamedTuple):
    """Calls of all ranks, in the order of their ranks. None for a rank that need not have come."""

    collectives: Sequence[Collective | None]
    tensors: Sequence[Tensor | None]
    """Contiguous values of each rank's tensor."""
    outs: Sequence[Tensor | None]
    plan: Plan | None
    """Plan that says in which order values are combined. None: in the order of the ranks."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.tensors)

    @property
    def any(self) -> Collective:
        """Call of some rank."""
        return next(collective for collective in self.collectives if collective is not None)

    @property
    def all(self) -> list[Tensor]:
        """Tensors of all ranks."""
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def of_root(self) -> Tensor:
        """Tensor of the root."""
        tensor = self.tensors[self.any.root]
        assert tensor is not None, "the root has come"
        return tensor


def snapshot(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy of a tensor's values."""
    values = plain(tensor)
    with normal_mode():
        return values.clone() if values.data_ptr() == tensor.data_ptr() else values


def of_one_class(tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Returns tensors that torch can combine: all as they are, or all as torch.Tensor if their classes are several.

    A class that a script defines is another one on each simulated rank. On processes no rank has a peer's class either.
    """
    kinds = {type(tensor) for tensor in tensors if tensor is not None} - {Tensor, torch.nn.Parameter}
    return tensors if len(kinds) < 2 else [None if tensor is None else without_class(tensor) for tensor in tensors]


def result_of(calls: Calls) -> Take:
    """Computes the values of a collective. Returns the function that gives each rank its result."""
    return _RESULTS[calls.any.kind](calls)


def _all_reduce(calls: Calls) -> Take:
    total = _combined(calls)[0]
    return lambda _, tensor, *__: _kept(tensor, total.view(_shape(tensor)))


def _reduce(calls: Calls) -> Take:
    root = calls.any.root
    total = _combined(calls)[root if calls.plan is not None else 0]
    return lambda rank, tensor, *_: _kept(tensor, total.view(_shape(tensor))) if rank == root else tensor


def _reduce_scatter(calls: Calls) -> Take:
    combined = _combined(calls)

    def take(rank: int, tensor: Tensor | None, out: Tensor | None, _: OperationRecord) -> Tensor:
        assert tensor is not None
        num_rows, *row = tensor.shape
        rows, width = even_sizes(num_rows, calls.num_ranks), math.prod(row)
        result = result_buffer(out, (rows[rank], *row), tensor)
        begin = sum(rows[:rank]) * width
        # By a plan, each rank has its own part only.
        part = combined[0][begin : begin + result.numel()] if calls.plan is None else combined[rank]
        return result.copy_(without_class(part).view(result.shape))

    return take


def _broadcast(calls: Calls) -> Take:
    root, values = calls.any.root, without_class(calls.of_root)
    return lambda rank, tensor, *_: tensor if rank == root else _kept(tensor, values)


def _broadcast_rows(calls: Calls) -> Take:
    values = calls.of_root
    return lambda *_: without_class(values.clone())


def _scatter(calls: Calls) -> Take:
    parts = calls.of_root.tensor_split(calls.num_ranks)
    return lambda rank, *_: without_class(parts[rank].clone())


def _all_gather(calls: Calls) -> Take:
    whole = _joined(calls.all)
    return lambda _, tensor, out, __: _rows(whole, tensor, out)


def _gather(calls: Calls) -> Take:
    root, whole = calls.any.root, _joined(calls.all)
    return lambda rank, tensor, out, _: _rows(whole, tensor, out) if rank == root else None


def _all_to_all(calls: Calls) -> Take:
    num_ranks, whole = calls.num_ranks, _joined(calls.all)
    splits = [splits_of(collective, num_ranks) for collective in calls.collectives if collective is not None]
    begins = [0, *accumulate(split for row in splits for split in row)]
    num_rows = splits[0][0]
    is_even = all(split == num_rows for row in splits for split in row)
    grid = whole.view(num_ranks, num_ranks, num_rows, *whole.shape[1:]) if is_even else None

    def take(rank: int, tensor: Tensor | None, out: Tensor | None, call: OperationRecord) -> Tensor:
        collective = calls.collectives[rank]
        assert collective is not None
        collective.check_counts([row[rank] for row in splits], call)
        # Fast path: with 256 ranks and as many parts, to join them took 5 us for each.
        if grid is not None:
            return _rows(grid[:, rank].reshape(num_ranks * num_rows, *whole.shape[1:]), tensor, out)
        cells = range(rank, num_ranks * num_ranks, num_ranks)
        return _rows(_joined([whole[begins[cell] : begins[cell + 1]] for cell in cells]), tensor, out)

    return take


def _barrier(_: Calls) -> Take:
    return lambda *_: None


_RESULTS: Mapping[str, Callable[[Calls], Take]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "broadcast_rows": _broadcast_rows,
    "scatter": _scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}


def splits_of(collective: Collective, num_ranks: int) -> Sequence[int]:
    """Returns the number of rows that an all-to-all sends to each rank."""
    assert collective.shape is not None
    return collective.in_splits or even_sizes(collective.shape[0], num_ranks)


def _shape(tensor: Tensor | None) -> torch.Size:
    assert tensor is not None
    return tensor.shape


def _kept(tensor: Tensor | None, values: Tensor) -> Tensor:
    assert tensor is not None
    overwrite(tensor, values)
    return tensor


def _rows(values: Tensor, own: Tensor | None, out: Tensor | None) -> Tensor:
    assert own is not None
    return result_buffer(out, values.shape, own).copy_(values)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates contiguous tensors of any dtype along dim 0."""
    # As bytes, because torch.cat does not take every dtype that can be moved.
    first = tensors[0]
    shape = (sum(map(len, tensors)), *first.shape[1:])
    parts = [as_bytes(without_class(tensor)) for tensor in tensors if tensor.numel()]
    data = torch.cat(parts or [new_tensor((0,), torch.uint8)])
    return data.view(first.dtype).view(shape)


# Reductions


def in_rank_order(collective: Collective, tensors: Sequence[Tensor]) -> Tensor:
    """Combines contiguous tensors in their order, as ranks that share memory do. Returns a flat tensor."""
    operator = collective.reduction
    # Flat: tensors that were packed into one may have another shape on each rank.
    flats = [tensor.view(-1) for tensor in tensors]
    total = new_tensor(tuple(flats[0].shape), flats[0].dtype)
    if len(flats) > 1:
        for begin, end in pairwise(_bounds(collective, len(flats), total)):
            combine_in_order(total[begin:end], [flat[begin:end] for flat in flats], operator)
        return total
    wide = flats[0].to(accumulation_dtype(total.dtype), copy=True)
    return total.copy_(operator.finish(wide, 1))


def _bounds(collective: Collective, num_ranks: int, total: Tensor) -> list[int]:
    """Returns where the pieces that are combined at once begin, and the end of the last."""
    # torch multiplies complex numbers in vectors, and the last few of a tensor one by one, which rounds otherwise. So
    # each rank's part is combined alone, as the rank itself would.
    if collective.kind == "reduce_scatter" and collective.op == "product" and total.dtype.is_complex:
        assert collective.shape is not None
        num_rows, *row = collective.shape
        return [0, *accumulate(rows * math.prod(row) for rows in even_sizes(num_rows, num_ranks))]
    return [0, total.numel()]


class Inputs:
    """Tensors that the ranks of a group give to one reduction."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ended = 0
        """Number of ranks that have their result."""
        self._tensors: list[Tensor | None] = [None] * num_ranks
        self._total: Tensor | None = None

    def give(self, rank: int, tensor: Tensor) -> None:
        """Adds a rank's contiguous values."""
        self._tensors[rank] = tensor

    def total(self, collective: Collective) -> Tensor:
        """Returns the values of all ranks, combined in rank order. All have given theirs."""
        if self._total is None:
            tensors = [tensor for tensor in of_one_class(self._tensors) if tensor is not None]
            assert len(tensors) == len(self._tensors), "a rank that ends a reduction has heard of all others"
            self._total = in_rank_order(collective, tensors)
            self._tensors.clear()
        return self._total


def _combined(calls: Calls) -> list[Tensor]:
    """Returns the combined values, flat: in rank order one tensor, by a plan that of every rank."""
    if calls.plan is None:
        return [in_rank_order(calls.any, calls.all)]
    return _as_planned(calls, calls.plan)


def _as_planned(calls: Calls, plan: Plan) -> list[Tensor]:
    """Combines the values of all ranks as the executor of plans does, chunk by chunk."""
    collective, reduction = calls.any, calls.any.reduction
    assert collective.shape is not None
    assert collective.dtype is not None
    wide = accumulation_dtype(collective.dtype)
    flats = [tensor.to(wide, copy=True).view(-1) for tensor in calls.all]
    num_ranks, sizes = calls.num_ranks, even_sizes(flats[0].numel(), plan.num_chunks)
    if collective.kind == "reduce_scatter":
        num_rows, *row = collective.shape
        sizes = [size * math.prod(row) for size in even_sizes(num_rows, num_ranks)]
        shares = [
            ReadOnlyChunks(flat, sizes, rank, _place(calls, rank, sizes[rank], wide)) for rank, flat in enumerate(flats)
        ]
        _play(plan, shares, reduction.combine)
        results = [part.take(rank) for rank, part in enumerate(shares)]
    else:
        root = collective.root if collective.kind == "reduce" else None
        chunks = [
            FlatChunks(flat, sizes) if root in (None, rank) else ReadOnlyChunks(flat, sizes)
            for rank, flat in enumerate(flats)
        ]
        _play(plan, chunks, reduction.combine)
        results = flats
    return [reduction.finish(result, num_ranks).to(collective.dtype) for result in results]


def _place(calls: Calls, rank: int, size: int, wide: torch.dtype) -> Tensor | None:
    """Returns memory for a rank's part, if the executor of plans would combine it in `out`.

    It combines own and received values in the other order there. They differ in the payload of NaN.
    """
    collective, tensor, out = calls.collectives[rank], calls.tensors[rank], calls.outs[rank]
    assert collective is not None
    assert collective.shape is not None
    assert tensor is not None
    num_rows, *row = collective.shape
    shape = (even_sizes(num_rows, calls.num_ranks)[rank], *row)
    fits = out is not None and can_hold(out, shape, tensor) and wide is collective.dtype
    return new_tensor((size,), wide) if fits else None


def _play(plan: Plan, chunks: Sequence[Chunks], combine: Callable[[Tensor, Tensor], object]) -> None:
    """Runs a plan on the chunks of all ranks in this thread."""
    messages: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
    programs = [_program(plan, rank, own, combine, messages) for rank, own in enumerate(chunks)]
    while programs:
        programs = [program for program in programs if next(program, None) is not None]


def _program(
    plan: Plan,
    rank: int,
    chunks: Chunks,
    combine: Callable[[Tensor, Tensor], object],
    messages: defaultdict[tuple[int, int], deque[Tensor]],
) -> Iterator[bool]:
    """Runs a rank's rounds. Yields while it waits for a message."""
    for steps in rounds_of(plan, rank):
        for leaving in steps.sends:
            messages[rank, leaving.peer] += [part.clone() for part in chunks.outgoing(leaving)]
        for copy in steps.copies:
            chunks.copy(copy)
        for step in steps.coming:
            came = []
            for place in chunks.places(step, steps.busy):
                while not messages[step.peer, rank]:
                    yield True
                message = messages[step.peer, rank].popleft()
                if place is not None and chunks.combines_in_place and isinstance(step, Reduce):
                    in_order(step, combine)(place, message)
                elif place is not None:
                    place.copy_(message)
                came.append(message if place is None else place)
            chunks.keep(step, came, combine)
