"""Memory that the backward of attention takes on a GPU while it computes, beside its results.

Flash attention adds up the gradients of queries in float32. If heads of keys are fewer, it computes their gradients for
each head of queries, and sums them then. Memory-efficient attention adds up those of queries in float32, too. Sources:
flash_api.cpp and mem_eff_attention/kernel_backward.h in ATen/native/transformers/cuda.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echelon.foresight.record.kernels.operators import sizes_of_attention

_EFFICIENT = frozenset({"_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward"})
HAS_WORKSPACE = _EFFICIENT | {
    "_scaled_dot_product_flash_attention_backward",
    "_flash_attention_backward",
    "_varlen_attn_backward",
}
"""Operators that have temporary memory on a GPU."""
_FLOAT32 = 4
_ROWS, _ROWS_OF_EFFICIENT = 128, 64
"""Queries of a block, to which their number is rounded up."""


def workspaces(name: str, args: Sequence[Any]) -> list[int]:
    """Returns the bytes of each tensor that an operator allocates for the time of computing."""
    _, query, key, *_ = args
    sizes = sizes_of_attention(name, args)
    # Sequences that lie one after another are all in the tensor, but fill no batch of the longest one.
    rows, block = query.numel() // query.shape[-1], _ROWS_OF_EFFICIENT if name in _EFFICIENT else _ROWS
    rounded = max(rows, sizes.batch * sizes.heads * _rounded(sizes.queries, block))
    if name in _EFFICIENT:
        return [_FLOAT32 * rows, _FLOAT32 * rounded * _rounded(sizes.width, block)]
    width = _rounded(sizes.width, 32) if sizes.width <= 192 else 256
    found = [_FLOAT32 * rounded, _FLOAT32 * rounded * width]
    if sizes.heads != sizes.heads_of_keys:
        # Of keys and of values, in the type of the inputs.
        expanded = key.numel() * key.element_size() * sizes.heads // max(1, sizes.heads_of_keys)
        found += [expanded, expanded]
    return found


def _rounded(count: int, block: int) -> int:
    return -(-count // block) * block
