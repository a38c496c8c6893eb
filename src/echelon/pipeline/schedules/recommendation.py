"""Compares schedules for the same model: what each takes in time and memory, the fastest that fits first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from numbers import Real

from echelon.arguments import named
from echelon.errors import InvalidArgument, ScheduleError
from echelon.pipeline.plan.action import loop
from echelon.pipeline.plan.cost import Amount, Costs, check_costs
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules.registry import build, names
from echelon.pipeline.search.engine import search as search_schedule
from echelon.pipeline.search.problem import rank_limits
from echelon.timeline.timeline import Time, Timeline

_CHUNKS = 2
"""Stages per rank, for schedules that have a choice."""
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Option:
    """A schedule, and what it would cost.

    Args:
        schedule: What to run.
        costs: Of its stages. A schedule with v chunks has v times as many as ranks, each with 1/v of the work.
        timeline: How it would run.
        peak_microbatches: For each rank, how many microbatches' activations it holds at most.
        peak_memory: For each rank, its activations and what it holds throughout, in the unit of `Costs.activation`.
        problem: Which limit is exceeded, by which rank and how much; None if it fits.
    """

    schedule: Schedule
    costs: Costs
    timeline: Timeline
    peak_microbatches: tuple[float, ...]
    peak_memory: tuple[Time, ...]
    problem: str | None = None

    @property
    def fits(self) -> bool:
        """No limit is exceeded."""
        return self.problem is None

    def __str__(self) -> str:
        """One line of a table."""
        memory = max(self.peak_microbatches)
        return (
            f"{self.schedule.name}: span {float(self.timeline.span):.4g}, "
            f"bubble rate {float(self.timeline.bubble_rate):.1%}, "
            f"up to {memory:.4g} microbatches{'' if self.fits else f' (does not fit: {self.problem})'}"
        )


def recommend(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: Time | None = None,
    *,
    parameters: Amount = 0,
    capacity: Time | None = None,
    search: bool = False,
) -> tuple[Option, ...]:
    """Compares all schedules for training that there are for these sizes.

    Those that fit come first, among them those with the shortest span: it is what a step takes when steps follow each
    other. Schedules that do not exist for the sizes are left out.

    Args:
        costs: Of the stages of a model that is cut into one per rank. Schedules with several chunks cut each stage into
            as many equal parts.
        num_ranks: How many ranks take part.
        num_microbatches: How many microbatches a step has.
        memory_limit: The most that a rank may hold, in microbatches: one counts what all of its stages hold for one.
        parameters: What a rank holds throughout (parameters, gradients, the optimizer's state), in the unit of
            `costs.activation`, such as bytes. One number, or one per rank.
        capacity: The most that a rank may hold of activations and parameters together, in the same unit.
        search: Look for a schedule made to measure as well. This may take long.

    Raises:
        InvalidArgument: `costs` is no Costs, or a limit no number.
        ScheduleError: sizes that no schedule has, or costs that are not for one stage per rank.
    """
    check_costs(costs).per_stage(build("1f1b", num_ranks, num_microbatches).placement)
    for name, limit in (("memory_limit", memory_limit), ("capacity", capacity)):
        if limit is not None and not isinstance(limit, Real):
            raise InvalidArgument(f"{name} is {named(limit)}: give a number, or None for no limit")
    throughout = _per_rank(parameters, num_ranks)
    known = list(_named(num_ranks, num_microbatches))
    if search:
        known += [found for found in _searched(costs, num_ranks, num_microbatches, memory_limit) if found not in known]
    return tuple(sorted((_option(each, costs, memory_limit, throughout, capacity) for each in known), key=_rank))


def search_chunks(
    costs: Costs, num_ranks: int, num_microbatches: int, memory_limit: Time | None = None
) -> tuple[Option, ...]:
    """Searches for a schedule with one chunk per rank and for one with two, of the same model; the better one first.

    Two chunks are left out where `costs.transfer` is given per boundary: it fits only one placement of two chunks.

    Args:
        costs: Of the stages of a model that is cut into one per rank, as for `recommend`.
        num_ranks: How many ranks take part.
        num_microbatches: How many microbatches a step has.
        memory_limit: The most that a rank may hold, in microbatches.

    Raises:
        ScheduleError: sizes or a limit that cannot be, or costs that are not for one stage per rank.
    """
    found = _searched(costs, num_ranks, num_microbatches, memory_limit)
    options = (_option(schedule, costs, memory_limit, (0,) * num_ranks, None) for schedule in found)
    return tuple(sorted(options, key=_rank))


def _rank(option: Option) -> tuple[bool, Time, Time]:
    """Returns the key by which options are sorted, the best first."""
    return not option.fits, option.timeline.span, max(option.peak_memory)


def table(options: Sequence[Option]) -> str:
    """Writes options as a table, with what is wrong with those that do not fit and all ranks' peaks below each other.

    Peaks are in microbatches, rank by rank; of more than 8 ranks, the first and the last four.
    """
    rows = [("schedule", "chunks", "span", "bubble rate", "memory", "peaks in microbatches, by rank", "")]
    for option in options:
        peaks = [f"{peak:.3g}" for peak in option.peak_microbatches]
        rows.append(
            (
                option.schedule.name,
                str(option.schedule.num_chunks),
                f"{float(option.timeline.span):.4g}",
                f"{float(option.timeline.bubble_rate):.1%}",
                f"{float(max(option.peak_memory)):.4g}",
                " ".join(peaks if len(peaks) <= 8 else [*peaks[:4], "..", *peaks[-4:]]),
                f"does not fit: {option.problem}" if option.problem else "fits",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def cut(costs: Costs, placement: Sequence[int]) -> Costs:
    """Makes the costs of a schedule's stages from those of one stage per rank.

    Each stage is cut into equal parts, as many as a rank has chunks. Between two ranks that are neighbours a transfer
    takes what it took before, between others as long as the longest.
    """
    num_ranks = max(placement) + 1
    chunks = len(placement) // num_ranks
    if chunks == 1:
        return costs

    def parts(amount: Amount) -> Amount:
        if isinstance(amount, Sequence):
            return tuple(_divided(amount[stage // chunks], chunks) for stage in range(len(placement)))
        return _divided(amount, chunks)

    return Costs(
        forward=parts(costs.forward),
        backward_input=parts(costs.backward_input),
        backward_weight=parts(costs.backward_weight),
        transfer=_transfers(costs.transfer, placement),
        activation=parts(costs.activation),
        weight_activation=None if costs.weight_activation is None else parts(costs.weight_activation),
        overlapped=None if costs.overlapped is None else parts(costs.overlapped),
        recompute=parts(costs.recompute),
        recomputed_activation=parts(costs.recomputed_activation),
    )


def held_microbatches(schedule: Schedule, costs: Costs, timeline: Timeline) -> tuple[float, ...]:
    """Returns for each rank its peak in microbatches: one is what all of its stages hold for one."""
    units = rank_limits(costs, schedule.placement, schedule.num_microbatches, 1)
    return tuple(
        float(peak / unit) if unit else 0.0 for peak, unit in zip(timeline.peak_activations, units, strict=True)
    )


def _named(num_ranks: int, num_microbatches: int) -> Iterator[Schedule]:
    for name in names():
        for chunks in (_CHUNKS, None):
            try:
                schedule = build(name, num_ranks, num_microbatches, chunks)
            except ScheduleError:
                continue
            if not schedule.forward_only:
                yield schedule
            break


def _searched(costs: Costs, num_ranks: int, num_microbatches: int, memory_limit: Time | None) -> Iterator[Schedule]:
    yield search_schedule(costs, num_ranks, num_microbatches, memory_limit, num_chunks=1)
    # The search tries two placements of two chunks. A transfer of its own for each boundary fits only one of them.
    if not isinstance(costs.transfer, Sequence):
        halves = cut(costs, loop(num_ranks, _CHUNKS))
        yield search_schedule(halves, num_ranks, num_microbatches, memory_limit, num_chunks=_CHUNKS)


def _option(
    schedule: Schedule, costs: Costs, memory_limit: Time | None, throughout: Sequence[Time], capacity: Time | None
) -> Option:
    costs = cut(costs, schedule.placement)
    timeline = schedule.simulate(costs)
    held = held_microbatches(schedule, costs, timeline)
    memory = tuple(peak + more for peak, more in zip(timeline.peak_activations, throughout, strict=True))
    problems = (_excess(held, memory_limit, "microbatches"), _excess(memory, capacity, "of memory"))
    return Option(schedule, costs, timeline, held, memory, next(filter(None, problems), None))


def _excess(peaks: Sequence[Time], limit: Time | None, unit: str) -> str | None:
    """Says which rank is the furthest over a limit."""
    most = max(peaks)
    if limit is None or most <= limit * _ROUNDING:
        return None
    return f"rank {peaks.index(most)} holds {float(most):.4g} {unit}, over the limit of {float(limit):.4g}"


def _divided(amount: Time, parts: int) -> Time:
    return Fraction(amount, parts) if isinstance(amount, int) else amount / parts


def _transfers(transfer: Amount, placement: Sequence[int]) -> Amount:
    if not isinstance(transfer, Sequence):
        return transfer
    pairs = pairwise(placement)
    return tuple(transfer[min(pair)] if abs(pair[0] - pair[1]) == 1 else max(transfer, default=0) for pair in pairs)


def _per_rank(amount: Amount, num_ranks: int) -> tuple[Time, ...]:
    values = tuple(amount) if isinstance(amount, Sequence) else (amount,) * num_ranks
    if len(values) != num_ranks:
        raise ScheduleError(
            f"parameters has {len(values)} values for {num_ranks} ranks: give one number, or one per rank"
        )
    return values
