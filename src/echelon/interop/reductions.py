"""Mapping of torch's reductions to Echelon's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from echelon._torch_versions import release
from echelon.errors import UnsupportedOp
from echelon.interop.tensors import flat

_NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
    ReduceOp.PREMUL_SUM: "sum",
}
_OF_TRUTHS = {"sum": "bor", "product": "band", "max": "bor", "min": "band"}
"""Arithmetic on torch.bool as bitwise operations: True + True is True."""


class Reduction(NamedTuple):
    """Reduction in Echelon's terms, with a factor before and a division after it."""

    op: str
    """Name of Echelon's op."""
    factor: float | Tensor | None = None
    """Factor of this rank's tensor (PREMUL_SUM); None: no factor."""
    divides: bool = False
    """Whether the sum is divided by the number of ranks: a mean of integers, rounded towards zero as NCCL's."""

    @classmethod
    def of(cls, reduce_op: ReduceOp, dtype: torch.dtype) -> Reduction:
        """Returns Echelon's counterpart of a ReduceOp, for tensors of a dtype.

        Raises:
            UnsupportedOp: Echelon has no counterpart.
        """
        kind = reduce_op.op  # type: ignore[attr-defined] # missing in its stub
        name = _NAMES.get(kind)
        if name is None:
            raise UnsupportedOp(f"{kind}: use one of {', '.join(op.name for op in _NAMES)}")
        if kind == ReduceOp.PREMUL_SUM and release(torch.__version__) < (2, 13):
            raise UnsupportedOp("PREMUL_SUM: torch before 2.13 hides its factor: multiply the tensor, and use SUM")
        if dtype == torch.bool:
            name = _OF_TRUTHS.get(name, name)
        if name == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            return cls("sum", divides=True)
        return cls(name, reduce_op.factor if kind == ReduceOp.PREMUL_SUM else None)

    @classmethod
    def of_all(cls, reduce_op: ReduceOp, tensors: Sequence[Tensor]) -> list[Reduction]:
        """Returns the counterparts of a ReduceOp for several tensors.

        Raises:
            UnsupportedOp: Echelon has no counterpart, or the dtypes need different ops.
        """
        reductions = [cls.of(reduce_op, tensor.dtype) for tensor in tensors]
        if len({reduction.op for reduction in reductions}) > 1:
            raise UnsupportedOp(f"{reduce_op.op} of tensors of different dtypes at once: call it for each dtype")  # type: ignore[attr-defined]
        return reductions

    def prepare(self, tensor: Tensor) -> Tensor:
        """Returns this rank's flat input: the tensor's own memory if it is contiguous and has no factor."""
        values = flat(tensor)
        return values if self.factor is None else values * self.factor

    def finish(self, total: Tensor, num_ranks: int) -> Tensor:
        """Turns the reduced values into the result, in place."""
        return total.div_(num_ranks, rounding_mode="trunc") if self.divides else total
