"""What all ranks of a pipeline must have in common before anything is cut: the schedule above all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import nn

from echelon.errors import CollectiveMismatch, ScheduleError, UnsupportedOp
from echelon.group import ProcessGroup
from echelon.pipeline import schedules
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.split import StageMaker


def choose_schedule(
    schedule: str | Schedule,
    num_ranks: int,
    num_microbatches: int | None,
    num_chunks: int | None,
    model: nn.Sequential | Sequence[StageMaker],
) -> Schedule:
    """Returns the schedule asked for.

    Raises:
        ScheduleError: it is not for these numbers.
    """
    if isinstance(schedule, Schedule):
        if schedule.num_ranks != num_ranks:
            raise ScheduleError(
                f"the schedule is for {schedule.num_ranks} ranks, the group has {num_ranks}: make both equal"
            )
        if num_microbatches not in (None, schedule.num_microbatches):
            raise ScheduleError(
                f"num_microbatches={num_microbatches}, but the schedule has {schedule.num_microbatches}: leave it out"
            )
        return schedule
    if num_microbatches is None:
        raise ScheduleError(
            f"num_microbatches is missing: say into how many parts a batch is cut, such as {2 * num_ranks}"
        )
    if num_chunks is None and not isinstance(model, nn.Module):
        num_chunks = max(1, len(model) // num_ranks)
    return schedules.build(schedule, num_ranks, num_microbatches, num_chunks)


def check_runnable(schedule: Schedule) -> None:
    """Refuses schedules that cannot train.

    Raises:
        UnsupportedOp: it has no backward.
    """
    if schedule.forward_only:
        raise UnsupportedOp(
            f"{schedule.name} has no backward: pass a training schedule, and call forward() for inference"
        )


def agreed_group(group: ProcessGroup, schedule: Schedule, others: Sequence[str]) -> ProcessGroup:
    """Returns a group of the same ranks with messages of its own, once all ranks have shown the same arguments.

    Raises:
        CollectiveMismatch: they have not.
    """
    mine = [repr(schedule), hashlib.sha256(str(schedule).encode()).hexdigest()[:16], *others]
    for rank, theirs in enumerate(group.all_gather_object(list(mine))):
        if theirs != mine:
            raise CollectiveMismatch(
                f"rank {rank} made a Pipeline with {theirs}, rank {group.rank} with {mine}: pass the same arguments"
            )
    own = group.subgroup(range(group.world_size), f"{group.name}/pipeline")
    assert own is not None
    return own
