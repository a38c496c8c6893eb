"""SyncBatchNorm of torch on recorded ranks, whose tensors are on the CPU for torch: there it refuses to run.

The statistics of all ranks are gathered in forward, and the sums of the gradients are added up in backward, as by
torch on GPUs. The normalization takes the time of one that is not synchronized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon._torch_private.distributed import all_gather_into
from echelon._torch_private.modules import ddp_of_sync_batch_norm
from echelon.foresight.record.here import Recording, in_place_of


class _Reduce(torch.autograd.Function):
    """Adds up two sums for each channel in backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns the output."""
        ctx.group = group
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Returns the gradient."""
        sums = gradient.new_empty(2 * gradient.shape[1], dtype=torch.float32)
        dist.all_reduce(sums, group=ctx.group)
        return gradient, None


def _synchronized(_: Recording, original: Callable[..., Tensor], module: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    group = module.process_group or dist.group.WORLD
    if not module.training or group is None or group.size() == 1:
        return original(module, input)
    # As on a GPU: mean and inverse deviation of each channel, and the count.
    statistics = input.new_empty(2 * input.shape[1] + 1, dtype=torch.float32)
    all_gather_into(group, statistics.new_empty(group.size() * statistics.numel()), statistics).wait()
    is_tracked = module.track_running_stats
    if is_tracked and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    output = nn.functional.batch_norm(
        input,
        module.running_mean if is_tracked else None,
        module.running_var if is_tracked else None,
        module.weight,
        module.bias,
        True,
        module.momentum or 0.0,
        module.eps,
    )
    reduced: Tensor = _Reduce.apply(output, group)  # type: ignore[no-untyped-call]
    return reduced


@contextmanager
def batch_norm_on_gpu() -> Iterator[None]:
    """Inside, SyncBatchNorm of recorded ranks runs, also in torch's DDP."""
    with (
        patch.object(nn.SyncBatchNorm, "forward", in_place_of(nn.SyncBatchNorm.forward, _synchronized)),
        ddp_of_sync_batch_norm(),
    ):
        yield
