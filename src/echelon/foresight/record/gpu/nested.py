"""Attention of nested tensors on a GPU: sequences lie one after another, each with its own length.

PyTorch chooses flash attention for 16 bits, and memory-efficient attention for float32. Both take the places at which
the sequences begin. The recorder counts each sequence by its length, or as long as the longest if that is unknown.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon._torch_private.tensors import longest_of, shortest_of

_HALF = frozenset({torch.float16, torch.bfloat16})
_HEADS = 2
"""Dimension of the ragged size in the queries of attention, after those of sequences and heads."""


def attention_of_nested(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    """Computes attention inside of each sequence of nested tensors, of the shape (sequences, heads, length, width)."""
    packed = [each.transpose(1, _HEADS).values() for each in (query, key, value)]  # (positions, heads, width)
    offsets = [each.offsets() for each in (query, key)]  # type: ignore[attr-defined] # of nested tensors
    begins = [each.to(torch.int32) for each in offsets]
    longest = [longest_of(each) for each in (query, key)]
    attends = _flash if query.dtype in _HALF else _efficient
    out = attends(packed, begins, longest, dropout, is_causal, scale)
    joined = torch.nested.nested_tensor_from_jagged(
        out, offsets[0], min_seqlen=shortest_of(query), max_seqlen=longest[0]
    )
    return joined.transpose(1, _HEADS)


def _flash(
    packed: list[Tensor], begins: list[Tensor], longest: list[int], dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    attends = torch.ops.aten._flash_attention_forward
    out: Tensor = attends(*packed, *begins, *longest, dropout, is_causal, False, scale=scale)[0]
    return out


def _efficient(
    packed: list[Tensor], begins: list[Tensor], longest: list[int], dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    attends = torch.ops.aten._efficient_attention_forward
    batched = [each.unsqueeze(0) for each in packed]
    out: Tensor = attends(*batched, None, *begins, *longest, dropout, int(is_causal), True, scale=scale)[0]
    return out.squeeze(0)
