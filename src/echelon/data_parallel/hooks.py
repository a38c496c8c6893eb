"""Gradient hooks: how a bucket of gradients is reduced. Users may subclass GradientHook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.arguments import is_count
from echelon.data_parallel.broadcast import average_tensors
from echelon.errors import InvalidArgument
from echelon.group.group import ProcessGroup


class GradientBucket(NamedTuple):
    """Gradients that are reduced together."""

    number: int
    """Number of the bucket in the layout; the same on every rank. The layout changes after the first reduction."""
    gradients: Tensor
    """All gradients in a row, one-dimensional. The hook writes the mean over all ranks into it."""
    pieces: Sequence[Tensor]
    """Views of `gradients`, one per parameter, in its shape."""
    names: Sequence[str]
    """Names of the parameters."""
    weight: float
    """Weight of this rank in the mean: 1, or the number of its samples. Already multiplied into `gradients`."""
    has_gradient: Sequence[bool]
    """Per parameter, whether this rank has a gradient. If no rank has one, .grad stays None."""


class GradientHook:
    """Hook of DistributedDataParallel that reduces buckets of gradients. The default is an all_reduce.

    A hook belongs to one model. Every rank must give the same hook with the same options: ranks compare its `repr`, so
    override `__repr__` if there are options.
    """

    dtype: torch.dtype | None = None
    """Dtype in which gradients are accumulated and given to `reduce`, if it is wider than their parameter's."""

    leaves_gradients: bool = False
    """Whether gradients stay local to each rank, because the hook synchronises the parameters instead."""

    def reduce(self, bucket: GradientBucket, group: ProcessGroup) -> None:
        """Replaces the bucket's gradients by their mean over all ranks. May block.

        Called for each full bucket, in the same order on every rank and one at a time, overlapped with backward.

        Args:
            bucket: this rank's gradients, zeros where it has none.
            group: the ranks. The hook may run any number of collectives; nobody else uses the group meanwhile.

        Raises:
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_reduce`. An exception of a hook of your own
                fails the backward on all ranks.
        """
        group.all_reduce(bucket.gradients, "mean")

    def before_forward(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Called in the caller's thread before each training forward outside `no_sync`. Does nothing by default.

        Args:
            parameters: the model's parameters, in the order of the module.
            group: the ranks.
        """

    def at_end(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Called when all ranks have left `join`, before they copy the last rank's parameters. Does nothing by default.

        Args:
            parameters, group: as for `before_forward`.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the values of this rank that the next reduction depends on. Empty by default: there are none.

        A checkpoint stores them by rank: numbers, text, tensors, and lists and dicts of them.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the values that `state_dict` returned on this rank of as many ranks. Does nothing by default."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class CompressTo(GradientHook):
    """Sends gradients in half precision: half the bytes of float32. Gradients of 16 bits are sent unchanged.

    Each rank adds up one part, in float32 or wider, and sends its mean to the others. So a gradient is rounded twice,
    for any number of ranks, and float16 overflows only where a gradient or the mean does.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Chooses the dtype that is sent.

        Args:
            dtype: torch.float16 (11 significant bits) or torch.bfloat16 (8, with the range of float32).

        Raises:
            InvalidArgument: another dtype.
        """
        if dtype not in (torch.float16, torch.bfloat16):
            raise InvalidArgument(f"dtype={dtype}: compress to torch.float16 or torch.bfloat16")
        self._sent_as = dtype

    def reduce(self, bucket: GradientBucket, group: ProcessGroup) -> None:
        """Sends each part to the rank that adds it up, and the means to all. Blocks until it is done.

        Args:
            bucket, group: as for `GradientHook.reduce`.

        Raises:
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_to_all`.
        """
        gradients = bucket.gradients
        if gradients.is_complex():
            gradients = torch.view_as_real(gradients).view(-1)
        if gradients.element_size() <= self._sent_as.itemsize:
            super().reduce(bucket, group)
            return
        # An all_reduce in half precision would round at each of its steps; this rounds before all_to_all and before
        # all_gather only.
        came = group.all_to_all(gradients.to(self._sent_as)).view(group.world_size, -1)
        mean = came.sum(0, dtype=gradients.dtype).div_(group.world_size)
        gradients.copy_(group.all_gather(mean.to(self._sent_as)))

    def __repr__(self) -> str:
        return f"CompressTo({self._sent_as})"


class AccumulateIn(GradientHook):
    """Accumulates and reduces gradients in a wider dtype than the parameters have, such as float32 for bfloat16.

    The sum of backwards under `no_sync` is kept in that dtype; .grad is a rounded copy. Parameters that are as wide
    already, and complex ones whose parts are, stay in their dtype.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        """Takes the dtype to accumulate in: torch.float32 or torch.float64.

        Raises:
            InvalidArgument: another dtype.
        """
        if dtype not in (torch.float32, torch.float64):
            raise InvalidArgument(f"dtype={dtype}: accumulate in torch.float32 or torch.float64")
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"AccumulateIn({self.dtype})"


class LocalSGD(GradientHook):
    """Leaves gradients local, and averages the parameters every `period` steps (Lin et al., 2020, arXiv:1808.07217).

    With `average="samples"` a rank's weight is its number of samples since the last average. For plain SGD, a period of
    1 is the same as averaging gradients. Call `average` once more before the model is used. The optimizer's state is
    local to each rank, so it cannot be sharded: not for ZeroOptimizer.
    """

    leaves_gradients = True

    def __init__(self, period: int) -> None:
        """Takes the number of steps between two averages.

        Args:
            period: number of steps, at least 1.

        Raises:
            InvalidArgument: `period` is not a whole number of at least 1.
        """
        if not is_count(period, 1):
            raise InvalidArgument(f"period={period!r}: average every 1 or more steps")
        self._period = period
        self._steps = 0
        self._weight = 0.0

    def reduce(self, bucket: GradientBucket, group: ProcessGroup) -> None:  # noqa: ARG002
        """Leaves the gradients and counts the step. Never blocks.

        Args:
            bucket, group: as for `GradientHook.reduce`.
        """
        if bucket.number == 0:  # once per reduction, which calls this for every bucket
            self._steps += 1
            self._weight += bucket.weight

    def before_forward(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Averages the parameters if `period` steps have been made since the last average. Blocks if so.

        Args:
            parameters, group: as for `GradientHook.before_forward`.

        Raises:
            CollectiveMismatch, PeerFailed, Timeout: as `average`.
        """
        if self._steps >= self._period:
            self.average(parameters, group)

    def at_end(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Averages the parameters, so that no rank's last steps are lost. Blocks.

        Args:
            parameters, group: as for `GradientHook.before_forward`.

        Raises:
            CollectiveMismatch, PeerFailed, Timeout: as `average`.
        """
        self.average(parameters, group)

    def average(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Replaces each parameter by its mean over all ranks. Blocks until it is done. Every rank must call it.

        Args:
            parameters, group: as for `GradientHook.before_forward`.

        Raises:
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_reduce`.
        """
        total = group.all_reduce(torch.tensor(self._weight, dtype=torch.float64, device="cpu")).item()
        # The mean divides by world_size; multiplied by this share before, it is the mean weighted by samples.
        share = self._weight * group.world_size / total if total else 1.0
        self._steps, self._weight = 0, 0.0
        learnt = [one.detach() for one in parameters if one.is_floating_point() or one.is_complex()]
        if share != 1.0:
            for parameter in learnt:
                parameter.mul_(share)
        average_tensors(learnt, group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps and the weight of this rank since the last average."""
        return {"steps": self._steps, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the values of `state_dict`.

        Raises:
            KeyError: the state is not that of a LocalSGD.
        """
        self._steps, self._weight = state["steps"], state["weight"]

    def __repr__(self) -> str:
        return f"LocalSGD({self._period})"


class PowerSGD(GradientHook):
    """Sends each matrix of gradients, n by m, as P Qᵀ with P n by r and Q m by r: r (n + m) numbers instead of n m.

    See Vogels, Karimireddy and Jaggi, 2019, arXiv:1905.13727. One step of subspace iteration, started from the last Q,
    finds P and Q. The approximation error stays on this rank and is added to the next gradient (error feedback).
    Vectors, and matrices that would not become smaller, are sent whole. Tensors of more than two dims count as matrices
    of shape (first, all others). If a matrix has infinite or NaN elements on any rank, its error and Q are reset.
    """

    def __init__(self, rank: int = 4, start_after: int = 0, seed: int = 0) -> None:
        """Takes the options, the same on every rank.

        Args:
            rank: number of columns r of P and Q.
            start_after: number of first reductions that are sent whole, as early gradients change most.
            seed: seed of the first Q.

        Raises:
            InvalidArgument: `rank` is not a whole number of at least 1.
        """
        if not is_count(rank, 1):
            raise InvalidArgument(f"rank={rank!r}: P and Q have 1 or more columns")
        self._rank = rank
        self._start_after = start_after
        self._generator = torch.Generator().manual_seed(seed)
        self._seed = seed
        self._num_reductions = 0
        self._errors: dict[str, Tensor] = {}
        self._bases: dict[str, Tensor] = {}

    def reduce(self, bucket: GradientBucket, group: ProcessGroup) -> None:
        """Reduces a bucket in three collectives: all P, all whole gradients, all Q. Blocks until it is done.

        Args:
            bucket, group: as for `GradientHook.reduce`.

        Raises:
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_reduce`.
        """
        self._num_reductions += bucket.number == 0  # once per reduction, which calls this for every bucket
        if self._num_reductions <= self._start_after:
            super().reduce(bucket, group)
            return
        pieces = dict(zip(bucket.names, bucket.pieces, strict=True))
        matrices = {name: self._matrix_of(name, piece) for name, piece in pieces.items() if self._is_worth_it(piece)}
        lefts = {name: matrix @ self._bases[name] for name, matrix in matrices.items()}
        # Beside P: whether a rank has a gradient. If none has, .grad stays None, and an error sent now would be lost.
        here = dict(zip(bucket.names, bucket.has_gradient, strict=True))
        having = [left.new_tensor(float(here[name])) for name, left in lefts.items()]
        _all_reduce([*lefts.values(), *having], group)
        _all_reduce([piece for name, piece in pieces.items() if name not in matrices], group)
        matrices = {name: matrix for (name, matrix), has in zip(matrices.items(), having, strict=True) if has > 0}
        for name, matrix in matrices.items():
            lefts[name] = torch.linalg.qr(lefts[name]).Q
            self._bases[name] = matrix.T @ lefts[name]
        _all_reduce([self._bases[name] for name in matrices], group)
        for name, matrix in matrices.items():
            sent = lefts[name] @ self._bases[name].T
            self._errors[name] = matrix - sent
            pieces[name].copy_(sent.view(pieces[name].shape))
            # An infinite or NaN element would stay in the error for ever. All ranks take the same branch: Q was
            # reduced, so it has the same bits everywhere.
            if not self._bases[name].isfinite().all():
                del self._errors[name], self._bases[name]

    def state_dict(self) -> dict[str, Any]:
        """Returns the errors of this rank, the last Q of each matrix, and the generator of new ones."""
        return {
            "num_reductions": self._num_reductions,
            "generator": self._generator.get_state(),
            "errors": dict(self._errors),
            "bases": dict(self._bases),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the values of `state_dict`. Tensors are kept, not copied.

        Raises:
            KeyError: the state is not that of a PowerSGD.
        """
        self._num_reductions = state["num_reductions"]
        self._generator.set_state(state["generator"])
        self._errors, self._bases = dict(state["errors"]), dict(state["bases"])

    def _matrix_of(self, name: str, piece: Tensor) -> Tensor:
        """Returns a gradient as a matrix plus the error of earlier reductions. Makes its first Q if there is none."""
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
        # Drawn on the CPU and then copied: every rank must have the same first Q, whatever its device.
        columns = min(self._rank, *matrix.shape)
        return torch.randn(matrix.shape[1], columns, generator=self._generator, device="cpu").to(matrix)

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self._rank}, start_after={self._start_after}, seed={self._seed})"


def _widen(matrix: Tensor) -> Tensor:
    # torch.linalg.qr takes no half precision on the CPU (torch 2.13).
    return matrix.float() if matrix.element_size() < 4 else matrix


def _all_reduce(tensors: list[Tensor], group: ProcessGroup) -> None:
    """Replaces each of `tensors`, all of one dtype, by its mean over all ranks, in one collective."""
    if not tensors:
        return
    flat = group.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), "mean")
    for tensor, piece in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))
