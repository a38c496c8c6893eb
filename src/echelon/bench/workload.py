"""Inputs of benchmarks, their expected results, and the count of wrong elements.

Every rank can compute the inputs of all ranks, so it knows the right result without communication. Inputs repeat after
a prime number of elements: parts of an array differ, so a swapped part is detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.backends.operators import operator
from echelon.bench.request import REDUCTIONS, Case

# Operations that send another part of the input to each rank.
_SPLIT = ("reduce_scatter", "scatter", "all_to_all")
_PERIOD = 100_003  # a prime, so that no part of a power of two repeats another
_PIECE = 1 << 22  # elements compared at a time, which bounds the memory of the comparison


class Segment(NamedTuple):
    """Run of a result's elements: the inputs of `ranks` from element `first` on, reduced if there are several ranks."""

    ranks: tuple[int, ...]
    first: int
    length: int


class Workload:
    """Input and expected result of one rank for a case."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.rank = rank
        self.dtype: torch.dtype = getattr(torch, case.dtype)

    def input(self) -> Tensor | None:
        """Returns a new input tensor. None on a rank that gives none."""
        case, rank = self.case, self.rank
        if case.operation == "barrier" or (case.operation == "scatter" and rank != case.root):
            return None
        if case.operation == "broadcast" and rank != case.root:
            # Zeros are no rank's values, so a broadcast that moves nothing is counted.
            return torch.zeros(case.num_elements, dtype=self.dtype)
        return self._values(rank, 0, case.num_elements * (case.num_ranks if case.operation in _SPLIT else 1))

    def output(self) -> Tensor:
        """Returns memory for this rank's result. Empty on a rank that gets none."""
        return torch.empty(sum(segment.length for segment in self.segments()), dtype=self.dtype)

    def segments(self) -> tuple[Segment, ...]:
        """Returns the segments of this rank's result. Empty on a rank that gets none."""
        case, rank = self.case, self.rank
        everybody = tuple(range(case.num_ranks))
        if case.operation == "barrier" or (rank != case.root and case.operation in ("reduce", "gather")):
            return ()
        sources: tuple[tuple[int, ...], ...]
        if case.operation in REDUCTIONS:
            sources = (everybody,)
        elif case.operation in ("broadcast", "scatter"):
            sources = ((case.root,),)
        elif case.operation == "send_recv":
            sources = ((everybody[-1 - rank],),) if rank in (0, everybody[-1]) else ()
        else:
            sources = tuple((src,) for src in everybody)
        first = case.num_elements * rank if case.operation in _SPLIT else 0
        return tuple(Segment(ranks, first, case.num_elements) for ranks in sources)

    def count_wrong(self, result: Tensor | None) -> int:
        """Returns the number of wrong elements of a result.

        Integers and elements that are only moved must be equal. Reduced floats may differ by one rounding per rank: n
        times the epsilon of the dtype, relative to the result.
        """
        segments = self.segments()
        expected = sum(segment.length for segment in segments)
        if not segments:
            return 0
        if result is None or result.numel() != expected or result.dtype != self.dtype:
            return expected
        return sum(
            self._count_wrong_in(result.reshape(-1)[at : at + piece.length], piece) for at, piece in _pieces(segments)
        )

    def _count_wrong_in(self, got: Tensor, piece: Segment) -> int:
        if self.case.operation not in REDUCTIONS:  # only moved: exact
            return int((got != self._values(piece.ranks[0], piece.first, piece.length)).sum())
        wide = _wide(self.dtype)  # the expected value must round less than the result that it judges
        reduction = operator(self.case.op, wide)
        want = self._values(piece.ranks[0], piece.first, piece.length).to(wide)
        for rank in piece.ranks[1:]:
            reduction.combine(want, self._values(rank, piece.first, piece.length).to(wide))
        want = reduction.finish(want, self.case.num_ranks)
        if not (self.dtype.is_floating_point or self.dtype.is_complex) or self.case.op in ("min", "max"):
            return int((got != want.to(self.dtype)).sum())
        tolerance = self.case.num_ranks * torch.finfo(self.dtype).eps * want.abs()
        return int((~((got.to(wide) - want).abs() <= tolerance)).sum())

    def _values(self, rank: int, first: int, count: int) -> Tensor:
        """Returns the input of a rank. All magnitudes are about 1, so no sum or product leaves the dtype."""
        block = _block(rank, self.dtype)
        begin = first % _PERIOD
        times = -(-(begin + count) // _PERIOD)
        return block.repeat(times)[begin : begin + count].clone()


def _pieces(segments: tuple[Segment, ...]) -> Iterator[tuple[int, Segment]]:
    """Yields pieces of at most `_PIECE` elements, each with its offset in the result."""
    place = 0
    for segment in segments:
        for offset in range(0, segment.length, _PIECE):
            length = min(_PIECE, segment.length - offset)
            yield place + offset, Segment(segment.ranks, segment.first + offset, length)
        place += segment.length


# Cached: every rank needs the values of all ranks, for each case.
@lru_cache(maxsize=128)
def _block(rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 1)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return (torch.rand(_PERIOD, generator=generator) + 0.5).to(wide).to(dtype)
    highest = 2 if dtype == torch.bool else 4
    return torch.randint(highest - 3 if highest > 2 else 0, highest, (_PERIOD,), generator=generator).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64
