"""Collectives of torch's process group interface, each mapped to one of Echelon's. Ranks are group ranks.

Every method has the name and the arguments of torch's calls, from Python (`torch.distributed`) and from C++ (DDP,
functional collectives). A name assigned below a method is its name in torch before 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined] # public, by its __all__
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from echelon.errors import SizeMismatch, UnsupportedOp
from echelon.interop.devices import by_device
from echelon.interop.reductions import Reduction
from echelon.interop.running import Running
from echelon.interop.tensors import count_change, deal, flat, joined, only, put, writable

# All-reduce of sparse tensors, which Echelon's collectives do not support: every rank gathers the entries of all.
# Ranks may have entries at different indices, and any number of them. Only sums work this way: a missing entry is zero,
# which a sum can skip and a minimum cannot.


def entries(tensor: Tensor, reduction: Reduction) -> list[Tensor]:
    """Returns the indices (one a row) and the values of a sparse COO tensor, to be gathered.

    Raises:
        UnsupportedOp: another layout, or a reduction that is not a sum.
    """
    if tensor.layout != torch.sparse_coo or reduction.op not in ("sum", "mean") or reduction.factor is not None:
        raise UnsupportedOp(
            f"all_reduce({reduction.op}) of a tensor of layout {tensor.layout}: only SUM and AVG of sparse COO tensors "
            "are possible; call .to_dense() first"
        )
    own = tensor.detach().coalesce()
    return [own.indices().t().contiguous(), own.values()]


def put_sum(gathered: Sequence[Tensor], tensor: Tensor, reduction: Reduction, num_ranks: int) -> Tensor:
    """Writes the sum (or mean) of all ranks' entries into a sparse tensor and returns it."""
    places, values = gathered
    total = torch.sparse_coo_tensor(places.t(), values, tensor.shape, check_invariants=True).coalesce()
    with torch.no_grad():  # detach() would make another sparse tensor
        return tensor.copy_(total / num_ranks if reduction.op == "mean" else total)


class Collectives(Running):
    """Collectives of a torch group: all ranks call them in the same order. Each returns its `dist.Work`."""

    # Reductions

    @partial(by_device, takes_sparse=True)
    def allreduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions | None = None) -> dist.Work:
        """Reduces one tensor over all ranks, in place."""
        tensor, opts = only(tensors, "all_reduce"), opts or AllreduceOptions()
        reduction = Reduction.of(opts.reduceOp, tensor.dtype)
        if tensor.layout != torch.strided:
            gather = partial(self.group.all_gather_coalesced, entries(tensor, reduction))
            return self._run(gather, lambda came: [put_sum(came, tensor, reduction, self.group.world_size)], opts)
        writable([tensor], "all_reduce")
        call = partial(self.group.all_reduce, reduction.prepare(tensor), reduction.op)
        return self._run(call, lambda total: [self._finish(reduction, total, tensor)], opts)

    @by_device
    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: AllreduceCoalescedOptions | None = None
    ) -> dist.Work:
        """Reduces many tensors over all ranks, in place."""
        opts = opts or AllreduceCoalescedOptions()
        reductions = Reduction.of_all(opts.reduceOp, tensors)
        writable(tensors, "all_reduce_coalesced")
        values = [reduction.prepare(tensor) for reduction, tensor in zip(reductions, tensors, strict=True)]
        call = partial(self.group.all_reduce_coalesced, values, reductions[0].op if reductions else "sum")
        return self._run(call, lambda totals: self._finish_all(reductions, totals, tensors), opts)

    @by_device
    def reduce(self, tensors: Sequence[Tensor], opts: ReduceOptions | None = None) -> dist.Work:
        """Reduces one tensor over all ranks, in place on the root."""
        tensor, opts = only(tensors, "reduce"), opts or ReduceOptions()
        reduction = Reduction.of(opts.reduceOp, tensor.dtype)
        call = partial(self.group.reduce, reduction.prepare(tensor), opts.rootRank, reduction.op)
        is_root = self.group.rank == opts.rootRank
        if is_root:
            writable([tensor], "reduce")
        return self._run(call, lambda total: [self._finish(reduction, total, tensor) if is_root else tensor], opts)

    @by_device
    def reduce_scatter(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Sequence[Tensor]],
        opts: ReduceScatterOptions | None = None,
    ) -> dist.Work:
        """Reduces a list of tensors, one per rank, over all ranks. Each rank gets its own."""
        output, opts = (
            only(writable(output_tensors, "reduce_scatter"), "reduce_scatter"),
            opts or ReduceScatterOptions(),
        )
        (inputs,) = input_tensors
        sizes = [tensor.numel() for tensor in inputs]
        # Echelon's reduce_scatter takes equal parts only. Others are all reduced, and this rank keeps its own.
        if len(set(sizes)) <= 1:
            return self._reduce_scatter(output, joined(inputs), opts)
        reduction = Reduction.of(opts.reduceOp, output.dtype)
        values = reduction.prepare(joined(inputs))
        mine = slice(sum(sizes[: self.group.rank]), sum(sizes[: self.group.rank + 1]))
        call = partial(self.group.all_reduce, values, reduction.op)
        return self._run(call, lambda total: [self._finish(reduction, total[mine], output)], opts)

    @by_device
    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: ReduceScatterOptions | None = None
    ) -> dist.Work:
        """Reduces a tensor over all ranks. Each rank gets its part."""
        opts = opts or ReduceScatterOptions()
        writable([output], "reduce_scatter")
        return self._reduce_scatter(output, flat(input), opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, output: Tensor, values: Tensor, opts: ReduceScatterOptions) -> dist.Work:
        if values.numel() != output.numel() * self.group.world_size:
            expected = f"{self.group.world_size} times the {output.numel()} elements of the output"
            raise SizeMismatch(expected, values.numel(), "reduce_scatter", "give one part for each rank")
        reduction = Reduction.of(opts.reduceOp, output.dtype)
        call = partial(self.group.reduce_scatter, reduction.prepare(values), reduction.op, flat(output))
        return self._run(call, lambda total: [self._finish(reduction, total, output)], opts)

    @by_device
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: ReduceScatterOptions | None = None
    ) -> dist.Work:
        """Reduces many tensors over all ranks. Each rank gets its part of each."""
        opts = opts or ReduceScatterOptions()
        reductions = Reduction.of_all(opts.reduceOp, inputs)
        writable(outputs, "reduce_scatter_coalesced")
        values = [reduction.prepare(tensor) for reduction, tensor in zip(reductions, inputs, strict=True)]
        call = partial(self.group.reduce_scatter_coalesced, values, reductions[0].op if reductions else "sum")
        return self._run(call, lambda totals: self._finish_all(reductions, totals, outputs), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _finish(self, reduction: Reduction, total: Tensor, into: Tensor) -> Tensor:
        """Writes the result of a reduction into the user's tensor and returns the tensor."""
        if total.numel() != into.numel():
            raise SizeMismatch(f"{total.numel()} elements of output", into.numel(), "reduce_scatter")
        return put(reduction.finish(total, self.group.world_size), into)

    def _finish_all(
        self, reductions: Sequence[Reduction], totals: Sequence[Tensor], into: Sequence[Tensor]
    ) -> list[Tensor]:
        return [self._finish(*each) for each in zip(reductions, totals, into, strict=True)]

    # Moving tensors

    @by_device
    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions | None = None) -> dist.Work:
        """Overwrites one tensor on every rank with the root's."""
        tensor, opts = only(tensors, "broadcast"), opts or BroadcastOptions()
        if self.group.rank != opts.rootRank:
            writable([tensor], "broadcast")
        else:
            count_change([tensor])  # the tensor stays, but the program then fails on this rank as on the others
        call = partial(self.group.broadcast, flat(tensor), opts.rootRank)
        return self._run(call, lambda values: [put(values, tensor)], opts)

    @by_device
    def allgather(
        self,
        output_tensors: Sequence[Sequence[Tensor]],
        input_tensors: Sequence[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> dist.Work:
        """Gathers the tensors of all ranks into a list, on every rank. Their numbers of elements may differ."""
        tensor, opts = only(input_tensors, "all_gather"), opts or AllgatherOptions()
        (outputs,) = output_tensors
        writable(outputs, "all_gather")
        call = partial(self.group.all_gather, flat(tensor))
        return self._run(call, lambda rows: deal(rows, outputs, "all_gather"), opts)

    @by_device
    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> dist.Work:
        """Gathers many tensors of all ranks. `output_lists[rank]` has an output for each of them."""
        opts = opts or AllgatherOptions()
        places = [writable(each, "all_gather_coalesced") for each in zip(*output_lists, strict=True)]
        call = partial(self.group.all_gather_coalesced, [flat(tensor) for tensor in input_list])
        return self._run(call, lambda rows: _deal_all(rows, places), opts)

    @by_device
    def all_gather_single(self, output: Tensor, input: Tensor, opts: AllgatherOptions | None = None) -> dist.Work:
        """Gathers the tensors of all ranks into one, on every rank."""
        opts = opts or AllgatherOptions()
        writable([output], "all_gather")
        call = partial(self.group.all_gather, flat(input), flat(output))
        return self._run(call, lambda rows: [put(rows, output)], opts)

    _allgather_base = all_gather_single

    @by_device
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> dist.Work:
        """Gathers many tensors of all ranks, each into one, on every rank."""
        opts = opts or AllgatherOptions()
        writable(outputs, "all_gather_coalesced")
        call = partial(self.group.all_gather_coalesced, [flat(tensor) for tensor in inputs])
        return self._run(call, lambda rows: _deal_all(rows, [[output] for output in outputs]), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @by_device
    def gather(
        self,
        output_tensors: Sequence[Sequence[Tensor]],
        input_tensors: Sequence[Tensor],
        opts: GatherOptions | None = None,
    ) -> dist.Work:
        """Gathers the tensors of all ranks into a list, on the root."""
        tensor, opts = only(input_tensors, "gather"), opts or GatherOptions()
        outputs = writable(output_tensors[0], "gather") if output_tensors else []
        call = partial(self.group.gather, flat(tensor), opts.rootRank)
        return self._run(call, lambda rows: [] if rows is None else deal(rows, outputs, "gather"), opts)

    @by_device
    def gather_single(self, output: Tensor, input: Tensor, opts: GatherOptions | None = None) -> dist.Work:
        """Gathers the tensors of all ranks into one, on the root. torch calls it since 2.14."""
        opts = opts or GatherOptions()
        outputs = [output] if self.group.rank == opts.rootRank else []
        call = partial(self.group.gather, flat(input), opts.rootRank)
        return self._run(call, lambda rows: [] if rows is None else deal(rows, outputs, "gather"), opts)

    @by_device
    def scatter(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Sequence[Tensor]],
        opts: ScatterOptions | None = None,
    ) -> dist.Work:
        """Sends each rank its tensor of the root's list."""
        output, opts = only(writable(output_tensors, "scatter"), "scatter"), opts or ScatterOptions()
        values = joined(input_tensors[0]) if self.group.rank == opts.rootRank else None
        call = partial(self.group.scatter, values, opts.rootRank)
        return self._run(call, lambda part: deal(part, [output], "scatter"), opts)

    @by_device
    def alltoall(
        self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: AllToAllOptions | None = None
    ) -> dist.Work:
        """Sends each rank a tensor of a list and receives one from each."""
        opts = opts or AllToAllOptions()
        writable(output_tensors, "all_to_all")
        call = partial(
            self.group.all_to_all,
            joined(input_tensors),
            None,
            [tensor.numel() for tensor in input_tensors],
            [tensor.numel() for tensor in output_tensors],
        )
        return self._run(call, lambda came: deal(came, output_tensors, "all_to_all"), opts)

    @by_device
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: AllToAllOptions | None = None,
    ) -> dist.Work:
        """Sends each rank a part of a tensor, split along dim 0, and receives one from each. No sizes: equal parts."""
        opts = opts or AllToAllOptions()
        writable([output], "all_to_all")
        call = partial(
            self.group.all_to_all,
            flat(input),
            flat(output),
            self._splits(input, input_split_sizes),
            self._splits(output, output_split_sizes),
        )
        return self._run(call, lambda came: [put(came, output)], opts)

    alltoall_base = all_to_all_single

    def _splits(self, tensor: Tensor, sizes: Sequence[int]) -> list[int]:
        """Returns the number of elements for each rank."""
        if not sizes:
            return [tensor.numel() // self.group.world_size] * self.group.world_size
        row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
        return [size * row for size in sizes]

    def barrier(self, opts: BarrierOptions | None = None) -> dist.Work:
        """Completes when every rank has called it."""
        return self._run(self.group.barrier, lambda _: [], opts or BarrierOptions())


def _deal_all(values: Sequence[Tensor], into: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    pairs = zip(values, into, strict=True)
    return [tensor for rows, places in pairs for tensor in deal(rows, places, "all_gather")]
