"""Comparison of schedules for one model by time and memory, the fastest that fits first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from html import escape
from itertools import chain, pairwise, repeat
from typing import final

from echelon.arguments import is_amount, is_number, named, shown
from echelon.errors import InvalidArgument, ScheduleError
from echelon.pipeline.plan.action import actions_of, loop
from echelon.pipeline.plan.cost import Amount, Costs, check_costs
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules.registry import build, names
from echelon.pipeline.search.engine import search as search_schedule
from echelon.pipeline.search.problem import rank_limits
from echelon.timeline.timeline import Time, Timeline
from echelon.timeline.words import memory_text, time_text

# Stages per rank, for schedules that have a choice. The search knows placements of 1 and of 2.
_CHUNKS = 2
# Sums of floats may be a hair above the exact sum; `Schedule.check` grants the same.
_ROUNDING = 1 + 1e-9
# No plan has a million microbatches on a rank, and no rank a million MiB.
_LEAST_BYTES = 1 << 20
# As measured, an I of stage 0 that does nothing takes microseconds. A tenth of its share is no product of matrices.
_NO_INPUT_GRADIENT = 0.1


@dataclass(frozen=True, repr=False)
class Option:
    """Schedule with its predicted time and memory. Its `str` is one line.

    Memory is shown as bytes if the costs say so, or from 1 MiB on.

    Args:
        schedule: The schedule.
        costs: Costs of its stages. With v chunks there are v stages per rank, each with 1/v of the work.
        timeline: Its simulated timeline.
        peak_microbatches: For each rank, its peak of activations in microbatches.
        peak_memory: For each rank, the peak of activations and parameters, in the unit of `Costs.activation`.
        problem: The exceeded limit, with the rank and the amount. None if the schedule fits.
    """

    schedule: Schedule
    costs: Costs
    timeline: Timeline
    peak_microbatches: tuple[float, ...]
    peak_memory: tuple[Time, ...]
    problem: str | None = None

    @property
    def fits(self) -> bool:
        """True if no limit is exceeded."""
        return self.problem is None

    def __str__(self) -> str:
        span, rate = time_text(self.timeline.span, self.costs.unit), float(self.timeline.bubble_rate)
        memory = _memory(max(self.peak_memory), self.costs)
        return (
            f"{self.schedule.name}: span {span}, bubble rate {rate:.1%}, memory {memory}, up to "
            f"{max(self.peak_microbatches):.4g} microbatches{'' if self.fits else f' (does not fit: {self.problem})'}"
        )

    def __repr__(self) -> str:
        return f"<Option {self}>"


@final
class Options(tuple[Option, ...]):
    """Compared schedules, the fastest that fits first. `str` of them is a table, and a notebook shows one."""

    def __str__(self) -> str:
        return table(self)

    def __repr__(self) -> str:
        return f"<{len(self)} schedules:\n{self}>"

    def _repr_html_(self) -> str:
        tags = chain(["th"], repeat("td"))
        head, *rows = (f"<tr>{''.join(_cells(row, tag))}</tr>" for row, tag in zip(_rows(self), tags, strict=False))
        return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def recommend(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: Time | None = None,
    *,
    parameters: Amount = 0,
    capacity: Time | None = None,
    search: bool = False,
    own: Sequence[Schedule] = (),
    fused: Costs | None = None,
) -> Options:
    """Compares all training schedules that exist for these sizes. Returns them as options, the best first.

    Schedules that fit come first, then the shortest span first. The span is the time of a step when steps follow each
    other. Times and memory are exact if the costs are: print them as `float(option.timeline.span)`.

    Args:
        costs: Costs of a model that is cut into one stage per rank, or into several. A schedule with another number of
            chunks joins neighbouring stages and cuts them into equal parts. If stage 0 has no input gradient, its first
            part has none.
        num_ranks: Number of ranks.
        num_microbatches: Number of microbatches of a step.
        memory_limit: Most activations of a rank, in microbatches. One microbatch is the sum over all stages of the
            rank.
        parameters: Memory that a rank holds throughout (parameters, gradients, the optimizer's state), in the unit of
            `costs.activation`, such as bytes. One number, or one per rank.
        capacity: Most memory of a rank for activations and parameters together, in the same unit.
        search: Search for a schedule tailored to these costs as well. This may take long.
        own: Further schedules of these sizes to compare.
        fused: Costs for schedules whose backwards are all fused (B), as `1f1b` measures them. B may take less time than
            I and W. None: `costs`.

    Raises:
        InvalidArgument: `costs` or `fused` is no Costs, or a limit no number.
        ScheduleError: sizes that no schedule has, costs that are not for an equal number of stages per rank, or costs
            in different units.
    """
    costs = check_costs(costs)
    if not isinstance(fused, Costs | None):
        raise InvalidArgument(f"fused is {named(fused)}: give Costs(...) as 1f1b has measured them, or None for costs")
    fused = costs if fused is None else fused
    if (fused.unit, fused.memory_unit) != (costs.unit, costs.memory_unit):
        raise ScheduleError("costs and fused have different units: measure both, or give both in the same units")
    # Costs for another number of stages fail here, before the search, which may take long.
    placement = build("1f1b", num_ranks, num_microbatches).placement
    for given in (costs, fused):
        cut(given, placement).per_stage(placement)
    for name, limit in (("memory_limit", memory_limit), ("capacity", capacity)):
        if limit is not None and not (is_number(limit) and float(limit) >= 0):  # also refuses nan
            raise InvalidArgument(f"{name} is {named(limit)}: give a number of at least 0, or None for no limit")
    throughout = _per_rank(parameters, num_ranks)
    for each in own:
        if (each.num_ranks, each.num_microbatches) != (num_ranks, num_microbatches):
            sizes = f"{each.num_ranks} ranks and {each.num_microbatches} microbatches"
            raise ScheduleError(f"{each.name} has {sizes}: compare it with schedules of the same sizes")
        if {*map(each.placement.count, range(num_ranks))} != {each.num_chunks}:
            raise ScheduleError(f"{each.name} has more stages on one rank than on another: simulate it by itself")
    known = [*own, *_named(num_ranks, num_microbatches)]
    if search:
        known += [found for found in _searched(costs, num_ranks, num_microbatches, memory_limit) if found not in known]
    measured = (fused if _is_fused(each) else costs for each in known)
    options = (
        _option(each, its, memory_limit, throughout, capacity) for each, its in zip(known, measured, strict=True)
    )
    return Options(sorted(options, key=_rank))


def _is_fused(schedule: Schedule) -> bool:
    return all(action.kind in "FB" for step in chain.from_iterable(schedule.orders) for action in actions_of(step))


def search_chunks(costs: Costs, num_ranks: int, num_microbatches: int, memory_limit: Time | None = None) -> Options:
    """Searches for schedules with one and with two chunks per rank, and returns them with the better one first.

    Two chunks are left out if `costs.transfer` is given per boundary: it fits only one placement of two chunks.

    Args:
        costs: Costs of a model that is cut into one stage per rank, or into several, as for `recommend`.
        num_ranks: Number of ranks.
        num_microbatches: Number of microbatches of a step.
        memory_limit: Most activations of a rank, in microbatches.

    Raises:
        ScheduleError: impossible sizes or limit, or costs that are not for an equal number of stages per rank.
    """
    found = _searched(costs, num_ranks, num_microbatches, memory_limit)
    options = (_option(schedule, costs, memory_limit, (0,) * num_ranks, None) for schedule in found)
    return Options(sorted(options, key=_rank))


def _rank(option: Option) -> tuple[bool, Time, Time]:
    return not option.fits, option.timeline.span, max(option.peak_memory)


def table(options: Sequence[Option]) -> str:
    """Returns options as a table of text, with each rank's peak, and the exceeded limit of options that do not fit.

    Peaks are in microbatches, rank by rank. Of more than 8 ranks, the first and the last four are shown.
    """
    rows = _rows(options)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _cells(row: Sequence[str], tag: str) -> Iterator[str]:
    return (f"<{tag}>{escape(cell)}</{tag}>" for cell in row)


def _rows(options: Sequence[Option]) -> list[tuple[str, ...]]:
    """Returns the titles of a table, and a row for each option."""
    titles = ("schedule", "chunks", "span", "bubble rate", "memory", "peaks in microbatches, by rank", "")
    rows: list[tuple[str, ...]] = [titles]
    for option in options:
        peaks = [f"{peak:.3g}" for peak in option.peak_microbatches]
        rows.append(
            (
                option.schedule.name,
                str(option.schedule.num_chunks),
                time_text(option.timeline.span, option.costs.unit),
                f"{float(option.timeline.bubble_rate):.1%}",
                _memory(max(option.peak_memory), option.costs),
                " ".join(peaks if len(peaks) <= 8 else [*peaks[:4], "..", *peaks[-4:]]),
                f"does not fit: {option.problem}" if option.problem else "fits",
            )
        )
    return rows


def cut(costs: Costs, placement: Sequence[int]) -> Costs:
    """Returns the costs of a placement's stages, from costs of any equal number of stages per rank.

    With another number per rank, the stages of each of them are joined, and cut into equal parts. A transfer between
    neighbouring ranks keeps its time. Any other transfer takes as long as the longest.
    """
    num_ranks = max(placement) + 1
    given, chunks = costs.num_stages or num_ranks, len(placement) // num_ranks
    if given == len(placement) or not given or given % num_ranks:
        return costs
    number = given // num_ranks
    transfer = costs.transfer
    kept = transfer[number - 1 :: number] if isinstance(transfer, Sequence) else transfer
    joined = _mapped(costs, partial(_join, number=number), kept)
    parts = _mapped(joined, partial(_parts, number=chunks), _transfers(kept, placement))
    share = _missing_share(costs)
    return parts if share is None else _without_first_input_gradient(parts, chunks, share)


def _missing_share(costs: Costs) -> Time | None:
    """Returns the share of the input gradient in the backward of stage 1, if stage 0 has none. None if it has one.

    As measured, stage 0 does all of its backward in W: the inputs of the model need no gradient.
    """
    inputs = _each(costs.backward_input, 1)
    if len(inputs) == 1:
        return None
    first, second = _each(costs.backward_weight, 2)[:2]
    share = _share(inputs[1], inputs[1] + second)
    return share if inputs[0] < _NO_INPUT_GRADIENT * share * (inputs[0] + first) else None


def _without_first_input_gradient(costs: Costs, chunks: int, share: Time) -> Costs:
    """Returns costs in which stage 0 does all of its backward in W, and the later parts of its rank do not."""
    inputs = _each(costs.backward_input, 0)
    weights = _each(costs.backward_weight, len(inputs))
    backward = inputs[0] + weights[0]
    needed = backward * share
    return replace(
        costs,
        backward_input=(0, *[needed] * (chunks - 1), *inputs[chunks:]),
        backward_weight=(backward, *[backward - needed] * (chunks - 1), *weights[chunks:]),
    )


def _each(amount: Amount, number: int) -> tuple[Time, ...]:
    return tuple(amount) if isinstance(amount, Sequence) else (amount,) * number


def _mapped(costs: Costs, each: Callable[[Amount], Amount], transfer: Amount) -> Costs:
    return replace(
        costs,
        forward=each(costs.forward),
        backward_input=each(costs.backward_input),
        backward_weight=each(costs.backward_weight),
        transfer=transfer,
        activation=each(costs.activation),
        weight_activation=None if costs.weight_activation is None else each(costs.weight_activation),
        overlapped=None if costs.overlapped is None else each(costs.overlapped),
        recompute=each(costs.recompute),
        recomputed_activation=each(costs.recomputed_activation),
    )


def _join(amount: Amount, number: int) -> Amount:
    if isinstance(amount, Sequence):
        return tuple(sum(amount[first : first + number]) for first in range(0, len(amount), number))
    return amount * number


def _parts(amount: Amount, number: int) -> Amount:
    if isinstance(amount, Sequence):
        return tuple(_divided(value, number) for value in amount for _ in range(number))
    return _divided(amount, number)


def held_microbatches(schedule: Schedule, costs: Costs, timeline: Timeline) -> tuple[float, ...]:
    """Returns each rank's peak in microbatches. One microbatch counts its activations on all stages of the rank."""
    units = rank_limits(costs, schedule.placement, schedule.num_microbatches, 1)
    return tuple(
        float(peak / unit) if unit else 0.0 for peak, unit in zip(timeline.peak_activations, units, strict=True)
    )


def _named(num_ranks: int, num_microbatches: int) -> Iterator[Schedule]:
    for name in names():
        # First with 2 chunks, then with the schedule's own number. The first that exists is taken.
        for chunks in (_CHUNKS, None):
            try:
                schedule = build(name, num_ranks, num_microbatches, chunks)
            except ScheduleError:
                continue
            if not schedule.forward_only:
                yield schedule
            break


def _searched(costs: Costs, num_ranks: int, num_microbatches: int, memory_limit: Time | None) -> Iterator[Schedule]:
    whole = cut(costs, loop(num_ranks, 1))
    yield search_schedule(whole, num_ranks, num_microbatches, memory_limit, num_chunks=1)
    # The search tries two placements of two chunks, and a transfer time per boundary fits only one of them.
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
    problems = (_excess(held, memory_limit, "microbatches"), _excess(memory, capacity, "of memory", costs))
    return Option(schedule, costs, timeline, held, memory, next(filter(None, problems), None))


def _excess(peaks: Sequence[Time], limit: Time | None, unit: str, costs: Costs | None = None) -> str | None:
    """Returns a text that names the rank with the highest peak. None if it is within the limit."""
    most = max(peaks)
    if limit is None or most <= limit * _ROUNDING:
        return None
    return f"rank {peaks.index(most)} holds {_memory(most, costs)} {unit}, over the limit of {_memory(limit, costs)}"


def _memory(amount: Time, costs: Costs | None) -> str:
    """Returns an amount of memory, such as "12,400". Amounts from 1 MiB on are taken for bytes, such as "8.5 GiB".

    None: it is a number of microbatches.
    """
    if costs is not None and (costs.memory_unit == "B" or amount >= _LEAST_BYTES):
        return memory_text(amount, "B")
    return f"{float(amount):,.0f}" if amount >= 1000 else f"{float(amount):.4g}"


def _divided(amount: Time, parts: int) -> Time:
    # int by int would become a float, and exact costs stay exact.
    return Fraction(amount, parts) if isinstance(amount, int) else amount / parts


def _share(part: Time, whole: Time) -> Time:
    if not whole:
        return 0
    return Fraction(part, whole) if isinstance(part, int) and isinstance(whole, int) else part / whole


def _transfers(transfer: Amount, placement: Sequence[int]) -> Amount:
    if not isinstance(transfer, Sequence):
        return transfer
    pairs = pairwise(placement)
    return tuple(transfer[min(pair)] if abs(pair[0] - pair[1]) == 1 else max(transfer, default=0) for pair in pairs)


def _per_rank(amount: Amount, num_ranks: int) -> tuple[Time, ...]:
    values = _each(amount, num_ranks)
    if not all(map(is_amount, values)):
        raise ScheduleError(f"parameters={shown(amount)}: give an amount of memory of at least 0, or one per rank")
    if len(values) != num_ranks:
        raise ScheduleError(
            f"parameters has {len(values)} values for {num_ranks} ranks: give one number, or one per rank"
        )
    return values
