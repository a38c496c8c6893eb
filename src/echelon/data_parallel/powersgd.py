"""PowerSGD: gradients sent as products of thin matrices (Vogels, Karimireddy and Jaggi, 2019, arXiv:1905.13727)."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.data_parallel.hooks import GradientBucket, GradientHook
from echelon.group import ProcessGroup


class PowerSGD(GradientHook):
    """Sends each matrix of gradients, n by m, as P Qᵀ with P n by r and Q m by r: r (n + m) numbers instead of n m.

    One step of subspace iteration, started from the last Q, finds P and Q; what they leave out stays on this rank and
    is added to the next gradient (error feedback). Vectors, and matrices that would not become smaller, are sent whole.
    Tensors of more than two dims count as matrices of shape (first, all others). A matrix with infinite or undefined
    elements on any rank starts anew: they must not stay in what is left out for ever.
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
        self._seed = seed
        self._num_reductions = 0
        self._errors: dict[str, Tensor] = {}
        self._bases: dict[str, Tensor] = {}

    def reduce(self, bucket: GradientBucket, group: ProcessGroup) -> None:
        """Reduces a bucket in three collectives: all P, what is sent whole, all Q."""
        self._num_reductions += bucket.number == 0
        if self._num_reductions <= self._start_after:
            super().reduce(bucket, group)
            return
        pieces = dict(zip(bucket.names, bucket.pieces, strict=True))
        matrices = {name: self._matrix_of(name, piece) for name, piece in pieces.items() if self._is_worth_it(piece)}
        lefts = {name: matrix @ self._bases[name] for name, matrix in matrices.items()}
        _all_reduce(list(lefts.values()), group)
        _all_reduce([piece for name, piece in pieces.items() if name not in matrices], group)
        for name, matrix in matrices.items():
            lefts[name] = torch.linalg.qr(lefts[name]).Q
            self._bases[name] = matrix.T @ lefts[name]
        _all_reduce([self._bases[name] for name in matrices], group)
        for name, matrix in matrices.items():
            sent = lefts[name] @ self._bases[name].T
            self._errors[name] = matrix - sent
            pieces[name].copy_(sent.view(pieces[name].shape))
            if not self._bases[name].isfinite().all():  # the same on every rank, as it was reduced
                del self._errors[name], self._bases[name]

    def _matrix_of(self, name: str, piece: Tensor) -> Tensor:
        """Returns a gradient as a matrix, with what earlier ones left out; makes its basis if it has none."""
        matrix = _widen(piece.reshape(len(piece), -1))
        if name in self._errors and self._errors[name].shape == matrix.shape:
            return matrix + self._errors[name]
        self._bases[name] = self._first_basis(matrix)
        return matrix

    def _is_worth_it(self, piece: Tensor) -> bool:
        if piece.dim() < 2 or piece.numel() == 0 or not piece.is_floating_point():
            return False
        rows = len(piece)
        return self._rank * (rows + piece.numel() // rows) < piece.numel()

    def _first_basis(self, matrix: Tensor) -> Tensor:
        columns = min(self._rank, *matrix.shape)
        return torch.randn(matrix.shape[1], columns, generator=self._generator, device="cpu").to(matrix)

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self._rank}, start_after={self._start_after}, seed={self._seed})"


def _widen(matrix: Tensor) -> Tensor:
    return matrix.float() if matrix.element_size() < 4 else matrix


def _all_reduce(tensors: list[Tensor], group: ProcessGroup) -> None:
    """Replaces each of `tensors`, all of one dtype, by its mean over all ranks, in one collective."""
    if not tensors:
        return
    flat = group.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), "mean")
    for tensor, piece in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))
