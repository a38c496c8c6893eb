"""1F1B: after the warm-up one forward, one backward; and with several chunks per rank, which take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import Action, loop
from echelon.pipeline.plan.schedule import Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the 1F1B schedule (PipeDream-Flush; Narayanan et al., 2021, section 2.1).

    Rank r holds at most num_ranks - r microbatches. 3 ranks, 4 microbatches:

        rank 0  0F0 0F1 0F2                 0B0---- 0F3 0B1----     0B2----     0B3----
        rank 1      1F0 1F1         1B0---- 1F2 1B1---- 1F3 1B2----     1B3----
        rank 2          2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3----
    """
    return replace(interleaved_1f1b(num_ranks, num_microbatches, 1), name="1f1b")


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int | None = None) -> Schedule:
    """Returns the interleaved 1F1B schedule for any number of microbatches (Narayanan et al., 2021, section 2.2).

    Rank r holds the activations of at most 2 (num_ranks - r - 1) + (num_chunks - 1) group_size + 1 chunks.
    2 ranks, 2 chunks, 4 microbatches:

    rank 0  0F0 0F1 2F0 2F1 0F2     2B0---- 0F3 2B1---- 2F2 0B0---- 2F3 0B1----     2B2----     2B3---- 0B2---- 0B3----
    rank 1      1F0 1F1 3F0 3B0---- 3F1 3B1---- 1F2 1B0---- 1F3 1B1---- 3F2 3B2---- 3F3 3B3---- 1B2---- 1B3----

    Args:
        num_ranks: Number of ranks.
        num_microbatches: Number of microbatches of a step.
        num_chunks: Stages per rank.
        group_size: Number of microbatches that a chunk runs before the next chunk's turn, at least num_ranks. None:
            num_ranks, or the least more that makes the groups even, which is the fastest. If given, the last group has
            the remaining microbatches.

    Raises:
        ScheduleError: a group that is too small.
    """
    if group_size is not None and group_size < num_ranks:
        raise ScheduleError(
            f"group_size={group_size}: with fewer microbatches than ranks a chunk waits for its input; "
            f"give at least {num_ranks}"
        )
    groups = _groups(num_ranks, num_microbatches, group_size)
    turns = tuple(_turns(groups, num_chunks))
    return Schedule(
        name="interleaved-1f1b",
        num_microbatches=num_microbatches,
        placement=loop(num_ranks, num_chunks),
        orders=tuple(
            # `groups` may be filled up beyond the last microbatch; see `_groups`.
            tuple(
                action
                for action in _order(rank, num_ranks, num_chunks, groups[0], turns)
                if action.microbatch < num_microbatches
            )
            for rank in range(num_ranks)
        ),
    )


def _groups(num_ranks: int, num_microbatches: int, group_size: int | None) -> list[int]:
    """Returns the size of each group, the largest first."""
    if group_size is None:
        rounds = max(1, num_microbatches // num_ranks)
        size, more = divmod(num_microbatches, rounds)
        return [size + 1] * more + [size] * (rounds - more)
    full, rest = divmod(num_microbatches, group_size)
    # A last group smaller than the number of ranks would deadlock, so it is filled up. The microbatches that do not
    # exist are left out of the orders, and leaving actions out cannot add a wait.
    last = [group_size if rest < num_ranks else rest] if rest else []
    return [group_size] * full + last


def _turns(groups: Sequence[int], num_chunks: int) -> Iterator[tuple[int, int]]:
    """Yields (chunk, microbatch) in the order of the forwards."""
    first = 0
    for size in groups:
        for chunk in range(num_chunks):
            for microbatch in range(first, first + size):
                yield chunk, microbatch
        first += size


def _order(
    rank: int, num_ranks: int, num_chunks: int, group_size: int, turns: Sequence[tuple[int, int]]
) -> Iterator[Action]:
    forwards = [Action(chunk * num_ranks + rank, "F", microbatch) for chunk, microbatch in turns]
    backwards = [Action((num_chunks - 1 - chunk) * num_ranks + rank, "B", microbatch) for chunk, microbatch in turns]
    hops = num_ranks - rank - 1
    # With one chunk, this is the warm-up of 1F1B.
    warm_up = min(hops if num_chunks == 1 else 2 * hops + (num_chunks - 1) * group_size, len(turns))
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(turns) - warm_up :]
