"""What happens to gradients between backward and the optimizer, as small objects that users can write too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.data_parallel.broadcast import average_tensors
from echelon.group.group import ProcessGroup


class GradientBucket(NamedTuple):
    """Gradients that are reduced together."""

    number: int
    """Which bucket of the layout; the same on every rank. The layout changes after the first reduction."""
    gradients: Tensor
    """All of them in a row, one-dimensional: what a hook writes the mean over all ranks into."""
    pieces: Sequence[Tensor]
    """A view for each parameter, in its shape."""
    names: Sequence[str]
    """Of each parameter."""
    weight: float
    """What this rank counts for in the mean: 1, or the number of its samples. `gradients` are multiplied already."""


class GradientHook:
    """Reduces buckets of gradients; give one to DistributedDataParallel. Override what is to be different.

    A hook belongs to one model. Every rank must give the same hook with the same options: what `repr` says of it is
    compared, so override that if there are options.
    """

    dtype: torch.dtype | None = None
    """In which gradients are accumulated and given to `reduce`, if it is wider than that of their parameter."""

    leaves_gradients: bool = False
    """Whether gradients stay those of each rank, and it is the parameters that are brought together."""

    def reduce(self, bucket: GradientBucket, group: ProcessGroup) -> None:
        """Replaces the bucket's gradients by their mean over all ranks; may block.

        Called for each bucket when it is full, in the same order on every rank and one at a time, beside backward.

        Args:
            bucket: what to reduce; this rank's gradients, zeros where it has none.
            group: the ranks, for as many collectives as it takes. Nobody else uses it meanwhile.
        """
        group.all_reduce(bucket.gradients, "mean")

    def before_forward(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Called before each training forward that is to be synchronised, in the caller's thread."""

    def at_end(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Called when all ranks have left `join`, before they take the parameters of the last one."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class CompressTo(GradientHook):
    """Sends gradients in half precision: half the bytes of float32. What has no more bits already is sent as it is.

    Each rank adds up one part, in float32 or wider, and sends the mean of that to the others: so a gradient is rounded
    twice, whatever the number of ranks, and float16 overflows only where a gradient or the mean does.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Takes torch.float16 (11 significant bits) or torch.bfloat16 (8, with the range of float32)."""
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype={dtype}: compress to torch.float16 or torch.bfloat16")
        self._sent_as = dtype

    def reduce(self, bucket: GradientBucket, group: ProcessGroup) -> None:
        """Sends each part to the rank that adds it up, and the means to all."""
        gradients = bucket.gradients
        if gradients.is_complex():
            gradients = torch.view_as_real(gradients).view(-1)
        if gradients.element_size() <= self._sent_as.itemsize:
            super().reduce(bucket, group)
            return
        came = group.all_to_all(gradients.to(self._sent_as)).view(group.world_size, -1)
        mean = came.sum(0, dtype=gradients.dtype).div_(group.world_size)
        gradients.copy_(group.all_gather(mean.to(self._sent_as)))

    def __repr__(self) -> str:
        return f"CompressTo({self._sent_as})"


class AccumulateIn(GradientHook):
    """Accumulates and reduces gradients in a wider dtype than the parameters have: float32 for bfloat16, say.

    What backwards under `no_sync` leave is kept there; .grad is that, rounded. Parameters that are as wide already, and
    complex ones whose parts are, stay in their dtype.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        """Takes the dtype to accumulate in: torch.float32 or torch.float64."""
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype={dtype}: accumulate in torch.float32 or torch.float64")
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"AccumulateIn({self.dtype})"


class LocalSGD(GradientHook):
    """Leaves gradients local, and averages the parameters every `period` steps (Lin et al., 2020, arXiv:1808.07217).

    With `average="samples"` ranks weigh as many as the samples they had since the last average. A period of 1 is the
    same as averaging gradients for plain SGD. Call `average` once more before the model is used. The optimizer's state
    is each rank's own, so it cannot be sharded: not for ZeroOptimizer.
    """

    leaves_gradients = True

    def __init__(self, period: int) -> None:
        """Takes the number of steps from one average to the next."""
        if period < 1:
            raise ValueError(f"period={period}: average every 1 or more steps")
        self._period = period
        self._steps = 0
        self._weight = 0.0

    def reduce(self, bucket: GradientBucket, group: ProcessGroup) -> None:  # noqa: ARG002
        """Leaves the gradients, and notes that a step was made."""
        if bucket.number == 0:
            self._steps += 1
            self._weight += bucket.weight

    def before_forward(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Averages the parameters if it is time."""
        if self._steps >= self._period:
            self.average(parameters, group)

    def at_end(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Averages the parameters: nobody's last steps are lost."""
        self.average(parameters, group)

    def average(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Replaces each parameter by its mean over all ranks. Blocks until it is done. Every rank must call it."""
        total = group.all_reduce(torch.tensor(self._weight, dtype=torch.float64, device="cpu")).item()
        share = self._weight * group.world_size / total if total else 1.0
        self._steps, self._weight = 0, 0.0
        learnt = [one.detach() for one in parameters if one.is_floating_point() or one.is_complex()]
        if share != 1.0:
            for parameter in learnt:
                parameter.mul_(share)
        average_tensors(learnt, group)

    def __repr__(self) -> str:
        return f"LocalSGD({self._period})"


# PowerSGD: gradients sent as products of thin matrices (Vogels, Karimireddy and Jaggi, 2019, arXiv:1905.13727).


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
