"""Operators as kernels: whether they launch one, its kind and shape, and its floating-point operations."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from echelon._torch_private.tensors import code_of, facts_of, tree_leaves
from echelon.call_site import is_foreign
from echelon.foresight.record.kernels.convolutions import flops_of_gradients
from echelon.foresight.record.kernels.onednn import products_of
from echelon.foresight.trace import COMPLEX_PRODUCTS, Kind

Role: TypeAlias = Literal["kernel", "view", "allocation", "read", "collective"]
"""Meaning of an operator for the recorder. Views and allocations launch nothing. A read brings a value to the host."""

Shape: TypeAlias = tuple[int, ...]
Documents: TypeAlias = Sequence[tuple[int, int]]
"""Lengths of queries and of keys of each document, inside of which attention is computed."""

_NO_KERNEL = frozenset(
    [
        "detach",
        "alias",
        "lift",
        "lift_fresh",
        "record_stream",
        "is_pinned",
        "is_same_size",
        "sym_size",
        "sym_stride",
        "sym_numel",
        "_has_same_storage_numel",
        "_reshape_alias_copy",
        "_unsafe_view",
        "_nested_tensor_from_mask_left_aligned",
        "is_nonzero",
        "_assert_tensor_metadata",
        "_resize_output_",
        "resize_storage_bytes_",
        "unsafe_split",
        "unsafe_chunk",
        "device",
        "layout",
    ]
)
"""Operators that launch nothing on a GPU."""
_READS = frozenset({"_local_scalar_dense", "allclose", "item", "equal", "is_nonzero"})
_FINDS_OVERFLOW = frozenset({"isnan", "isinf", "_amp_foreach_non_finite_check_and_unscale_"})
"""Operators whose last output says if values are infinite or not a number."""
_NEGATES = frozenset({"eq", "le", "lt", "logical_not", "bitwise_not"})
"""Operators that are true of numbers that are 0, as in `x.isnan().sum() == 0`."""
TAKES_MASKS = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "masked_select"})
"""Operators whose arguments after the first can be masks, so that shapes depend on values."""
INTO_A_PART = frozenset({"all_gather_copy_in"})
"""Operators that write only their first output, a part of their last input, and return that input as well."""
KEEPS_TERMS = frozenset({"mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"})
"""Losses whose sum or mean lies in the memory of its terms, which it keeps. Source: ATen/native/Loss.cpp and .cu."""
FFTS = frozenset({"_fft_c2c", "_fft_r2c", "_fft_c2r"})
"""Fast Fourier transforms of the dimensions that their second argument lists."""
_LINEAR_ALGEBRA = ("linalg_", "_linalg_")
_READ_ONCE = frozenset({"linalg_vector_norm", "linalg_cross", "linalg_diagonal", "_linalg_check_errors"})
"""Operators of `torch.linalg` whose kernels read each input once."""
_SLOWER = frozenset(
    [
        "geqrf",
        "ormqr",
        "orgqr",
        "cholesky",
        "cholesky_inverse",
        "_cholesky_solve_helper",
        "triangular_solve",
        "lu_unpack",
        "_ctc_loss",
        "_ctc_loss_backward",
    ]
)
"""Other operators that read their inputs many times, or one part after another."""
_OF_TORCH = frozenset(
    {"aten", "prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor"}
    | {"torch_attn", "fsdp", "symm_mem", "inductor", "inductor_prims", "rngprims", "quantized", "mkldnn", "onednn"}
)
"""Namespaces of torch's operators. Others are those of the program and its libraries."""
_CHUNK = 32
"""Number of tensors that one kernel of a multi-tensor operator takes, roughly."""


class Operator(NamedTuple):
    """Facts of an operator, looked up once."""

    name: str
    role: Role
    kind: Kind
    writes: tuple[int | str, ...]
    """Arguments that it changes, by position or name."""
    may_return_view: bool
    is_composite: bool
    """Whether torch computes it by other operators. Only tensors with tensors inside, such as nested ones, call it."""
    is_foreach: bool
    takes_dtype: bool
    """Whether it is told the type of its result, as in `torch.mm(a, b, out_dtype=...)`."""
    flops: Callable[..., int] | None
    shape: Callable[..., Shape] | None
    precision_of: str
    """For products and convolutions, the operation whose setting decides whether a GPU computes float32 by TF32."""
    is_slower: bool
    """Whether it takes longer than reading its inputs and writing its outputs once, such as eigenvalues."""
    custom_name: str
    """Full name, such as "mylib::scan", of an operator that torch does not know. Empty for one of torch."""
    communicating: Callable[..., Any] | None
    """Python function of such an operator if it communicates. None if it does not, or has no single one."""


class Operation(NamedTuple):
    """Operator with its arguments."""

    func: Any
    facts: Operator
    inputs: Sequence[Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def written(self) -> list[Tensor]:
        """Returns the tensors that it changes."""
        values = [
            self.args[each] if isinstance(each, int) and each < len(self.args) else self.kwargs.get(str(each))
            for each in self.facts.writes
        ]
        return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def operator(func: Any) -> Operator:
    """Returns the facts of an operator of torch."""
    # A program may register a formula for an operator of its own after a first forecast.
    return _operator(func, flop_registry.get(getattr(func, "overloadpacket", None)))


@functools.cache
def _operator(func: Any, formula: Callable[..., int] | None) -> Operator:
    facts = facts_of(func)
    name = facts.name
    base = name.removesuffix("_")  # in place, such as "addmm_", the arguments are the same
    shape = _SHAPES.get(base)
    takes_dtype = shape is not None and facts.overload in ("dtype", "dtype_out")
    flops = _ATTENTION.get(name) or _FLOPS.get(base) or formula
    if takes_dtype:
        flops = None  # torch's formulas do not take the type
    # Operators with FLOPs that are no attention are products and convolutions.
    kind: Kind = "attention" if name in _ATTENTION else "matmul" if shape or flops else "other"
    return Operator(
        name=name,
        role=_role(
            facts.namespace,
            name,
            facts.may_return_view and (not facts.writes or torch.Tag.inplace_view in func.tags),
        ),
        kind=kind,
        writes=facts.writes,
        may_return_view=facts.may_return_view,
        is_composite=facts.is_composite,
        is_foreach=name.startswith(("_foreach", "_fused", "_amp_foreach")),
        takes_dtype=takes_dtype,
        flops=flops,
        shape=shape,
        precision_of=_precision_of(name) if kind == "matmul" else "",
        is_slower=name in _SLOWER or (name.startswith(_LINEAR_ALGEBRA) and name not in _READ_ONCE),
        custom_name="" if facts.namespace in _OF_TORCH else f"{facts.namespace}::{name}",
        communicating=None if facts.namespace in _OF_TORCH else _communicating(code_of(func)),
    )


def _communicating(function: FunctionType | None) -> FunctionType | None:
    """Returns the function if it uses torch.distributed, itself or by functions of the program that it names."""
    found = [] if function is None else [function]
    for each in found:
        names = _names_in(each.__code__)
        values = [each.__globals__.get(name) for name in names]
        if {"torch", "distributed"} <= names or "_c10d_functional" in names or any(map(_is_of_distributed, values)):
            return function
        called = (value for value in values if isinstance(value, FunctionType) and value not in found)
        found += [value for value in called if not is_foreign(value.__code__.co_filename)]
    return None


def _names_in(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _is_of_distributed(value: object) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(value, ModuleType | FunctionType) and str(name).startswith("torch.distributed")


def _precision_of(name: str) -> str:
    if "conv" in name:
        return "conv"
    return "rnn" if "rnn" in name else "matmul"


def _role(namespace: str, name: str, is_view: bool) -> Role:
    if namespace in ("c10d", "_c10d_functional", "c10d_functional", "_dtensor"):
        return "collective"
    # All forms of it, such as new_empty_strided.
    if "empty" in name and not name.endswith("_"):
        return "allocation"
    if namespace == "prim" or is_view or name in _NO_KERNEL:
        return "view"
    return "read" if name in _READS else "kernel"


def finds_overflow(operation: Operation) -> bool | None:
    """Whether the last output is true of values that are infinite or not a number. False: of all others. None: neither.

    A value that is not a number differs from itself. Code of torch and of programs goes by that.
    """
    name, args = operation.facts.name, operation.args
    if name in _FINDS_OVERFLOW:
        return True
    if name in ("eq", "ne") and (args[0] is args[1] or (isinstance(args[1], float) and math.isinf(args[1]))):
        return (name == "ne") == (args[0] is args[1])
    return None


def is_negation(operation: Operation) -> bool:
    """Whether an operator is true of numbers that are 0: also `!=`, but not `==`, if compared with another number."""
    name, args = operation.facts.name, operation.args
    is_other = name in ("eq", "ne") and isinstance(args[1], int | float) and args[1] != 0
    return (name in _NEGATES) != is_other


def launches_of(facts: Operator, args: Sequence[Any]) -> int:
    """Returns the number of kernels of an operator."""
    if facts.is_foreach and args and isinstance(args[0], list | tuple):
        return math.ceil(len(args[0]) / _CHUNK)
    # cuFFT transforms one dimension after another.
    return max(1, len(args[1])) if facts.name in FFTS else 1


def flops_and_shape(
    facts: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], out: object, documents: Documents | None = None
) -> tuple[int, Shape]:
    """Returns the floating-point operations of matrix products or attention, and the shape for the device model.

    Args:
        facts: facts of the operator.
        args, kwargs: its arguments.
        out: its result.
        documents: lengths of the documents of attention. None: it has none, or each is as long as the longest.
    """
    if facts.kind == "attention":
        assert facts.flops is not None
        sizes = sizes_of_attention(facts.name, args)
        if not documents:
            return int(facts.flops(args, kwargs, sizes)), _attention_shape(sizes)
        flops = sum(
            count * int(facts.flops(args, kwargs, sizes._replace(queries=queries, keys=keys, num_queries=queries)))
            for (queries, keys), count in Counter(documents).items()
        )
        queries, keys = _typical(documents)
        return flops, _attention_shape(sizes._replace(batch=len(documents), queries=queries, keys=keys))
    shape = facts.shape(args) if facts.shape else ()
    # torch has no formula for some products.
    flops = 2 * math.prod(shape) if facts.flops is None else int(facts.flops(*args, **kwargs, out_val=out))
    if any(isinstance(each, Tensor) and each.is_complex() for each in args):
        flops *= COMPLEX_PRODUCTS
    return flops, shape


# Matrix products


def _mm(a: Tensor, b: Tensor) -> Shape:
    return (1, a.shape[0], b.shape[1], a.shape[1])


def _bmm(a: Tensor, b: Tensor) -> Shape:
    return (a.shape[0], a.shape[1], b.shape[2], a.shape[2])


def _grouped_mm(offsets: int, args: Sequence[Any]) -> Shape:
    """Returns the shape of products of equal groups: rows by one matrix per group, or columns by rows for gradients.

    Args:
        offsets: position of the argument that says where the groups end.
        args: arguments of the operator.
    """
    a, b = args[0], args[1]
    if a.ndim == b.ndim == 3:
        return _bmm(a, b)
    groups = max(1, args[offsets].shape[0])
    if a.ndim == b.ndim:
        return (groups, a.shape[0], b.shape[1], a.shape[1] // groups)
    rows = a.shape[-2] if a.ndim == 3 else a.shape[0] // groups
    columns = b.shape[-1] if b.ndim == 3 else b.shape[1] // groups
    return (groups, rows, columns, a.shape[-1])


def _gradients_of_layer(args: Sequence[Any]) -> Shape:
    count, *others = products_of(args)
    return (2 * count, *others)


def _addbmm(args: Sequence[Any]) -> Shape:
    """Returns the shape of a sum of products, which is a product with a longer inner dimension."""
    batch, rows, columns, inner = _bmm(args[1], args[2])
    return (1, rows, columns, batch * inner)


def _cdist(args: Sequence[Any]) -> Shape:
    """Returns the shape of distances between rows: for p=2 a matrix product, else as many operations by other units."""
    rows, columns = args[0], args[1]
    batch = math.prod(torch.broadcast_shapes(rows.shape[:-2], columns.shape[:-2]))  # type: ignore[no-untyped-call]
    return (batch, rows.shape[-2], columns.shape[-2], rows.shape[-1])


_SHAPES: Mapping[str, Callable[..., Shape]] = {
    "mm": lambda args: _mm(args[0], args[1]),
    "_int_mm": lambda args: _mm(args[0], args[1]),
    "addbmm": _addbmm,
    "_cdist_forward": _cdist,
    "_cdist_backward": lambda args: _cdist(args[1:]),
    "_euclidean_dist": _cdist,
    "addmm": lambda args: _mm(args[1], args[2]),
    "_addmm_activation": lambda args: _mm(args[1], args[2]),
    **dict.fromkeys(("_scaled_mm", "_scaled_mm_v2"), lambda args: _mm(args[0], args[1])),
    # Weights of 8 and 4 bits: scales have a number for each column of the result.
    "_weight_int8pack_mm": lambda args: (1, args[0].shape[0], args[1].shape[0], args[0].shape[1]),
    "_weight_int4pack_mm": lambda args: (1, args[0].shape[0], args[3].shape[1], args[0].shape[1]),
    "bmm": lambda args: _bmm(args[0], args[1]),
    "_grouped_mm": functools.partial(_grouped_mm, 2),
    "_scaled_grouped_mm": functools.partial(_grouped_mm, 4),
    "_scaled_grouped_mm_v2": functools.partial(_grouped_mm, 8),
    "baddbmm": lambda args: _bmm(args[1], args[2]),
    "mkldnn_rnn_layer": products_of,
    "mkldnn_rnn_layer_backward": _gradients_of_layer,
}


def _trilinear_flops(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    new_a: Sequence[int],
    new_b: Sequence[int],
    new_c: Sequence[int],
    *_: object,
    **__: object,
) -> int:
    """Returns the FLOPs of `nn.Bilinear`: a product of three tensors with new dimensions, of which some are summed."""
    ndim = a.ndim + len(new_a)
    shapes = []
    for tensor, new in ((a, new_a), (b, new_b), (c, new_c)):
        sizes = iter(tensor.shape)
        shapes.append([1 if each in new else next(sizes) for each in range(ndim)])
    return 2 * math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _flops_with_a_vector(matrix: Tensor, *_: object, **__: object) -> int:
    return 2 * matrix.numel()


_FLOPS: Mapping[str, Callable[..., int]] = {
    "_trilinear": _trilinear_flops,
    # Products with vectors have no shape for the model of products: they take the time of their bytes.
    **dict.fromkeys(("mv", "dot", "vdot", "addr"), _flops_with_a_vector),
    "addmv": lambda _, matrix, *__, **___: _flops_with_a_vector(matrix),
    "convolution_backward": flops_of_gradients,
}
"""Formulas in place of torch's, by the name of the operator."""


# Attention. torch's formulas refuse grouped queries, and know nothing of causal masks.


def _first_of(name: str) -> int:
    """Returns the position of the queries. In backward the gradient of the output comes before them."""
    return 1 if "backward" in name else 0


class SizesOfAttention(NamedTuple):
    """Sizes of attention, with the lengths of the longest sequence if several lie one after another."""

    batch: int
    heads: int
    heads_of_keys: int
    queries: int
    keys: int
    width: int
    width_of_values: int
    num_queries: int
    """Queries of all sequences."""


def sizes_of_attention(name: str, args: Sequence[Any]) -> SizesOfAttention:
    """Returns the sizes of attention by the arguments of its operator."""
    first = _first_of(name)
    query, key, value = args[first : first + 3]
    widths = query.shape[-1], value.shape[-1]
    if name in _LONGEST:
        *_, length, heads, _ = query.shape
        heads_of_keys, batch = key.shape[-2], query.shape[0]
        queries, keys = length, key.shape[-3]
        if query.ndim == 3 or args[_LONGEST[name] - 1] is not None:  # the places at which the sequences begin
            queries, keys = args[_LONGEST[name] : _LONGEST[name] + 2]
            batch = max(1, length // max(1, queries))
    else:
        batch, heads, queries, _ = query.shape
        heads_of_keys, keys = key.shape[1:3]
    num_queries = query.numel() // max(1, heads * query.shape[-1])
    return SizesOfAttention(batch, heads, heads_of_keys, queries, keys, *widths, num_queries)


def begins_of_documents(name: str, args: Sequence[Any]) -> Sequence[Tensor | None] | None:
    """Returns the places at which queries and keys of documents begin. None if attention is not inside of documents."""
    begins = args[_LONGEST[name] - 2 : _LONGEST[name]] if name in _LONGEST else ()
    return None if all(each is None for each in begins) else begins


def _typical(documents: Documents) -> tuple[int, int]:
    """Returns the length of queries and of keys in which most of the work is done."""
    work = sum(queries * keys for queries, keys in documents)
    if not work:
        return 0, 0
    return (
        round(sum(queries * keys * queries for queries, keys in documents) / work),
        round(sum(queries * keys * keys for queries, keys in documents) / work),
    )


def _attention_shape(sizes: SizesOfAttention) -> Shape:
    batch, heads, heads_of_keys, queries, keys, width, *_ = sizes
    if queries == 1:  # flash attention takes the queries that share a key together
        heads, queries = heads_of_keys, max(1, heads // max(1, heads_of_keys))
    return batch, heads, queries, keys, width


def _attention_flops(
    name: str, causal: int, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: SizesOfAttention
) -> int:
    _, heads, _, queries, keys, width, width_of_values, num_queries = sizes
    flops = _with_backward(2 * num_queries * heads * keys * (width + width_of_values), _first_of(name))
    is_causal = kwargs.get("is_causal", args[causal] if len(args) > causal else False)
    return flops // 2 if is_causal and queries == keys else flops


def _with_backward(products: int, is_backward: int) -> int:
    """Returns the FLOPs of attention: two products forward; five backward, one of which computes the scores again."""
    return int(products) * 5 // 2 if is_backward else int(products)


def _varlen_flops(
    name: str, window: int, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: SizesOfAttention
) -> int:
    """Returns the FLOPs of attention inside of documents that lie one after another."""
    _, heads, _, queries, keys, width, width_of_values, num_queries = sizes
    causal = _LONGEST[name] + 2
    is_causal = args[causal] if len(args) > causal else kwargs.get("is_causal", False)
    left, right = kwargs.get("window_size", args[window] if len(args) > window else None) or (-1, -1)
    right = 0 if is_causal else right
    # The last query is at the last key.
    before = _mean_in_window(max(0, keys - queries), keys, left)
    after = _mean_in_window(0, min(queries, keys), right)
    products = 2 * num_queries * heads * (before + after) * (width + width_of_values)
    return _with_backward(int(products), _first_of(name))


def _mean_in_window(fewest: int, most: int, window: int) -> float:
    """Returns the mean number of keys on one side of a query: evenly spread numbers, cut at a window. -1: none."""
    if window < 0 or window >= most:
        return (fewest + most) / 2
    if window <= fewest:
        return window
    return ((window**2 - fewest**2) / 2 + window * (most - window)) / (most - fewest)


_CAUSAL = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_cudnn_attention_backward": 14,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "_flash_attention_forward": 8,
    "_flash_attention_backward": 11,
    "_efficient_attention_forward": 9,
    "_efficient_attention_backward": 14,
}
"""Position of the argument `is_causal`, or of a kind of mask that is 0 for none."""
_LONGEST = {
    "_varlen_attn": 5,
    "_varlen_attn_backward": 8,
    "_flash_attention_forward": 5,
    "_flash_attention_backward": 8,
    "_efficient_attention_forward": 6,
    "_efficient_attention_backward": 8,
}
"""Operators whose heads come after the positions. Sequences of different lengths lie one after another.

The number is the position of the length of the longest one, which that of the keys follows. It follows the places at
which the sequences begin. In `varlen_attn`, `is_causal` is the next argument.
"""
_WINDOW = {"_varlen_attn": 9, "_varlen_attn_backward": 13}
"""Position of the argument `window_size`: keys before and after a query, -1 for all."""
_ATTENTION: Mapping[str, Callable[..., int]] = {
    **{name: functools.partial(_attention_flops, name, causal) for name, causal in _CAUSAL.items()},
    **{name: functools.partial(_varlen_flops, name, window) for name, window in _WINDOW.items()},
}
