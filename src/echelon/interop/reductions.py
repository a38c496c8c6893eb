"""torch's reductions as Echelon's."""

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
"""What arithmetic on torch.bool comes to: True + True is True."""


class Reduction(NamedTuple):
    """What is done to the tensors of all ranks."""

    op: str
    """The name of Echelon's operation."""
    factor: float | Tensor | None = None
    """What each rank multiplies its tensor by first."""
    divides: bool = False
    """Whether the result is divided by the number of ranks: a mean of integers, which is rounded towards zero."""

    @classmethod
    def of(cls, reduce_op: ReduceOp, dtype: torch.dtype) -> Reduction:
        """Returns Echelon's counterpart of one of torch's, for tensors of a dtype.

        Raises:
            UnsupportedOp: there is none.
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
        """Returns the counterpart of one of torch's for each of many tensors.

        Raises:
            UnsupportedOp: there is none, or the dtypes need different operations of Echelon.
        """
        reductions = [cls.of(reduce_op, tensor.dtype) for tensor in tensors]
        if len({reduction.op for reduction in reductions}) > 1:
            raise UnsupportedOp(f"{reduce_op.op} of tensors of different dtypes at once: call it for each dtype")  # type: ignore[attr-defined]
        return reductions

    def prepare(self, tensor: Tensor) -> Tensor:
        """Returns the flat values that this rank brings: the tensor's own memory, if it is contiguous as it is."""
        values = flat(tensor)
        return values if self.factor is None else values * self.factor

    def finish(self, total: Tensor, num_ranks: int) -> Tensor:
        """Makes the result of what the ranks' values were combined to, in place."""
        return total.div_(num_ranks, rounding_mode="trunc") if self.divides else total
