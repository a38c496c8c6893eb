"""Checks of a Pipeline's arguments, and agreement on them by all ranks.

Ranks agree on the schedule before the model is cut, on the cut, and on refusing stages.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Mapping, Sequence

from torch import nn

from echelon.arguments import is_integral, is_iterable, named, shown
from echelon.data_parallel.sync_batchnorm import unsynchronized
from echelon.errors import CollectiveMismatch, PartitionError, ScheduleError, UnsupportedOp
from echelon.group.group import JsonLike, ProcessGroup, check_group
from echelon.pipeline import schedules
from echelon.pipeline.cut.cut import Parts, StageMaker, divide, example_of, split, trace_of
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules.registry import fixed_chunks
from echelon.pipeline.stage.stage import Stage
from echelon.purposes import PIPELINE, Purpose
from echelon.wording import counted

_FSDP = "torch.distributed.fsdp"


def refuse_stages(stages: Sequence[Stage], group: ProcessGroup, data_parallel: ProcessGroup | None) -> None:
    """Raises UnsupportedOp on all ranks if one has a stage that FSDP shards, or replicas of torch's SyncBatchNorm.

    FSDP gathers a block's parameters before its forward and before its backward, and frees them afterwards. W of a
    split backward runs after that: it would compute wrong weight gradients, without an error.
    """
    mine = [_sharded(stages)]
    if data_parallel is not None and data_parallel.world_size > 1:
        mine += [f"stage {each.index}: {found}" for each in stages if (found := unsynchronized(each.module))]
    told = [str(found) for found in group.all_gather_object(next(filter(None, mine), "")) if found]
    if told:
        raise UnsupportedOp(told[0])


def _sharded(stages: Sequence[Stage]) -> str:
    """Says which module of these stages is sharded by FSDP. Empty if there is none."""
    fsdp = sys.modules.get(_FSDP)
    if fsdp is None:  # nothing is sharded then, and importing it takes a second
        return ""
    for stage in stages:
        for name, module in stage.module.named_modules():
            if isinstance(module, fsdp.FSDPModule | fsdp.FullyShardedDataParallel):
                what = f"stage {stage.index}, module {name!r}" if name else f"stage {stage.index}"
                return (
                    f"{what} is sharded by FSDP, and a pipeline cannot run that: pass the plain stage, with "
                    "data_parallel= for replicas and ZeroOptimizer to shard their optimizer's state"
                )
    return ""


logger = logging.getLogger("echelon")


def check_groups(group: object, data_parallel: object) -> None:
    """Checks that both are groups, and that they have at most one rank in common.

    Raises:
        InvalidArgument: one of them is not a group.
        UnsupportedOp: they have more ranks in common.
    """
    group = check_group(group)
    if data_parallel is None:
        return
    data_parallel = check_group(data_parallel, "data_parallel")
    # This rank is in both. Rank numbers of different backends cannot be compared.
    both = sorted(set(group.ranks) & set(data_parallel.ranks))
    if data_parallel.backend is group.backend and len(both) > 1:
        raise UnsupportedOp(
            f"ranks {both} are in the pipeline's group and in data_parallel: pass the group of the ranks that hold "
            "equal stages, such as mesh['dp']"
        )


def check_arguments(
    model: object,
    loss_fn: object,
    loss_weight: object,
    metrics: object,
    loss_reduction: object,
    seed: object,
    data_parallel: ProcessGroup | None = None,
) -> None:
    """Checks the other arguments.

    Raises:
        UnsupportedOp: an argument is of the wrong type, or the model is wrapped, or there are replicas and loss_fn has
            parameters.
    """
    if type(model).__name__ == "DistributedDataParallel":  # torch's or Echelon's
        raise UnsupportedOp(
            "model is wrapped by DistributedDataParallel: pass the module itself, and data_parallel=mesh['dp'] for "
            "replicas of the stages"
        )
    for name, function in (("loss_fn", loss_fn), ("loss_weight", loss_weight), ("metrics", metrics)):
        if not (function is None or callable(function)):
            raise UnsupportedOp(f"{name} is {named(function)}: pass a function, or leave it out")
        if isinstance(function, type) and issubclass(function, nn.Module):
            raise UnsupportedOp(f"{name} is {named(function)}: pass an instance of it, such as {function.__name__}()")
    if isinstance(loss_fn, nn.Module) and data_parallel is not None and data_parallel.world_size > 1:
        held = model.modules if isinstance(model, Parts) else model
        stages = held if isinstance(held, list | tuple) else [held]
        known = {id(each) for stage in stages if isinstance(stage, nn.Module) for each in stage.parameters()}
        for name, parameter in loss_fn.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise UnsupportedOp(
                    f"loss_fn ({type(loss_fn).__name__}) trains a parameter of its own, {name!r}, whose gradients the "
                    "replicas would not average: compute the loss in the last stage, or freeze it"
                )
    if loss_reduction not in ("mean", "sum"):
        raise UnsupportedOp(f'loss_reduction={loss_reduction!r}: use "mean" or "sum"')
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UnsupportedOp(f"seed={seed!r}: give a whole number")


def choose_schedule(
    schedule: str | Schedule,
    num_ranks: int,
    num_microbatches: int | None,
    num_chunks: int | None,
    model: nn.Module | Sequence[StageMaker] | Parts,
    at: Sequence[str] | None,
) -> Schedule:
    """Returns the given schedule, or builds the one of this name, and checks it.

    Raises:
        PartitionError: `at` is no list, or makes another number of stages than the schedule has.
        ScheduleError: the schedule has problems, or is for other numbers of ranks, microbatches or chunks.
        UnsupportedOp: the schedule has no backward.
    """
    if isinstance(at, str):
        raise PartitionError(f"at={at!r}: give a list of names of layers, as at=[{at!r}]")
    if at is not None and not isinstance(at, Sequence):
        raise PartitionError(f"at={at!r}: give a list of names of layers, such as at=['h.4', 'h.8']")
    if isinstance(schedule, Schedule):
        if schedule.num_ranks != num_ranks:
            raise ScheduleError(
                f"the schedule is for {counted(schedule.num_ranks, 'rank')}, the group has {num_ranks}: make both equal"
            )
        for name, value, own in (
            ("num_microbatches", num_microbatches, schedule.num_microbatches),
            ("num_chunks", num_chunks, schedule.num_chunks),
        ):
            if value not in (None, own):
                raise ScheduleError(f"{name}={value}, but the schedule has {own}: leave it out")
        found = schedule
    elif not isinstance(schedule, str):
        raise ScheduleError(f"schedule is {named(schedule)}: give a name, such as '1f1b', or a Schedule")
    elif num_microbatches is None:
        raise ScheduleError(
            f"num_microbatches is missing: give the number of parts of a batch, such as {2 * num_ranks}"
        )
    else:
        parts = len(model) if isinstance(model, Parts | list | tuple) else 0
        if num_chunks is None and (parts or at is not None):
            num_chunks = _chunks_of(schedule, num_ranks, parts, at)
        found = schedules.build(schedule, num_ranks, num_microbatches, num_chunks)
    found.check()
    if found.forward_only:
        raise UnsupportedOp(f"{found.name} has no backward: pass a training schedule, and call forward() for inference")
    return found


def _chunks_of(name: str, num_ranks: int, num_parts: int, at: Sequence[str] | None) -> int:
    """Returns the chunks per rank: a list and `at` fix the number of stages.

    Raises:
        PartitionError: the schedule has another number.
    """
    num_stages, fixed = num_parts if at is None else len(at) + 1, fixed_chunks(name)
    if fixed is not None and num_stages != (needed := fixed * num_ranks):
        where = "the list" if at is None else "at="
        mend = f"give {needed} entries" if at is None else f"name {counted(needed - 1, 'layer')} in at="
        if fixed == 1 and num_stages % num_ranks == 0:
            mend += ", or take interleaved-1f1b"
        raise PartitionError(
            f"{where} makes {counted(num_stages, 'stage')}, but {name} on {counted(num_ranks, 'rank')} has {needed}, "
            f"{fixed} per rank: {mend if needed > 1 or at is None else 'leave at= out'}"
        )
    return max(1, num_stages // num_ranks)


def stages_to_recompute(recompute: object, num_stages: int) -> list[int]:
    """Returns the sorted indices of the stages that run their forward again before their backward.

    Raises:
        UnsupportedOp: `recompute` is neither a bool nor a list of existing stages.
    """
    if isinstance(recompute, bool):
        return list(range(num_stages)) if recompute else []
    stages = list(recompute) if is_iterable(recompute) else [-1]
    if not all(is_integral(stage) and stage < num_stages for stage in stages):
        raise UnsupportedOp(f"recompute={shown(recompute)}: give True, or a list of stages from 0 to {num_stages - 1}")
    return sorted(set(map(int, stages)))


def agreed_group(group: ProcessGroup, schedule: Schedule, others: Sequence[str]) -> ProcessGroup:
    """Compares the arguments of all ranks, and returns a new group of these ranks for the pipeline's messages.

    Blocks until all ranks have called it.

    Raises:
        CollectiveMismatch: the arguments differ; raised on every rank.
    """
    # The repr names the schedule in the error. The hash stands for all its actions, which would be a longer message.
    mine = [repr(schedule), hashlib.sha256(str(schedule).encode()).hexdigest()[:16], *others]
    for rank, theirs in enumerate(group.all_gather_object(list(mine))):
        if theirs != mine:
            raise CollectiveMismatch(
                f"rank {rank} made a Pipeline with {theirs}, rank {group.rank} with {mine}: pass the same arguments"
            )
    return own_group(group, STAGES)


STAGES = "stages"
"""End of the names of groups whose ranks hold different stages."""


def own_group(group: ProcessGroup, what: str = "pipeline") -> ProcessGroup:
    """Returns a new group of the same ranks. A failed step revokes it; the given group stays usable."""
    own = group.subgroup(range(group.world_size), f"{group.name}/{what}")
    assert own is not None
    own.backend.flight_recorder.serve(own.context, Purpose(PIPELINE, group.name))
    return own


def agreed_parts(
    model: nn.Module | Sequence[StageMaker] | Parts,
    schedule: Schedule,
    group: ProcessGroup,
    data_parallel: ProcessGroup | None,
    at: Sequence[str] | None,
    example: Sequence[object] | None,
    example_kwargs: Mapping[str, object] | None,
) -> Parts:
    """Cuts the model at the same layers on all ranks, and warns once of outputs that parts leave out.

    If layers are measured, one rank measures and broadcasts the names of the chosen layers. Lists and Parts are cut
    already: their example is for the trial of split backwards alone.

    Raises:
        PartitionError: the model cannot be cut so.
    """
    # One rank of all replicas.
    is_first = group.rank == 0 and (data_parallel is None or data_parallel.rank == 0)
    num_stages = schedule.num_stages
    if not isinstance(model, nn.Module):
        parts = split(model, num_stages, at=at)
    elif at is not None or (example is None and example_kwargs is None):
        # Named layers and numbers of parameters give the same cut on every rank: nothing to broadcast.
        parts = split(model, num_stages, at=at, example=example, example_kwargs=example_kwargs)
    else:
        groups = [group] if data_parallel is None else [data_parallel, group]
        parts = _cut_by_time(model, num_stages, groups, is_first, example, example_kwargs)
    if is_first and parts.left_out:
        types = " and ".join(f"a {name}" for name in parts.left_out)
        # The caches of transformers, such as DynamicCache.
        is_cache = any(name.endswith("Cache") for name in parts.left_out)
        advice = ": give a model of transformers use_cache=False in its config" if is_cache else ""
        logger.warning("the outputs of the model hold %s, which a pipeline leaves out (None)%s", types, advice)
    return parts


def _cut_by_time(
    model: nn.Module,
    num_stages: int,
    groups: Sequence[ProcessGroup],
    is_first: bool,
    example: Sequence[object] | None,
    example_kwargs: Mapping[str, object] | None,
) -> Parts:
    """Cuts a model by the measured time of its layers. `groups`: the replicas, if there are any, then the stages."""
    problem = ""
    try:
        inputs = example_of(example, example_kwargs)
        traces = trace_of(model, None, inputs)  # takes seconds, so all ranks do it at the same time
    except PartitionError as error:
        problem = str(error)
    # Every rank raises the error of any. No rank traces any more while the first one measures.
    for each in groups:
        problem = next((str(told) for told in each.all_gather_object(problem) if told), "")
    if problem:
        raise PartitionError(problem)
    mine: dict[str, JsonLike] = {}
    # Measured times differ from rank to rank, so the first one measures for all.
    if is_first:
        try:
            parts = divide(model, num_stages, None, inputs, traces)
        except PartitionError as error:
            mine = {"error": str(error)}  # broadcast like names, so that every rank raises it
        else:
            mine = {"at": list(parts.at)}
            logger.info("cut by measured time:\n%s", parts)
    # From the measuring rank to rank 0 of each replica, then within each replica. Data-parallel groups of other ranks
    # carry nothing in the first broadcast.
    told: JsonLike = mine
    for each in groups:
        told = each.broadcast_object(told, src=0)
    assert isinstance(told, dict)
    if "error" in told:
        raise PartitionError(str(told["error"]))
    names = told["at"]
    assert isinstance(names, list)
    return parts if is_first else divide(model, num_stages, [str(name) for name in names], inputs, traces)
