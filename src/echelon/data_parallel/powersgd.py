"""PowerSGD: gradients sent as products of thin matrices (Vogels, Karimireddy and Jaggi, 2019, arXiv:1905.13727)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from echelon.data_parallel.hooks import GradientBucket, GradientHook
from echelon.group import ProcessGroup


class _Key(NamedTuple):
    """Which matrix: a layout that changes makes others."""

    bucket: int
    place: int
    shape: torch.Size


class PowerSGD(GradientHook):
    """Sends each matrix of gradients, n by m, as P Qᵀ with P n by r and Q m by r: r (n + m) numbers instead of n m.

    One step of subspace iteration, started from the last Q, finds P and Q; what they leave out stays on this rank and
    is added to the next gradient (error feedback). Vectors, and matrices that would not become smaller, are sent whole.
    Tensors of more than two dims count as matrices of shape (first, all others).
    """

    def __init__(self, rank: int = 4, start_after: int = 0, seed: int = 0) -> None:
        """Sends nothing yet.

        Args:
            rank: the columns r of P and Q.
            start_after: reductions that are sent whole first, as early gradients change most.
            seed: of the first Q; the same on every rank.
        """
        if rank < 1:
            raise ValueError(f"rank={rank}: P and Q have 1 or more columns")
        self._rank = rank
        self._start_after = start_after
        self._generator = torch.Generator().manual_seed(seed)
        self._num_reduced: dict[int, int] = {}
        self._errors: dict[_Key, Tensor] = {}
        self._bases: dict[_Key, Tensor] = {}

    def reduce(self, bucket: GradientBucket, group: ProcessGroup) -> None:
        """Reduces a bucket in three collectives: all P, what is sent whole, all Q."""
        done = self._num_reduced.get(bucket.number, 0)
        self._num_reduced[bucket.number] = done + 1
        if done < self._start_after:
            super().reduce(bucket, group)
            return
        matrices: dict[_Key, Tensor] = {}
        whole: list[Tensor] = []
        for place, piece in enumerate(bucket.pieces):
            if self._is_worth_it(piece):
                matrices[_Key(bucket.number, place, piece.shape)] = _widen(piece.reshape(len(piece), -1))
            else:
                whole.append(piece)
        for key, matrix in matrices.items():
            if key in self._errors:
                matrix = matrices[key] = matrix + self._errors[key]
            if key not in self._bases:
                self._bases[key] = self._first_basis(matrix)
        lefts = {key: matrix @ self._bases[key] for key, matrix in matrices.items()}
        _all_reduce(list(lefts.values()), group)
        _all_reduce(whole, group)
        for key, matrix in matrices.items():
            lefts[key] = torch.linalg.qr(lefts[key]).Q
            self._bases[key] = matrix.T @ lefts[key]
        _all_reduce([self._bases[key] for key in matrices], group)
        for key, matrix in matrices.items():
            sent = lefts[key] @ self._bases[key].T
            self._errors[key] = matrix - sent
            piece = bucket.pieces[key.place]
            piece.copy_(sent.view(piece.shape))

    def _is_worth_it(self, piece: Tensor) -> bool:
        if piece.dim() < 2 or piece.numel() == 0 or not piece.is_floating_point():
            return False
        rows = len(piece)
        return self._rank * (rows + piece.numel() // rows) < piece.numel()

    def _first_basis(self, matrix: Tensor) -> Tensor:
        columns = min(self._rank, *matrix.shape)
        return torch.randn(matrix.shape[1], columns, generator=self._generator).to(matrix)


def _widen(matrix: Tensor) -> Tensor:
    return matrix.float() if matrix.element_size() < 4 else matrix


def _all_reduce(tensors: list[Tensor], group: ProcessGroup) -> None:
    """Replaces each of `tensors`, all of one dtype, by its mean over all ranks, in one collective."""
    if not tensors:
        return
    flat = group.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), "mean")
    for tensor, piece in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))
