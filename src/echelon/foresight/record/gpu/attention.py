"""Attention on a GPU by the kernel that PyTorch chooses there.

Sequences of nested tensors lie one after another, each with its own length. PyTorch chooses flash attention for 16
bits, and memory-efficient attention for float32. Both take the places at which the sequences begin. The recorder counts
each sequence by its length, or as long as the longest if that is unknown.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias

from echelon._torch_private.tensors import longest_of, shortest_of

_HALF = frozenset({torch.float16, torch.bfloat16})
_HEADS = 2
"""Dimension of the ragged size in the queries of attention, after those of sequences and heads."""
_FLASH_WIDTH = 256
"""Most elements of a head that the flash kernel takes."""


def attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes attention by the kernel that PyTorch chooses on a GPU: flash, memory-efficient, cuDNN's, or products."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = (given[each] for each in names[:3])
    mask, dropout = given.get("attn_mask"), given.get("dropout_p", 0.0)
    is_causal, scale = given.get("is_causal", False), given.get("scale")
    if isinstance(mask, CausalBias):
        # Kernels of a GPU know both forms, without a mask: it begins at the first key, or ends at the last one.
        return attention(func, (), {**given, "attn_mask": None, "is_causal": True})
    if query.is_nested and mask is None and query.dim() == 4:
        return _of_nested(query, key, value, dropout, is_causal, scale)
    if query.is_nested:
        return func(*args, **kwargs)
    return _of_dense(func, given, args, kwargs) if query.dim() == 4 else _products(func, args, kwargs)


def _of_dense(func: Any, given: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes attention of four dimensions: sequences, heads, positions and the elements of a head."""
    query, key, value = (given[each] for each in ("query", "key", "value"))
    mask, dropout = given.get("attn_mask"), given.get("dropout_p", 0.0)
    is_causal, is_grouped, scale = given.get("is_causal", False), given.get("enable_gqa", False), given.get("scale")
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        query, key, value = (each.to(low) for each in (query, key, value))
    _check_attention(query, key, value, mask, is_grouped)
    is_half = query.dtype in _HALF
    # Source: sdp_utils.cpp in ATen/native/transformers/cuda. Only products broadcast sequences and heads.
    are_alike = query.shape[:2] == key.shape[:2] == value.shape[:2]
    # The program may have disabled it, as by torch.nn.attention.sdpa_kernel.
    flash_is_enabled = torch.backends.cuda.flash_sdp_enabled() and (are_alike or is_grouped)  # type: ignore[no-untyped-call]
    widths = {each.shape[-1] for each in (query, key, value)}
    if mask is None and is_half and len(widths) == 1 and max(widths) <= _FLASH_WIDTH and flash_is_enabled:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout, is_causal, False, scale=scale)[0]
    if torch.backends.cuda.mem_efficient_sdp_enabled() and query.dtype != torch.float64 and are_alike:  # type: ignore[no-untyped-call]
        keeps_sums = any(each.requires_grad for each in (query, key, value))
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, _bias(mask, query, key), keeps_sums, dropout, is_causal, scale=scale)[0]
    # torch prefers matrix products to it.
    if is_half and torch.backends.cuda.cudnn_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled():  # type: ignore[no-untyped-call]
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        return cudnn(query, key, value, _bias(mask, query, key), True, dropout, is_causal, scale=scale)[0]
    return _products(func, args, kwargs)


def _products(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes attention by matrix products. On the CPU torch itself would take the kernel of a CPU."""
    if not torch.backends.cuda.math_sdp_enabled():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "No available kernel: scaled_dot_product_attention has none for these tensors among those that the program "
            "allows: allow SDPBackend.MATH, too, or cast the tensors to bfloat16"
        )
    with sdpa_kernel(SDPBackend.MATH):
        return func(*args, **kwargs)


def _check_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_grouped: bool) -> None:
    """Raises RuntimeError, as torch does, if types or heads do not fit together. The kernels' fake results take any."""
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            f"Expected query, key, and value to have the same dtype, but got query.dtype: {query.dtype} key.dtype: "
            f"{key.dtype} and value.dtype: {value.dtype} instead."
        )
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
            f"{mask.dtype} and query.dtype: {query.dtype} instead."
        )
    heads = query.shape[1], key.shape[1], value.shape[1]
    fits = all(each == heads[0] or each == 1 or (is_grouped and heads[0] % each == 0) for each in heads)
    if not fits:
        raise RuntimeError(
            f"The size of tensor a ({heads[0]}) must match the size of tensor b ({min(heads)}) at non-singleton "
            "dimension 1: attention with fewer heads of keys and values takes enable_gqa=True"
        )


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _of_nested(
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
