"""Broadcasts and averages of many tensors in few messages, and the comparison of models that precedes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, cast

import torch

from echelon.arguments import named
from echelon.backends.memory import as_bytes, check_writable, describe, plain
from echelon.data_parallel.layout import bucket_layout
from echelon.errors import CollectiveMismatch, InvalidArgument
from echelon.group.group import JsonLike, ProcessGroup


def check_same_model(module: torch.nn.Module, group: ProcessGroup, options: Iterable[str]) -> None:
    """Compares names, shapes and dtypes of parameters and buffers over all ranks, in their order. Blocks.

    Of parameters also the order of their dims in memory.

    Call it before any tensor of the model is sent, so that ranks never write into tensors of another shape.

    Args:
        module: the model; its values do not matter.
        group: the ranks.
        options: further lines that must be equal on all ranks.

    Raises:
        CollectiveMismatch: on every rank, with the first difference.
    """
    check_same_lines([*options, *outline(module)], group)


def check_same_lines(lines: Sequence[str], group: ProcessGroup) -> None:
    """Compares lines of text, such as a model's outline, over all ranks. Blocks.

    Raises:
        CollectiveMismatch: on every rank, with the first difference.
    """
    if group.world_size == 1:
        return
    # Fast path: ranks exchange 16 bytes. The lines themselves travel only to explain a difference.
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
    if len(set(map(str, group.all_gather_object(digest)))) == 1:
        return
    by_rank = group.all_gather_object(list[JsonLike](lines))
    raise CollectiveMismatch(first_difference(cast("list[list[str]]", by_rank), group.ranks))


def outline(module: torch.nn.Module) -> list[str]:
    """Returns a line for each parameter and each buffer."""
    parameters = [
        f"parameter {name!r} {described(tensor)}{'' if tensor.requires_grad else ', frozen'}"
        for name, tensor in module.named_parameters()
    ]
    return parameters + [
        f"buffer {name!r} {describe(tensor.shape, tensor.dtype)}" for name, tensor in module.named_buffers()
    ]


def described(parameter: torch.Tensor) -> str:
    """Returns dtype and shape of a parameter, and the order of its dims in memory if it is another one."""
    # Gradients and shards are exchanged in the order of the memory.
    dims = [dim for dim, length in enumerate(parameter.shape) if length > 1]
    order = sorted(dims, key=parameter.stride, reverse=True)
    return describe(parameter.shape, parameter.dtype) + (f" with dims in memory as {order}" if order != dims else "")


def first_difference(by_rank: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """Returns a sentence about the first line in which a rank differs from the first rank.

    Args:
        by_rank: the lines of each rank; not all equal.
        ranks: numbers of the ranks, for the sentence.
    """
    for number in range(max(map(len, by_rank))):
        found = [lines[number] if number < len(lines) else "nothing more" for lines in by_rank]
        for rank, line in zip(ranks, found, strict=True):
            if line != found[0]:
                return (
                    f"the models differ: rank {ranks[0]} has {found[0]} where rank {rank} has {line}: "
                    "build the same model with the same options on every rank"
                )
    raise AssertionError("all ranks are equal")


def check_module(module: object) -> None:
    """Raises InvalidArgument unless `module` is an instance of a module."""
    if isinstance(module, torch.nn.Module):
        return
    if isinstance(module, type):
        raise InvalidArgument(f"module is {named(module)}: pass an instance of it, such as {module.__name__}(...)")
    raise InvalidArgument(f"module is {named(module)}: pass the model, a torch.nn.Module")


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], group: ProcessGroup, src: int = 0, bucket_mb: float = 25
) -> None:
    """Overwrites `tensors` on every rank with the tensors of rank `src`, in place. Blocks until it is done.

    A tensor that already has the right values is not written: autograd refuses a backward through a tensor that was
    written since, even with the same values.

    Args:
        tensors: same number, shapes and dtypes on every rank.
        group: the ranks.
        src: the rank whose values all ranks take.
        bucket_mb: mebibytes per message, and of temporary memory.

    Raises:
        UnsupportedOp, InvalidRank, CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.broadcast`.
    """
    # The broadcast refuses another `src`.
    if group.world_size == 1 and src == 0:
        return
    with torch.no_grad():
        for members in _in_buckets(tensors, bucket_mb):
            flat = group.broadcast(torch.cat([member.detach().reshape(-1) for member in members]), src)
            if group.rank != src:
                _write(members, flat)


def average_tensors(tensors: Sequence[torch.Tensor], group: ProcessGroup, bucket_mb: float = 25) -> None:
    """Replaces floating-point and complex `tensors` by their mean over all ranks, in place. Blocks until it is done.

    Args:
        tensors, group, bucket_mb: as in `broadcast_tensors`.
    """
    if group.world_size == 1:
        return
    with torch.no_grad():
        for members in _in_buckets(tensors, bucket_mb):
            _write(members, group.all_reduce(torch.cat([member.detach().reshape(-1) for member in members]), "mean"))


Buffers: TypeAlias = Literal["broadcast", "average", "local"]


def synchronize_buffers(
    buffers: Sequence[torch.Tensor], how: Buffers, group: ProcessGroup, src: int, bucket_mb: float
) -> None:
    """Makes buffers, such as BatchNorm's running statistics, equal on all ranks. Blocks, unless `how` is "local".

    "broadcast" copies the buffers of rank `src`. "average" takes the mean of floating-point and complex buffers, and
    copies the others from rank `src`. "local" leaves all of them.

    Args:
        buffers: same number, shapes and dtypes on every rank.
        how: "broadcast", "average" or "local".
        group: the ranks.
        src: the rank whose buffers are broadcast.
        bucket_mb: mebibytes per message.

    Raises:
        CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.broadcast`.
    """
    if how == "average":
        average_tensors([buffer for buffer in buffers if _has_fraction(buffer)], group, bucket_mb)
        buffers = [buffer for buffer in buffers if not _has_fraction(buffer)]
    if how != "local":
        broadcast_tensors(buffers, group, src, bucket_mb)


def _has_fraction(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def kind_of(tensor: torch.Tensor) -> str:
    """Returns the dtype and device as text. Tensors of one kind may share a flat tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _in_buckets(tensors: Sequence[torch.Tensor], bucket_mb: float) -> list[list[torch.Tensor]]:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    # No small first bucket: there is no backward to overlap with.
    layout = bucket_layout(sizes, [kind_of(tensor) for tensor in tensors], bucket_mb, first_bucket_mb=bucket_mb)
    return [[tensors[member] for member in bucket.members] for bucket in layout.buckets]


def _write(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    for tensor, piece in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        # Compared by bits, not by values: 0.0 equals -0.0, and NaN equals nothing.
        if not torch.equal(as_bytes(plain(tensor)), as_bytes(piece)):
            check_writable(tensor, "a broadcast of parameters and buffers")
            tensor.copy_(piece.view(tensor.shape))
