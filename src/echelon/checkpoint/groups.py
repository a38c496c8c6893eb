"""Group of ranks that save and load a checkpoint together."""

from __future__ import annotations

import weakref
from typing import cast

import torch
import torch.distributed as dist

from echelon.backends.work import DEFAULT_TIMEOUT
from echelon.checkpoint.objects.model import wrapped_by
from echelon.data_parallel.zero import ZeroOptimizer
from echelon.errors import InvalidArgument
from echelon.group.group import JsonLike, ProcessGroup, context_of
from echelon.interop.process_group import EchelonProcessGroup
from echelon.launch.init import carry, current_group, end_with_program
from echelon.launch.torch_store import connect_default_group
from echelon.pipeline.run.pipeline import Pipeline

_PATIENCE = 60.0
"""Seconds for the ranks of torch.distributed to find each other."""

# Weak: a group ends with its pipeline, or with torch's default group.
_of_pipelines: weakref.WeakKeyDictionary[Pipeline, ProcessGroup] = weakref.WeakKeyDictionary()
_of_torch: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()


def group_of(model: object, optimizer: object) -> ProcessGroup | None:
    """Returns the group of a model's ranks. None if this process is alone. All of its ranks must call it.

    That of a DistributedDataParallel, or of a Pipeline with its replicas. For a plain module that of its ZeroOptimizer,
    else that of this process or simulated rank, else one of the ranks of torch.distributed. Blocks the first time for
    replicas and torch.distributed.

    Raises:
        InvalidArgument: a pipeline and its replicas have connections of their own, which have no group in common.
        ConnectError: the ranks of torch.distributed did not find each other.
    """
    if isinstance(model, Pipeline):
        return _of_pipeline(model)
    wrapped = wrapped_by(model)
    if wrapped is not None:
        return wrapped.group
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.group
    current = current_group()
    if current is None and dist.is_available() and dist.is_initialized():
        return _of_default_group()
    return current


def _of_pipeline(pipe: Pipeline) -> ProcessGroup:
    replicas = pipe.data_parallel
    if replicas is None or replicas.world_size == 1:
        return pipe.group
    if pipe not in _of_pipelines:
        _of_pipelines[pipe] = _grid(pipe.group, replicas)
    return _of_pipelines[pipe]


def _grid(stages: ProcessGroup, replicas: ProcessGroup) -> ProcessGroup:
    """Returns the group of all stages of all replicas. Blocks until all ranks of `replicas` have called it."""
    if stages.backend is not replicas.backend:
        raise InvalidArgument(
            "the groups of the pipeline and of its replicas come from different calls of echelon.init(): pass "
            "Store(path, group=) the group of all ranks"
        )
    told = replicas.all_gather_object([str(stages.context), list[JsonLike](stages.ranks)])
    rows = cast("list[tuple[str, list[int]]]", told)
    ranks = sorted(rank for _, row in rows for rank in row)
    # Every rank derives the same context from those of the pipelines, so no message is needed between columns.
    context = context_of(f"checkpoint of the pipelines {sorted(context for context, _ in rows)}")
    return ProcessGroup(
        stages.backend, ranks, context=context, timeout=stages.timeout, name="stages and replicas", table=stages.table
    )


def _of_default_group() -> ProcessGroup | None:
    world = dist.group.WORLD
    assert world is not None
    if dist.get_world_size() == 1:
        return None
    if world not in _of_torch:
        if isinstance(world, EchelonProcessGroup):
            group = world.group.subgroup(range(world.group.world_size), world.group.name)
            assert group is not None
        else:
            tcp = connect_default_group(DEFAULT_TIMEOUT, _PATIENCE)
            group = ProcessGroup(carry(tcp, "tcp", _PATIENCE, torch.device("cpu")))
            end_with_program(group)
        _of_torch[world] = group
    return _of_torch[world]
