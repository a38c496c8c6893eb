"""all_reduce of sparse tensors, which Echelon's collectives do not know: every rank gets the entries of all.

Ranks may have entries at different places, and any number of them. Only sums can be made of that: what a rank has no
entry for is zero, which a minimum, say, would have to look at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.errors import UnsupportedOp
from echelon.interop.reductions import Reduction


def entries(tensor: Tensor, reduction: Reduction) -> list[Tensor]:
    """Returns the places of a sparse COO tensor's entries, one a row, and their values, to be gathered.

    Raises:
        UnsupportedOp: another layout, or a reduction that is no sum.
    """
    if tensor.layout != torch.sparse_coo or reduction.op not in ("sum", "mean") or reduction.factor is not None:
        raise UnsupportedOp(
            f"all_reduce({reduction.op}) of a tensor of layout {tensor.layout}: only SUM and AVG of sparse COO tensors "
            "are possible; call .to_dense() first"
        )
    own = tensor.detach().coalesce()
    return [own.indices().t().contiguous(), own.values()]


def put_sum(gathered: Sequence[Tensor], tensor: Tensor, reduction: Reduction, num_ranks: int) -> Tensor:
    """Writes the sum (or mean) of all ranks' entries into a sparse tensor, and returns it."""
    places, values = gathered
    total = torch.sparse_coo_tensor(places.t(), values, tensor.shape, check_invariants=True).coalesce()
    with torch.no_grad():  # detach() would make another sparse tensor
        return tensor.copy_(total / num_ranks if reduction.op == "mean" else total)
