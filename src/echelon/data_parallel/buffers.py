"""Brings the buffers of a model together, such as the running statistics of BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

from echelon.data_parallel.broadcast import average_tensors, broadcast_tensors
from echelon.group import ProcessGroup

Buffers: TypeAlias = Literal["broadcast", "average", "local"]


def synchronize_buffers(
    buffers: Sequence[torch.Tensor], how: Buffers, group: ProcessGroup, src: int, bucket_mb: float
) -> None:
    """Overwrites buffers by those of rank `src`, or by their mean if they are numbers with a fraction; or leaves them.

    Args:
        buffers: same number, shapes and dtypes on every rank.
        how: "broadcast", "average" or "local".
        group: the ranks.
        src: the rank whose buffers are broadcast.
        bucket_mb: mebibytes that travel at a time.

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
