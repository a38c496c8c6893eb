"""Differentiable collectives and messages, which return new tensors.

The gradient of each is that of the sum of all ranks' losses. Backward consists of these functions too, so it can be
differentiated again. Every rank must run the backward of every call. A rank that gets no result (of `reduce`, `gather`
or `send`) gets a tensor without elements, which must be part of its loss, for example by adding its sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.arguments import refuse_others
from echelon.backends.admission import check_mode, check_values
from echelon.backends.formats.wire import Tag
from echelon.backends.memory import plain
from echelon.backends.operators import check_op
from echelon.errors import InvalidRank, SizeMismatch, UnsupportedOp
from echelon.group.collectives import check_splits
from echelon.group.group import ProcessGroup, check_group

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "sendrecv",
]

_GRADIENTS = 3 << 62
"""Sequence number of messages that carry gradients, out of reach of collectives and of transfers between stages."""
_LINEAR = ("sum", "mean")  # reductions with a gradient that needs no values of the forward

_refuse_others = refuse_others(
    **dict.fromkeys(("pg", "process_group", "comm"), "group"),
    **dict.fromkeys(("root", "group_src"), "src"),
    dim=" rows are those of dim 0: transpose the tensor first",
    async_op=" a gradient needs the result: leave it out",
    out=" a new tensor is returned: leave it out",
    timeout=" the group has it: set group.timeout",
)


@_refuse_others
def all_reduce(tensor: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
    """Returns `tensor` reduced over all ranks.

    Args:
        tensor: same shape and dtype on every rank.
        group: the ranks.
        op: sum, mean, product, min or max. Ranks that tie for min or max share the gradient. The gradients of product,
            min and max cannot be differentiated again.

    Raises:
        UnsupportedOp: another op.
        CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_reduce`.
    """
    _check(tensor, group, "all_reduce")
    op = check_op(op)
    if op == "sum":
        return _apply(_Sum, tensor, group)
    if op == "mean":
        return _apply(_Sum, tensor, group) / group.world_size
    if op in ("product", "min", "max"):
        return _apply(_Nonlinear, tensor, group, op)
    raise UnsupportedOp(f"op={op!r} has no gradient: use sum, mean, product, min or max")


@_refuse_others
def reduce(tensor: Tensor, dst: int, group: ProcessGroup, op: str = "sum") -> Tensor:
    """Returns `tensor` reduced over all ranks on rank `dst`. A tensor without elements on other ranks.

    Args:
        tensor: same shape and dtype on every rank.
        dst: the rank that gets the result.
        group: the ranks.
        op: as in `all_reduce`. Ops other than sum and mean cost as much as an all-reduce.

    Raises:
        InvalidRank: `dst` is not a rank of the group.
        UnsupportedOp: another op.
        CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.reduce`.
    """
    _check(tensor, group, "reduce")
    _check_root(dst, group, "dst")
    op = check_op(op)
    if op not in _LINEAR:
        everywhere = all_reduce(tensor, group, op)
        return everywhere if group.rank == dst else everywhere.flatten()[:0]
    total = _apply(_Reduce, tensor, group, dst)
    return total / group.world_size if op == "mean" else total


@_refuse_others
def broadcast(tensor: Tensor, src: int, group: ProcessGroup) -> Tensor:
    """Returns the tensor of rank `src`; the gradients of all ranks add up there.

    Args:
        tensor: same shape and dtype on every rank.
        src: the rank whose tensor it is.
        group: the ranks.

    Raises:
        InvalidRank: `src` is not a rank of the group.
        UnsupportedOp: `tensor` is no tensor, or the backend cannot move it.
        CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.broadcast`.
    """
    _check(tensor, group, "broadcast")
    return _apply(_Broadcast, tensor, group, src)


@_refuse_others
def all_gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Returns the tensors of all ranks, concatenated along dim 0.

    Args:
        tensor: same dtype and same dims but the first on every rank; a zero-dim tensor counts as one row.
        group: the ranks.

    Raises:
        UnsupportedOp: `tensor` is no tensor, or the backend cannot move it.
        CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_gather`.
    """
    _check(tensor, group, "all_gather")
    tensor = _rows(tensor)
    return _apply(_AllGather, tensor, group, _all_sizes(tensor, group))


@_refuse_others
def gather(tensor: Tensor, dst: int, group: ProcessGroup) -> Tensor:
    """Returns the tensors of all ranks on rank `dst`, concatenated along dim 0. A tensor without rows on other ranks.

    Args:
        tensor: same dtype, and same dims except the first, on every rank.
        dst: the rank that gets them.
        group: the ranks.

    Raises:
        InvalidRank: `dst` is not a rank of the group.
        UnsupportedOp: `tensor` is no tensor, or the backend cannot move it.
        CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.gather`.
    """
    _check(tensor, group, "gather")
    _check_root(dst, group, "dst")
    tensor = _rows(tensor)
    sizes = _all_sizes(tensor, group)
    ranks = range(group.world_size)
    sends = [len(tensor) if rank == dst else 0 for rank in ranks]
    return _apply(_AllToAll, tensor, group, sends, sizes if group.rank == dst else [0 for _ in ranks])


@_refuse_others
def scatter(tensor: Tensor, src: int, group: ProcessGroup) -> Tensor:
    """Returns this rank's part of the tensor of rank `src`, split along dim 0 as torch.tensor_split does.

    Args:
        tensor: on rank `src` the tensor to split; on others any of the same dtype and the same dims but the first.
        src: the rank whose tensor it is.
        group: the ranks.

    Raises:
        InvalidRank: `src` is not a rank of the group.
        SizeMismatch: a tensor without dims.
        CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.scatter`.
    """
    _check(tensor, group, "scatter")
    _check_dims(tensor, "scatter")
    _check_root(src, group, "src")
    rows = _all_sizes(tensor, group)[src]
    sizes = _even(rows, group.world_size)
    nothing = [0] * group.world_size
    arrives = [sizes[group.rank] if rank == src else 0 for rank in range(group.world_size)]
    # As an all_to_all to which the other ranks give no rows: its backward is one, too, so gradients come back to `src`.
    mine = tensor if group.rank == src else tensor[:0]
    return _apply(_AllToAll, mine, group, sizes if group.rank == src else nothing, arrives)


@_refuse_others
def reduce_scatter(tensor: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
    """Returns this rank's part of `tensor` reduced over all ranks, split along dim 0 as torch.tensor_split does.

    Args:
        tensor: same shape and dtype on every rank, at least one dim.
        group: the ranks.
        op: as in `all_reduce`. Ops other than sum and mean cost as much as an all-reduce.

    Raises:
        UnsupportedOp: another op.
        SizeMismatch: a tensor without dims.
        CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.reduce_scatter`.
    """
    _check(tensor, group, "reduce_scatter")
    _check_dims(tensor, "reduce_scatter")
    op = check_op(op)
    if op not in _LINEAR:
        return all_reduce(tensor, group, op).tensor_split(group.world_size)[group.rank]
    total = _apply(_ReduceScatter, tensor, group)
    return total / group.world_size if op == "mean" else total


@_refuse_others
def all_to_all(
    tensor: Tensor,
    group: ProcessGroup,
    in_splits: Sequence[int] | None = None,
    out_splits: Sequence[int] | None = None,
) -> Tensor:
    """Sends part r of `tensor` to every rank r and returns the received parts, concatenated along dim 0.

    Args:
        tensor: same dtype and same dims but the first on every rank; a zero-dim tensor counts as one row.
        group: the ranks.
        in_splits: rows for each rank; None: split as torch.tensor_split does.
        out_splits: rows from each rank; None: exchanged in a small collective first.

    Raises:
        InvalidArgument: splits that are not a list of whole numbers.
        SizeMismatch: splits that do not add up.
        CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_to_all`.
    """
    _check(tensor, group, "all_to_all")
    tensor = _rows(tensor)
    check_splits(in_splits, "in_splits")
    check_splits(out_splits, "out_splits")
    sends = _even(len(tensor), group.world_size) if in_splits is None else list(in_splits)
    if out_splits is None:
        # device="cpu": torch.set_default_device may name another.
        out_splits = group.all_to_all(torch.tensor(sends, device="cpu")).tolist()
    return _apply(_AllToAll, tensor, group, sends, list(out_splits))


@_refuse_others
def send(tensor: Tensor, dst: int, group: ProcessGroup, tag: int = 0) -> Tensor:
    """Sends a tensor to rank `dst`, which receives it by `recv`. Backward receives its gradient.

    Backward runs messages in the opposite order. Use `sendrecv` if two ranks send to each other.

    Args:
        tensor: requires a gradient.
        dst: the receiver.
        group: the ranks.
        tag: as in `ProcessGroup.send`.

    Returns:
        A tensor without elements, which must be part of the loss.

    Raises:
        UnsupportedOp: the tensor requires no gradient.
        InvalidRank, SelfSend, SizeMismatch, PeerFailed, Timeout: as `ProcessGroup.send`.
    """
    _check(tensor, group, "send")
    _check_requires_grad(tensor, "send")
    return _apply(_Send, tensor, group, dst, tag, False)


@_refuse_others
def recv(src: int, group: ProcessGroup, tag: int = 0) -> Tensor:
    """Returns the next tensor that rank `src` sends by `send`. Backward sends its gradient back.

    Only `Tensor.backward()` does: torch.autograd.grad skips functions that its inputs do not reach, such as this one.

    Args:
        src: the sender.
        group: the ranks.
        tag: as in `ProcessGroup.recv`.

    Raises:
        InvalidArgument: `group` is no group.
        InvalidRank, SelfSend, SizeMismatch, PeerFailed, Timeout: as `ProcessGroup.recv`.
    """
    check_group(group)
    check_mode("functional.recv")
    # The empty tensor stands for the message in the graph: autograd runs no backward without an input.
    return _apply(_Recv, torch.empty(0, device="cpu", requires_grad=torch.is_grad_enabled()), group, src, tag, False)


@_refuse_others
def sendrecv(tensor: Tensor, dst: int, src: int, group: ProcessGroup, tag: int = 0) -> Tensor:
    """Sends a tensor to rank `dst` and returns the next one of rank `src`. Backward exchanges gradients the other way.

    Args:
        tensor: requires a gradient.
        dst, src: as in `ProcessGroup.sendrecv`.
        group: the ranks.
        tag: tag of both messages.

    Raises:
        UnsupportedOp: the tensor requires no gradient.
        InvalidRank, SelfSend, SizeMismatch, PeerFailed, Timeout: as `ProcessGroup.sendrecv`.
    """
    _check(tensor, group, "sendrecv")
    _check_requires_grad(tensor, "sendrecv")
    return _apply(_SendRecv, tensor, group, dst, src, tag, False)


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return group.all_reduce(_copy(tensor))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Every rank's result depends on this rank's tensor: its gradient is the sum of all ranks' gradients.
        return _apply(_Sum, gradient, ctx.group), None


class _Nonlinear(Function):
    """Product, min or max. Their gradient is that of the result, times a weight of this rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, op: str) -> Tensor:
        ctx.group = group
        if op == "product":
            everyone = group.all_gather(tensor.detach()[None])
            # The gradient is the product of the other ranks' values: not total / own, which fails at zero.
            others = torch.cat([everyone[: group.rank], everyone[group.rank + 1 :]])
            ctx.save_for_backward(others.prod(0).conj())
            return everyone.prod(0)
        result = group.all_reduce(_copy(tensor), op)
        # Ranks that tie share the gradient, as the elements of torch.amax do.
        mine = (tensor == result).to(tensor.dtype)
        ctx.save_for_backward(mine / group.all_reduce(mine.clone()))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.group.all_reduce(_copy(gradient)) * ctx.saved_tensors[0], None, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, dst: int) -> Tensor:
        ctx.group, ctx.dst, ctx.shape = group, dst, tensor.shape
        total = group.reduce(_copy(tensor), dst)
        return total if group.rank == dst else tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # The sum of no elements is zero, but part of the graph: every rank takes part in a second backward too.
        mine = gradient if ctx.group.rank == ctx.dst else gradient.new_zeros(ctx.shape) + gradient.sum()
        return _apply(_Broadcast, mine, ctx.group, ctx.dst), None, None


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, src: int) -> Tensor:
        ctx.group, ctx.src, ctx.shape = group, src, tensor.shape
        return group.broadcast(_copy(tensor), src)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = _apply(_Reduce, gradient, ctx.group, ctx.src)
        return (total if ctx.group.rank == ctx.src else gradient.new_zeros(ctx.shape) + total.sum()), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.sizes = group, _even(len(tensor), group.world_size)
        return group.reduce_scatter(tensor.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _apply(_AllGather, gradient, ctx.group, ctx.sizes), None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, sizes: list[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return group.all_gather(tensor.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        group, sizes = ctx.group, ctx.sizes
        # reduce_scatter splits evenly. For other sizes each rank gets all gradients of its rows, and adds them up.
        if sizes == _even(sum(sizes), group.world_size):
            return _apply(_ReduceScatter, gradient, group), None, None
        mine = sizes[group.rank]
        parts = _apply(_AllToAll, gradient, group, sizes, [mine] * group.world_size)
        return parts.reshape(group.world_size, mine, *gradient.shape[1:]).sum(0), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, sends: list[int], arrives: list[int]) -> Tensor:
        ctx.group, ctx.sends, ctx.arrives = group, sends, arrives
        return group.all_to_all(tensor.detach(), in_splits=sends, out_splits=arrives)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _apply(_AllToAll, gradient, ctx.group, ctx.arrives, ctx.sends), None, None, None


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, dst: int, tag: int, is_gradient: bool) -> Tensor:
        ctx.group, ctx.dst, ctx.tag = group, dst, tag
        if is_gradient:
            group.backend.messages.send(plain(tensor), group.ranks[dst], _gradient_tag(group, tag), group.timeout)
        else:
            group.send(tensor, dst, tag)
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        return _apply(_Recv, token, ctx.group, ctx.dst, ctx.tag, True), None, None, None, None


class _Recv(Function):
    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,  # noqa: ARG004
        group: ProcessGroup,
        src: int,
        tag: int,
        is_gradient: bool,
    ) -> Tensor:
        """Takes a token without elements: autograd runs backward only for functions with an input that requires it."""
        ctx.group, ctx.src, ctx.tag = group, src, tag
        if is_gradient:
            return group.backend.messages.recv(group.ranks[src], _gradient_tag(group, tag), timeout=group.timeout)
        return group.recv(src, tag)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _apply(_Send, gradient, ctx.group, ctx.src, ctx.tag, True), None, None, None, None


class _SendRecv(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: ProcessGroup, dst: int, src: int, tag: int, is_gradient: bool
    ) -> Tensor:
        ctx.group, ctx.dst, ctx.src, ctx.tag = group, dst, src, tag
        if not is_gradient:
            return group.sendrecv(tensor, dst, src, tag)
        backend, place = group.backend, _gradient_tag(group, tag)
        # Both at once, so that two ranks which exchange do not wait for each other.
        with backend.messages.will_wait():
            sent = backend.messages.isend(plain(tensor), group.ranks[dst], place)
            came = backend.messages.recv(group.ranks[src], place, timeout=group.timeout)
            sent.wait(group.timeout)
        return came

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        back = _apply(_SendRecv, gradient, ctx.group, ctx.src, ctx.dst, ctx.tag, True)
        return back, None, None, None, None, None


def _gradient_tag(group: ProcessGroup, tag: int) -> Tag:
    return Tag(group.context, _GRADIENTS, tag)


def _apply(function: type[Function], *args: object) -> Tensor:
    for argument in args:
        if isinstance(argument, Tensor):  # before autograd sees it, which refuses wrappers of torch.func unclearly
            check_values(argument, "echelon.functional")
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _check(tensor: object, group: object, what: str) -> None:
    check_group(group)
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        raise UnsupportedOp(f"functional.{what} takes a tensor, not {kind}: pass one, as torch.tensor(x)")
    check_mode(f"functional.{what}")


def _check_dims(tensor: Tensor, what: str) -> None:
    check_values(tensor, f"functional.{what}")
    if tensor.dim() == 0:
        raise SizeMismatch("a tensor with at least 1 dim", "a zero-dim tensor", f"functional.{what}", "reshape it")


def _check_root(rank: object, group: ProcessGroup, what: str) -> None:
    """Raises InvalidRank, before the ranks exchange sizes that a wrong root would index."""
    if not isinstance(rank, int) or not 0 <= rank < group.world_size:
        raise InvalidRank(rank, group.world_size, what)


def _check_requires_grad(tensor: Tensor, what: str) -> None:
    check_values(tensor, f"functional.{what}")
    if torch.is_grad_enabled() and not tensor.requires_grad:
        raise UnsupportedOp(f"functional.{what} of a tensor that requires no gradient: use group.{what}")


def _rows(tensor: Tensor) -> Tensor:
    check_values(tensor, "echelon.functional")  # before ranks exchange their sizes
    return tensor if tensor.dim() else tensor.reshape(1)


def _all_sizes(tensor: Tensor, group: ProcessGroup) -> list[int]:
    """Returns the number of rows of each rank, from a small all-gather."""
    return [int(size) for size in group.all_gather(torch.tensor([len(tensor)], device="cpu")).tolist()]


def _even(rows: int, parts: int) -> list[int]:
    return [rows // parts + (part < rows % parts) for part in range(parts)]
