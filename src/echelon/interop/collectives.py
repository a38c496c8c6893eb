"""Collectives of torch's process group interface, each mapped to one of Echelon's. Ranks are group ranks.

Each function has the arguments of torch's call, from Python (`torch.distributed`) and from C++ (DDP, functional
collectives), after the runner of the group. `COLLECTIVES` has torch's names. All ranks call them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed import Work as TorchWork

from echelon._torch_versions import release
from echelon.errors import SizeMismatch, UnsupportedOp
from echelon.interop.tensors import (
    Tensors,
    check_length,
    check_list,
    check_sizes,
    count_change,
    deal,
    deal_all,
    flat,
    joined,
    only,
    row,
    writable,
)
from echelon.interop.works import Options, Runner


class RootOptions(Options, Protocol):
    """Options of a collective with a root."""

    rootRank: int  # noqa: N815


class ReduceOptions(Options, Protocol):
    """Options of a reduction."""

    reduceOp: ReduceOp  # noqa: N815


class RootReduceOptions(RootOptions, ReduceOptions, Protocol):
    """Options of a reduction with a root."""


# Reductions

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
# Arithmetic on torch.bool as bitwise operations: True + True is True.
_OF_TRUTHS = {"sum": "bor", "product": "band", "max": "bor", "min": "band"}


class Reduction(NamedTuple):
    """Reduction in Echelon's terms, with a factor before and a divisor after it."""

    op: str
    """Name of Echelon's op."""
    factor: float | Tensor | None = None
    """Factor of this rank's tensor (PREMUL_SUM). None: no factor."""
    divisor: int | None = None
    """Number of ranks, for a mean of integers, which is rounded towards zero as by NCCL. None: no division."""

    @classmethod
    def of(cls, runner: Runner, opts: ReduceOptions | None, tensors: Tensors) -> Reduction:
        """Returns Echelon's counterpart of torch's ReduceOp, for some tensors.

        Raises:
            UnsupportedOp: Echelon has no counterpart, or the dtypes need different ops.
        """
        reduce_op = ReduceOp(ReduceOp.SUM) if opts is None else opts.reduceOp
        kind = reduce_op.op  # type: ignore[attr-defined] # missing in its stub
        if kind not in _NAMES:
            raise UnsupportedOp(f"{kind}: use one of {', '.join(op.name for op in _NAMES)}")
        if kind == ReduceOp.PREMUL_SUM and release(torch.__version__) < (2, 13):
            raise UnsupportedOp("PREMUL_SUM: torch before 2.13 hides its factor: multiply the tensor, and use SUM")
        for tensor in tensors:
            _check_average(kind, tensor.dtype)
        ops = {_op_for(_NAMES[kind], tensor.dtype) for tensor in tensors} or {"sum"}
        if len(ops) > 1:
            raise UnsupportedOp(f"{kind} of tensors of different dtypes at once: call it for each dtype")
        (op,) = ops
        factor = reduce_op.factor if kind == ReduceOp.PREMUL_SUM else None
        return cls(op, factor, runner.group.world_size if kind == ReduceOp.AVG and op == "sum" else None)

    def prepare(self, tensor: Tensor) -> Tensor:
        """Returns this rank's flat input: the tensor's own memory if it is contiguous and has no factor."""
        values = flat(tensor)
        return values if self.factor is None else values * self.factor

    def finish(self, total: Tensor, into: Tensor) -> list[Tensor]:
        """Writes the reduced values into the user's tensor. Returns the tensor."""
        if self.divisor is not None:
            total.div_(self.divisor, rounding_mode="trunc")
        # A factor may have another dtype, and then the product does.
        return deal(total if self.factor is None else total.to(into.dtype), [into], "reduce_scatter")

    def finish_all(self, totals: Tensors, into: Tensors) -> list[Tensor]:
        """Writes many reduced values into the user's tensors. Returns the tensors."""
        return [tensor for pair in zip(totals, into, strict=True) for tensor in self.finish(*pair)]


def _check_average(kind: object, dtype: torch.dtype) -> None:
    """Raises UnsupportedOp for an average of dtypes that torch cannot divide, before anything is sent."""
    if kind == ReduceOp.AVG and dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64):
        raise UnsupportedOp(f"op=AVG has no meaning for {dtype}: convert the tensor, or use another op")


def _op_for(name: str, dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        name = _OF_TRUTHS.get(name, name)
    return "sum" if name == "mean" and not (dtype.is_floating_point or dtype.is_complex) else name


def allreduce(runner: Runner, tensors: Tensors, opts: ReduceOptions | None = None) -> TorchWork:
    """Reduces one tensor over all ranks, in place."""
    tensor = only(tensors, "all_reduce")
    reduction = Reduction.of(runner, opts, tensors)
    if tensor.layout != torch.strided:
        entries = partial(runner.group.all_gather_coalesced, _entries(tensor, reduction))
        return runner.run(entries, partial(_put_sum, tensor, reduction, runner.group.world_size), opts)
    writable(tensors, "all_reduce")
    call = partial(runner.group.all_reduce, reduction.prepare(tensor), reduction.op)
    return runner.run(call, partial(reduction.finish, into=tensor), opts)


# All-reduce of sparse tensors, which Echelon's collectives do not support: every rank gathers the entries of all.
# Ranks may have entries at different indices, and any number of them. Only sums work this way: a missing entry is zero,
# which a sum can skip and a minimum cannot.


def _entries(tensor: Tensor, reduction: Reduction) -> list[Tensor]:
    """Returns the indices (one a row), the values and the shape of a sparse COO tensor, to be gathered.

    Raises:
        UnsupportedOp: another layout, or a reduction that is not a sum.
    """
    if tensor.layout != torch.sparse_coo or reduction.op not in ("sum", "mean") or reduction.factor is not None:
        raise UnsupportedOp(
            f"all_reduce({reduction.op}) of a tensor of layout {tensor.layout}: only SUM and AVG of sparse COO tensors "
            "are possible; call .to_dense() first"
        )
    own = tensor.detach().coalesce()
    return [own.indices().t().contiguous(), own.values(), torch.tensor([tensor.shape], dtype=torch.int64, device="cpu")]


def _put_sum(tensor: Tensor, reduction: Reduction, num_ranks: int, gathered: Tensors) -> list[Tensor]:
    """Writes the sum (or mean) of all ranks' entries into a sparse tensor. Returns the tensor.

    Raises:
        SizeMismatch: the tensors of the ranks differ in shape.
    """
    places, values, shapes = gathered
    if len(of_ranks := {tuple(shape) for shape in shapes.tolist()}) > 1:
        raise SizeMismatch(
            f"shape {tuple(tensor.shape)} on all ranks", sorted(of_ranks), "all_reduce of sparse tensors"
        )
    total = torch.sparse_coo_tensor(places.t(), values, tensor.shape, check_invariants=True).coalesce()
    with torch.no_grad():  # detach() would make another sparse tensor
        return [tensor.copy_(total / num_ranks if reduction.op == "mean" else total)]


def allreduce_coalesced(runner: Runner, tensors: Tensors, opts: ReduceOptions | None = None) -> TorchWork:
    """Reduces many tensors over all ranks, in place."""
    reduction = Reduction.of(runner, opts, tensors)
    writable(tensors, "all_reduce_coalesced")
    call = partial(runner.group.all_reduce_coalesced, [reduction.prepare(tensor) for tensor in tensors], reduction.op)
    return runner.run(call, partial(reduction.finish_all, into=tensors), opts)


def reduce(runner: Runner, tensors: Tensors, opts: RootReduceOptions | None = None) -> TorchWork:
    """Reduces one tensor over all ranks, in place on the root."""
    tensor, root = only(tensors, "reduce"), _root(opts)
    reduction = Reduction.of(runner, opts, tensors)
    call = partial(runner.group.reduce, reduction.prepare(tensor), root, reduction.op)
    # Other ranks keep their tensors, which need not be writable.
    if runner.group.rank != root:
        return runner.run(call, lambda _: tensors, opts)
    writable(tensors, "reduce")
    return runner.run(call, partial(reduction.finish, into=tensor), opts)


def reduce_scatter(
    runner: Runner, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: ReduceOptions | None = None
) -> TorchWork:
    """Reduces a list of tensors, one per rank, over all ranks. Each rank gets its own."""
    output, (inputs,), rank = only(output_tensors, "reduce_scatter"), input_tensors, runner.group.rank
    sizes = [tensor.numel() for tensor in inputs]
    check_list(inputs, rank, runner.group.world_size, output.numel(), "reduce_scatter")
    # Echelon's reduce_scatter takes equal parts only. Others are all reduced, and this rank keeps its own.
    if len(set(sizes)) <= 1:
        return reduce_scatter_single(runner, output, joined(inputs), opts)
    writable([output], "reduce_scatter")
    reduction = Reduction.of(runner, opts, [output])
    # As several tensors: ranks then compare the size of each, and not their sum alone.
    parts = list(torch.split(reduction.prepare(joined(inputs)), sizes))
    call = partial(runner.group.all_reduce_coalesced, parts, reduction.op)
    return runner.run(call, lambda totals: reduction.finish(totals[rank], output), opts)


def reduce_scatter_single(
    runner: Runner, output: Tensor, input: Tensor, opts: ReduceOptions | None = None
) -> TorchWork:
    """Reduces a tensor over all ranks. Each rank gets its part."""
    writable([output], "reduce_scatter")
    if input.numel() != output.numel() * runner.group.world_size:
        expected = f"{runner.group.world_size} times the {output.numel()} elements of the output"
        raise SizeMismatch(expected, input.numel(), "reduce_scatter", "give one part for each rank")
    reduction = Reduction.of(runner, opts, [output])
    call = partial(runner.group.reduce_scatter, reduction.prepare(input), reduction.op, flat(output))
    return runner.run(call, partial(reduction.finish, into=output), opts)


def reduce_scatter_single_coalesced(
    runner: Runner, outputs: Tensors, inputs: Tensors, opts: ReduceOptions | None = None
) -> TorchWork:
    """Reduces many tensors over all ranks. Each rank gets its part of each."""
    reduction = Reduction.of(runner, opts, inputs)
    _check_pairs(outputs, inputs, "reduce_scatter_coalesced")
    if len(inputs) == 1:  # as DTensor calls it: without a copy into one tensor for all
        return reduce_scatter_single(runner, outputs[0], inputs[0], opts)
    writable(outputs, "reduce_scatter_coalesced")
    values = [reduction.prepare(tensor) for tensor in inputs]
    call = partial(runner.group.reduce_scatter_coalesced, values, reduction.op)
    return runner.run(call, partial(reduction.finish_all, into=outputs), opts)


# Moving tensors


def broadcast(runner: Runner, tensors: Tensors, opts: RootOptions | None = None) -> TorchWork:
    """Overwrites one tensor on every rank with the root's."""
    tensor, root = only(tensors, "broadcast"), _root(opts)
    call = partial(runner.group.broadcast, flat(tensor), root)
    if runner.group.rank == root:
        count_change(tensors)  # the tensor stays, but the program then fails on this rank as on the others
        # Not written back: elements of an expanded tensor share memory.
        return runner.run(call, lambda _: list(tensors), opts)
    writable(tensors, "broadcast")
    return runner.run(call, partial(deal, into=tensors, operation="broadcast"), opts)


def allgather(
    runner: Runner, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Options | None = None
) -> TorchWork:
    """Gathers the tensors of all ranks into a list, on every rank. Their numbers of elements may differ."""
    tensor, (outputs,) = only(input_tensors, "all_gather"), output_tensors
    check_list(outputs, runner.group.rank, runner.group.world_size, tensor.numel(), "all_gather")
    values = row(tensor, outputs, runner.group.world_size)
    if values.dim() == 1:
        return _all_gather_many(runner, [outputs], [tensor], opts)
    writable(outputs, "all_gather")
    call = partial(runner.group.all_gather, values)
    return runner.run(call, partial(deal, into=outputs, operation="all_gather"), opts)


def allgather_coalesced(
    runner: Runner, output_lists: Sequence[Tensors], input_list: Tensors, opts: Options | None = None
) -> TorchWork:
    """Gathers many tensors of all ranks. `output_lists[rank]` has an output for each of them."""
    if len(output_lists) != runner.group.world_size:
        expected = f"{runner.group.world_size} lists of outputs"
        raise SizeMismatch(expected, len(output_lists), "all_gather_coalesced", "give one for each rank")
    for outputs in output_lists:
        _check_pairs(outputs, input_list, "all_gather_coalesced")
    places: list[Tensors] = list(zip(*output_lists, strict=True))
    for tensor, outputs in zip(input_list, places, strict=True):
        check_list(outputs, runner.group.rank, runner.group.world_size, tensor.numel(), "all_gather_coalesced")
    return _all_gather_many(runner, places, input_list, opts)


def _all_gather_many(runner: Runner, places: Sequence[Tensors], inputs: Tensors, opts: Options | None) -> TorchWork:
    for outputs in places:
        writable(outputs, "all_gather_coalesced")
    num_ranks = runner.group.world_size
    rows = [row(tensor, outputs, num_ranks) for tensor, outputs in zip(inputs, places, strict=True)]
    uneven = [number for number, outputs in enumerate(places) if rows[number].dim() == 1 and len(outputs) == num_ranks]
    # With their sizes: their sum alone would not check each output.
    sizes = [_sizes([rows[number] for number in uneven])] if uneven else []
    call = partial(runner.group.all_gather_coalesced, [*rows, *sizes])

    def settle(gathered: Tensors) -> list[Tensor]:
        for number, of_ranks in zip(uneven, gathered[-1].t().tolist() if uneven else [], strict=True):
            check_sizes(places[number], of_ranks, "all_gather")
        return deal_all(gathered[: len(rows)], places, "all_gather")

    return runner.run(call, settle, opts)


def _sizes(tensors: Tensors) -> Tensor:
    """Returns the numbers of elements of tensors, as one row."""
    return torch.tensor([[tensor.numel() for tensor in tensors]], dtype=torch.int64, device="cpu")


def all_gather_single(runner: Runner, output: Tensor, input: Tensor, opts: Options | None = None) -> TorchWork:
    """Gathers the tensors of all ranks into one, on every rank."""
    num_ranks, size = runner.group.world_size, input.numel()
    _check_room(output, num_ranks, size)
    writable([output], "all_gather")
    # One row a rank: ranks compare the sizes of rows.
    call = partial(runner.group.all_gather, flat(input).view(1, size), flat(output).view(num_ranks, size))
    return runner.run(call, partial(deal, into=[output], operation="all_gather"), opts)


def all_gather_single_coalesced(
    runner: Runner, outputs: Tensors, inputs: Tensors, opts: Options | None = None
) -> TorchWork:
    """Gathers many tensors of all ranks, each into one, on every rank."""
    _check_pairs(outputs, inputs, "all_gather_coalesced")
    if len(inputs) == 1:  # as in reduce_scatter_single_coalesced
        return all_gather_single(runner, outputs[0], inputs[0], opts)
    for output, tensor in zip(outputs, inputs, strict=True):
        _check_room(output, runner.group.world_size, tensor.numel())
    return _all_gather_many(runner, [[output] for output in outputs], inputs, opts)


def _check_pairs(outputs: Tensors, inputs: Tensors, operation: str) -> None:
    if len(outputs) != len(inputs):
        raise SizeMismatch(f"{len(inputs)} outputs", len(outputs), operation, "give one for each input")


def _check_room(output: Tensor, num_ranks: int, size: int) -> None:
    if output.numel() != num_ranks * size:
        expected = f"{num_ranks} times the {size} elements of the input"
        raise SizeMismatch(expected, output.numel(), "all_gather", "give room for the input of each rank")


def gather(
    runner: Runner, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: RootOptions | None = None
) -> TorchWork:
    """Gathers the tensors of all ranks into a list, on the root."""
    tensor, outputs = only(input_tensors, "gather"), output_tensors[0] if output_tensors else []
    if outputs:
        check_list(outputs, runner.group.rank, runner.group.world_size, tensor.numel(), "gather")
        writable(outputs, "gather")
    values = flat(tensor)
    # With the sizes: the root has an output for each rank, of which the sum alone would tell nothing.
    call = partial(runner.group.gather_coalesced, [values, _sizes([values])], _root(opts))

    def settle(gathered: Tensors | None) -> list[Tensor]:
        if gathered is None:
            return []
        values, sizes = gathered
        check_sizes(outputs, sizes.flatten().tolist(), "gather")
        return deal(values, outputs, "gather")

    return runner.run(call, settle, opts)


def gather_single(runner: Runner, output: Tensor, input: Tensor, opts: RootOptions | None = None) -> TorchWork:
    """Gathers the tensors of all ranks into one, on the root. torch calls it since 2.14."""
    outputs = writable([output] if runner.group.rank == _root(opts) else [], "gather")
    call = partial(runner.group.gather, flat(input), _root(opts))
    return runner.run(call, partial(deal, into=outputs, operation="gather"), opts)


def scatter(
    runner: Runner, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: RootOptions | None = None
) -> TorchWork:
    """Sends each rank its tensor of the root's list."""
    output, values = only(output_tensors, "scatter"), None
    if runner.group.rank == _root(opts):
        for rank in range(runner.group.world_size):
            check_list(input_tensors[0], rank, runner.group.world_size, output.numel(), "scatter")
        values = joined(input_tensors[0])
    writable(output_tensors, "scatter")
    call = partial(runner.group.scatter, values, _root(opts))
    return runner.run(call, partial(deal, into=output_tensors, operation="scatter"), opts)


def alltoall(runner: Runner, output_tensors: Tensors, input_tensors: Tensors, opts: Options | None = None) -> TorchWork:
    """Sends each rank a tensor of a list and receives one from each."""
    num_ranks, rank = runner.group.world_size, runner.group.rank
    check_length(input_tensors, num_ranks, "all_to_all")
    check_list(output_tensors, rank, num_ranks, input_tensors[rank].numel(), "all_to_all")
    writable(output_tensors, "all_to_all")
    splits, counts = ([tensor.numel() for tensor in each] for each in (input_tensors, output_tensors))
    call = partial(runner.group.all_to_all, joined(input_tensors), None, splits, counts)
    return runner.run(call, partial(deal, into=output_tensors, operation="all_to_all"), opts)


def all_to_all_single(
    runner: Runner,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    opts: Options | None = None,
) -> TorchWork:
    """Sends each rank a part of a tensor, split along dim 0, and receives one from each. No sizes: equal parts."""
    splits = _splits(input, input_split_sizes, runner.group.world_size, "input_split_sizes")
    counts = _splits(output, output_split_sizes, runner.group.world_size, "output_split_sizes")
    writable([output], "all_to_all")
    call = partial(runner.group.all_to_all, flat(input), flat(output), splits, counts)
    return runner.run(call, partial(deal, into=[output], operation="all_to_all"), opts)


def _splits(tensor: Tensor, sizes: Sequence[int], num_ranks: int, argument: str) -> list[int]:
    """Returns the number of elements for each rank.

    Raises:
        SizeMismatch: the sizes are not a number of rows for each rank that add up to the tensor's.
    """
    # torch counts rows, Echelon the elements of a flat tensor.
    num_rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if num_rows % num_ranks:
            raise SizeMismatch(
                "a number of rows that all ranks share equally",
                f"{num_rows} rows, which {num_ranks} ranks do not divide",
                "all_to_all_single",
                "give the rows of each rank as input_split_sizes and output_split_sizes",
            )
        return [tensor.numel() // num_ranks] * num_ranks
    if len(sizes) != num_ranks or sum(sizes) != num_rows or min(sizes) < 0:
        expected = f"{num_ranks} numbers of rows that add up to {num_rows}"
        raise SizeMismatch(expected, list(sizes), f"all_to_all_single({argument}=)", "give the rows of each rank")
    row = tensor.numel() // num_rows if num_rows else 0
    return [size * row for size in sizes]


def barrier(runner: Runner, opts: Options | None = None) -> TorchWork:
    """Completes when every rank has called it, and the operations that this rank has started before have ended."""
    return runner.run(runner.group.barrier, lambda _: [], opts, is_behind_all=True)


def _root(opts: RootOptions | None) -> int:
    return 0 if opts is None else opts.rootRank


COLLECTIVES: Mapping[str, Callable[..., TorchWork]] = {
    "allreduce": allreduce,
    "allreduce_coalesced": allreduce_coalesced,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter_single,
    "reduce_scatter_single_coalesced": reduce_scatter_single_coalesced,
    "broadcast": broadcast,
    "allgather": allgather,
    "allgather_coalesced": allgather_coalesced,
    "all_gather_single": all_gather_single,
    "all_gather_single_coalesced": all_gather_single_coalesced,
    "gather": gather,
    "gather_single": gather_single,
    "scatter": scatter,
    "alltoall": alltoall,
    "all_to_all_single": all_to_all_single,
    "barrier": barrier,
    # Names before torch 2.13.
    "_reduce_scatter_base": reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": reduce_scatter_single_coalesced,
    "_allgather_base": all_gather_single,
    "allgather_into_tensor_coalesced": all_gather_single_coalesced,
    "alltoall_base": all_to_all_single,
}
"""By torch's name."""
