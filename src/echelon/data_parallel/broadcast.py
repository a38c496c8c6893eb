"""Sends many tensors from one rank to all, or averages them over all, in few messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.backends.memory import as_bytes, check_writable, plain
from echelon.data_parallel.buckets import bucket_layout
from echelon.group import ProcessGroup


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], group: ProcessGroup, src: int = 0, bucket_mb: float = 25
) -> None:
    """Overwrites `tensors` on every rank with those of rank `src`, in place. Blocks until it is done.

    A tensor whose values are right already is not written: autograd refuses a backward through a tensor that was
    written since, even with the same values.

    Args:
        tensors: same number, shapes and dtypes on every rank.
        group: the ranks.
        src: the rank whose tensors they are.
        bucket_mb: mebibytes that travel, and are copied on the way, at a time.

    Raises:
        UnsupportedOp, InvalidRank, CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.broadcast`.
    """
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


def kind_of(tensor: torch.Tensor) -> str:
    """Returns what tensors must have in common to travel in one flat tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _in_buckets(tensors: Sequence[torch.Tensor], bucket_mb: float) -> list[list[torch.Tensor]]:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    layout = bucket_layout(sizes, [kind_of(tensor) for tensor in tensors], bucket_mb, first_bucket_mb=bucket_mb)
    return [[tensors[member] for member in bucket.members] for bucket in layout.buckets]


def _write(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    for tensor, piece in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        if not torch.equal(as_bytes(plain(tensor)), as_bytes(piece)):  # bits: 0 is not -0
            check_writable(tensor, "a broadcast of parameters and buffers")
            tensor.copy_(piece.view(tensor.shape))
