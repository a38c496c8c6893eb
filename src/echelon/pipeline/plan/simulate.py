"""Simulator of schedules on a virtual clock: times of steps, and memory held.

A rank runs its steps in order. A step starts when its rank is free and its input has arrived:

    F of stage s    the output of stage s - 1
    I or B          the gradient from stage s + 1
    W               nothing: its I ran before, on the same rank
    overlapped      both

Transfers take no time of a rank and do not queue behind each other. So the result does not depend on the order in which
ranks are visited.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import add
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import Action, Handover, Overlapped, Step, actions_of
from echelon.pipeline.plan.cost import Costs, StageCosts
from echelon.timeline.timeline import LazySequence, Level, MemoryUnit, Time, Timeline, Transfer

if TYPE_CHECKING:
    from echelon.pipeline.plan.schedule import Schedule


def peaks(schedule: Schedule, costs: StageCosts) -> tuple[Time, ...]:
    """Returns the most memory that each rank holds at once, in units of `Costs.activation`."""
    return tuple(max(levels(order, costs, schedule.forward_only), default=0) for order in schedule.orders)


def levels(order: Sequence[Step], costs: StageCosts, forward_only: bool = False) -> Iterator[Time]:
    """Yields the memory that a rank holds during each step, in units of `Costs.activation`.

    An activation is held from the start of F to the end of I, and its `weight_activation` until the end of W. An
    overlapped step holds the forward's activation while the backward's is still there. A schedule that is forward only
    holds an activation for its own step alone.
    """
    activation, kept, recomputed = costs.activation, costs.weight_activation, costs.recomputed_activation
    held: Time = 0
    for step in order:
        if forward_only:
            yield sum(activation[action.stage] for action in actions_of(step))
        elif type(step) is Action:
            stage, kind, _ = step
            if kind == "F":
                held += activation[stage]
                yield held
            elif kind == "B":
                yield held + recomputed[stage]
                held -= activation[stage]
            elif kind == "I":
                yield held + recomputed[stage]
                held -= activation[stage] - kept[stage]
            else:
                yield held
                held -= kept[stage]
        else:
            forward, backward = actions_of(step)
            held += activation[forward.stage]
            stage = backward.stage
            yield held + recomputed[stage]
            held -= activation[stage] - (kept[stage] if backward.kind == "I" else 0)


Times: TypeAlias = Sequence[Sequence[Time]]
"""One time per step, for each rank."""


class Played(NamedTuple):
    """Start and end of each rank's steps. A rank that waits for ever has fewer times than steps."""

    starts: list[list[Time]]
    ends: list[list[Time]]


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Plays a valid schedule; see `Schedule.simulate`."""
    stage_costs = costs.per_stage(schedule.placement)
    starts, ends = play(schedule.orders, schedule.placement, schedule.num_microbatches, stage_costs)
    return Timeline(
        steps=schedule.orders,
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        transfers=LazySequence(partial(_transfers, schedule, ends, stage_costs.transfer)),
        peak_activations=peaks(schedule, stage_costs),
        name=schedule.name,
        unit=costs.unit,
        memory=LazySequence(partial(_held, schedule, stage_costs, starts, ends)),
        memory_unit=_memory_unit(costs),
    )


def recorded(schedule: Schedule, times: Sequence[Sequence[tuple[Time, Time]]], costs: Costs) -> Timeline:
    """Returns the timeline of measured times of a schedule's steps; see `Schedule.recorded`."""
    given, expected = list(map(len, times)), list(map(len, schedule.orders))
    if given != expected:
        raise ScheduleError(f"times of {given} steps per rank, but the ranks ran {expected}: give one pair per step")
    starts = tuple(tuple(start for start, _ in rank) for rank in times)
    ends = tuple(tuple(end for _, end in rank) for rank in times)
    stage_costs = costs.per_stage(schedule.placement)
    return Timeline(
        steps=schedule.orders,
        starts=starts,
        ends=ends,
        transfers=LazySequence(partial(_recorded_transfers, schedule, ends)),
        peak_activations=peaks(schedule, stage_costs),
        name=schedule.name,
        memory=LazySequence(partial(_held, schedule, stage_costs, starts, ends)),
        memory_unit=_memory_unit(costs),
    )


def measured_costs(timeline: Timeline, activations: Costs) -> Costs:
    """Returns the costs of all stages from the timeline of a measured run; see `Pipeline.costs`.

    Args:
        timeline: of `recorded`.
        activations: the memory of every stage.

    Raises:
        ScheduleError: a stage ran its forward, or its backward, in overlapped steps alone.
    """
    durations: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for span in chain.from_iterable(timeline.spans):
        step = cast("Step", span.step)
        name = step.kind if isinstance(step, Action) else "overlapped"
        durations[actions_of(step)[0].stage, name].append(float(span.duration))
    times = {place: median(found) for place, found in durations.items()}
    stages = sorted({stage for stage, _ in times})
    for stage in stages:
        if (stage, "F") not in times or not {"B", "I"} & {kind for at, kind in times if at == stage}:
            raise ScheduleError(
                f"stage {stage} ran no forward, or no backward, alone in {timeline.name}: run a step with zb-h1 or 1f1b"
            )
    halves = [times[stage, "I"] if (stage, "I") in times else times[stage, "B"] / 2 for stage in stages]
    weights = [times[stage, "W"] if (stage, "W") in times else times[stage, "B"] / 2 for stage in stages]
    memory = activations.per_stage(range(len(stages)))
    # The first stage sends no gradient: its I does nothing, and its W does everything.
    if stages and stages[0] == 0 and (0, "I") not in times:
        halves[0], weights[0] = 0.0, times[0, "B"]
    # A recomputed activation is held until W as well.
    until_weight = map(add, memory.activation, memory.recomputed_activation)
    return replace(
        activations,
        forward=[times[stage, "F"] for stage in stages],
        backward_input=halves,
        backward_weight=weights,
        transfer=_measured_transfer(timeline),
        weight_activation=[
            # 0: measured without W, by `Pipeline.backward`, which is whole.
            kept if kept and (stage, "W") in times else held
            for stage, kept, held in zip(stages, memory.weight_activation, until_weight, strict=True)
        ],
        overlapped=_measured_overlaps(times, stages),
        unit=timeline.unit,
    )


def _measured_overlaps(times: Mapping[tuple[int, str], float], stages: Sequence[int]) -> list[float] | None:
    """Returns the time of each stage's overlapped steps. None if the run had none."""
    if not any(name == "overlapped" for _, name in times):
        return None

    def backward(stage: int) -> float:
        return times[stage, "B"] if (stage, "B") in times else times[stage, "I"] + times.get((stage, "W"), 0)

    alone = {stage: times[stage, "F"] + backward(stage) for stage in stages}
    return [times.get((stage, "overlapped"), alone[stage]) for stage in stages]


def _measured_transfer(timeline: Timeline) -> float:
    """Returns the time of a transfer between the two ranks that took longest: the median of awaited ones.

    A transfer was awaited if its receiver had nothing else to do when it left. 0 if none was.
    """
    awaited: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for sent in timeline.transfers:
        # Not the first step of a rank, which may have called step() late.
        if sent.target and timeline.ends[sent.target_rank][sent.target - 1] <= sent.start:
            begun = timeline.starts[sent.target_rank][sent.target]
            awaited[sent.source_rank, sent.target_rank].append(max(0.0, float(begun - sent.start)))
    return max(map(median, awaited.values()), default=0.0)


def _memory_unit(costs: Costs) -> MemoryUnit:
    """Returns the unit of memory: that of the costs. If they know none, activations where every stage has one."""
    if costs.memory_unit:
        return costs.memory_unit
    plain = costs.weight_activation is None and not costs.recomputed_activation
    return "activations" if plain and costs.activation == 1 else ""


def _held(schedule: Schedule, costs: StageCosts, starts: Times, ends: Times) -> Iterator[list[Level]]:
    """Yields the memory that each rank holds over time."""
    for order, started, ended in zip(schedule.orders, starts, ends, strict=True):
        during = list(levels(order, costs, schedule.forward_only))
        # After a step a rank holds what the next one finds: without the memory that the next one adds.
        after = [held - _added(step, costs) for held, step in zip(during[1:], order[1:], strict=True)]
        if schedule.forward_only:
            after = [0] * len(after)
        found = []
        for step in range(len(order)):
            found.append(Level(started[step], during[step]))
            found.append(Level(ended[step], after[step] if step < len(after) else 0))
        yield found


def _added(step: Step, costs: StageCosts) -> Time:
    """Returns the memory that a step adds when it starts."""
    added: Time = 0
    for stage, kind, _ in actions_of(step):
        if kind != "W":
            added += (costs.activation if kind == "F" else costs.recomputed_activation)[stage]
    return added


def play(
    orders: Sequence[Sequence[Step]],
    placement: Sequence[int],
    num_microbatches: int,
    costs: StageCosts,
    arrived: Collection[Handover] = (),
) -> Played:
    """Runs every rank up to its end, or up to the step for which it waits for ever.

    Args:
        orders: Steps of each rank. Their stages and microbatches exist, and each F, I and B occurs at most once.
        placement: The rank of each stage.
        num_microbatches: Number of microbatches.
        costs: Costs of each stage.
        arrived: Inputs that no step has to wait for.
    """
    arrivals = _arrivals(len(placement), num_microbatches, arrived)
    moves = _moves(placement, num_microbatches, costs, arrivals, nobody=len(orders))
    # The input that each rank waits for: the index of an activation, or the complement of the index of a gradient. One
    # int is enough to compare, and a complement is never a valid index. The last entry belongs to no rank.
    waiting: list[int | None] = [None] * (len(orders) + 1)
    starts: list[list[Time]] = [[] for _ in orders]
    ends: list[list[Time]] = [[] for _ in orders]
    ready = list(range(len(orders)))

    # Hot loop: a million steps pass through it, so it is one function on local names. A rank runs until the input of a
    # step is not known yet. The rank that produces this input makes it ready again.
    while ready:
        rank = ready.pop()
        order, rank_starts, rank_ends = orders[rank], starts[rank], ends[rank]
        now: Time = rank_ends[-1] if rank_ends else 0
        for position in range(len(rank_ends), len(order)):
            step = order[position]
            # `type` is faster than isinstance here, and both classes are final.
            if type(step) is Action:
                stage, kind, microbatch = step
                known, durations, complement, shift, delays, neighbours = moves[kind]
                key = stage * num_microbatches + microbatch
                ready_at = known[key]
                if ready_at is None:
                    waiting[rank] = key ^ complement
                    break
                if ready_at > now:
                    now = ready_at
                rank_starts.append(now)
                now += durations[stage]
                rank_ends.append(now)
                if kind == "W":
                    continue  # no other rank needs its result
                key += shift
                known[key] = now + delays[stage]
                neighbour = neighbours[stage]
                if waiting[neighbour] == key ^ complement:
                    waiting[neighbour] = None
                    ready.append(neighbour)
            else:
                pair = _pair(step, now, num_microbatches, moves, costs)
                if pair.awaited is not None:
                    waiting[rank] = pair.awaited
                    break
                rank_starts.append(pair.start)
                now = pair.end
                rank_ends.append(now)
                for neighbour, made in pair.made:
                    if waiting[neighbour] == made:
                        waiting[neighbour] = None
                        ready.append(neighbour)
    return Played(starts, ends)


class _Arrivals(NamedTuple):
    """Arrival of every input and output gradient. None if it is not known yet.

    The entry of stage s and microbatch m is at s * num_microbatches + m, so that of a neighbouring stage is
    num_microbatches away. One more block at the end takes the results of the last stage's F, and of the first stage's B
    through negative indices: no stage reads them.
    """

    inputs: list[Time | None]
    gradients: list[Time | None]


class _Move(NamedTuple):
    """Inputs, durations and results of the actions of one kind."""

    known: list[Time | None]
    """Arrivals of its inputs, and of its results."""
    durations: Sequence[Time]
    """Time of the action, per stage."""
    complement: int
    """-1 if `waiting` holds the complement of the index, else 0. In both cases it holds key ^ complement."""
    shift: int
    """Distance from the index of the input to the index of the result."""
    delays: Sequence[Time]
    """Time until the result has arrived, per stage."""
    neighbours: Sequence[int]
    """Rank that waits for the result, per stage. The number of ranks if there is none."""


def _moves(
    placement: Sequence[int], num_microbatches: int, costs: StageCosts, arrivals: _Arrivals, nobody: int
) -> dict[str, _Move]:
    inputs, gradients = arrivals
    after, before = (*placement[1:], nobody), (nobody, *placement[:-1])
    to_after, to_before = (*costs.transfer, 0), (0, *costs.transfer)
    at_once = cast("list[Time | None]", [0]) * (len(placement) * num_microbatches)
    return {
        "F": _Move(inputs, costs.forward, 0, num_microbatches, to_after, after),
        "I": _Move(gradients, costs.backward_input, -1, -num_microbatches, to_before, before),
        "B": _Move(gradients, costs.backward, -1, -num_microbatches, to_before, before),
        # Its result goes to nobody. Asked for of a pair with a W, which is a mistake.
        "W": _Move(at_once, costs.backward_weight, 0, 0, (0,) * len(placement), (nobody,) * len(placement)),
    }


def _arrivals(num_stages: int, num_microbatches: int, arrived: Collection[Handover]) -> _Arrivals:
    """Returns the arrivals at the start: known are the first stage's inputs, the last stage's gradients, `arrived`."""
    size = num_stages * num_microbatches
    known, unknown = cast("list[Time | None]", [0]), cast("list[Time | None]", [None])
    inputs = known * num_microbatches + unknown * size
    gradients = unknown * (size - num_microbatches) + known * (2 * num_microbatches)
    for stage, microbatch, backward in arrived:
        (gradients if backward else inputs)[stage * num_microbatches + microbatch] = 0
    return _Arrivals(inputs, gradients)


class _Pair(NamedTuple):
    """Outcome of an overlapped step: its times, or the input that it waits for."""

    awaited: int | None
    start: Time = 0
    end: Time = 0
    made: Sequence[tuple[int, int]] = ()
    """For each result, the rank that may wait for it and the value in `waiting` if it does."""


def _pair(step: Overlapped, free: Time, num_microbatches: int, moves: dict[str, _Move], costs: StageCosts) -> _Pair:
    """Runs an overlapped step at `free` or later. Returns the input that it waits for if one is not known."""
    sides = [(moves[kind], stage, stage * num_microbatches + microbatch) for stage, kind, microbatch in step]
    for move, _, key in sides:
        if move.known[key] is None:
            return _Pair(key ^ move.complement)
    start = max(free, *(cast(Time, move.known[key]) for move, _, key in sides))
    end = start + _overlapped_time(step.forward, step.backward, costs)
    made = []
    for move, stage, key in sides:
        move.known[key + move.shift] = end + move.delays[stage]
        made.append((move.neighbours[stage], (key + move.shift) ^ move.complement))
    return _Pair(None, start, end, made)


def _overlapped_time(forward: Action, backward: Action, costs: StageCosts) -> Time:
    # `Costs.overlapped` is the time with a fused backward. With an I the two simply run one after the other.
    if backward.kind != "B":
        return costs.forward[forward.stage] + costs.backward_input[backward.stage]
    if costs.overlapped is None:
        return costs.forward[forward.stage] + costs.backward[backward.stage]
    return costs.overlapped[forward.stage]


class _Link(NamedTuple):
    """Pair of spans on two ranks, the second of which needs the result of the first, and the boundary between them."""

    source_rank: int
    source: int
    target_rank: int
    target: int
    boundary: int


def _links(schedule: Schedule) -> Iterator[_Link]:
    placement, last = schedule.placement, schedule.num_stages - 1
    # W is left out: no other rank needs its result.
    at: dict[tuple[bool, int, int], int] = {}
    for order in schedule.orders:
        for position, step in enumerate(order):
            for stage, kind, microbatch in actions_of(step):
                if kind != "W":
                    at[kind == "F", stage, microbatch] = position
    for (is_forward, stage, microbatch), position in at.items():
        neighbour = stage + 1 if is_forward else stage - 1
        if 0 <= neighbour <= last and placement[neighbour] != placement[stage]:
            target = at[is_forward, neighbour, microbatch]
            yield _Link(placement[stage], position, placement[neighbour], target, min(stage, neighbour))


def _transfers(schedule: Schedule, ends: Times, durations: Sequence[Time]) -> Iterator[Transfer]:
    for source_rank, source, target_rank, target, boundary in _links(schedule):
        sent = ends[source_rank][source]
        yield Transfer(source_rank, source, target_rank, target, sent, sent + durations[boundary])


def _recorded_transfers(schedule: Schedule, ends: Times) -> Iterator[Transfer]:
    for source_rank, source, target_rank, target, _ in _links(schedule):
        # A run measures steps, not arrivals.
        yield Transfer(source_rank, source, target_rank, target, start=ends[source_rank][source], end=None)
