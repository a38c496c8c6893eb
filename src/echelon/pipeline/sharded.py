"""Refusal of stages whose parameters are sharded by FSDP.

FSDP gathers a block's parameters before its forward and its backward, and frees them afterwards. A backward in two
halves (I and W) computes weight gradients after that, with wrong values and without an error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from echelon.errors import UnsupportedOp
from echelon.group import ProcessGroup
from echelon.pipeline.stage import Stage

_FSDP = "torch.distributed.fsdp"


def refuse_sharded_stages(stages: Sequence[Stage], group: ProcessGroup) -> None:
    """Raises UnsupportedOp on all ranks if a stage of any of them is sharded by FSDP."""
    told = [str(found) for found in group.all_gather_object(_sharded(stages)) if found]
    if told:
        raise UnsupportedOp(
            f"{told[0]} is sharded by FSDP, and a pipeline cannot run that: pass the plain stage, with data_parallel= "
            "for replicas and ZeroOptimizer to shard their optimizer's state"
        )


def _sharded(stages: Sequence[Stage]) -> str:
    """Returns the first module of these stages that FSDP has wrapped, in words; empty if there is none."""
    fsdp = sys.modules.get(_FSDP)
    if fsdp is None:  # to import it takes a second, and nothing can be sharded without it
        return ""
    for stage in stages:
        for name, module in stage.module.named_modules():
            if isinstance(module, fsdp.FSDPModule | fsdp.FullyShardedDataParallel):
                return f"stage {stage.index}, module {name!r}" if name else f"stage {stage.index}"
    return ""
