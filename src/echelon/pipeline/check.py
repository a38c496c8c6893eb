"""Finds the mistakes in a schedule.

Two passes. This one looks at each rank alone, for actions that are missing, doubled, on the wrong rank, or before what
they need of the same stage. The other one (`deadlock`) looks for ranks that wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from echelon.errors import ScheduleError
from echelon.pipeline.action import Action, Kind, Overlapped, Step, actions_of
from echelon.pipeline.cost import Amount, Costs
from echelon.pipeline.deadlock import find_circles
from echelon.pipeline.grid import Place, Problem, grid, where
from echelon.pipeline.memory import levels
from echelon.pipeline.simulate import Need

if TYPE_CHECKING:
    from echelon.pipeline.schedule import Schedule

_MOST_PRINTED = 20

# What an action does, and what must have been done before, as sums of: 1 forward, 2 for the input, 4 for the weights.
_DOES = {"F": 1, "I": 2, "W": 4, "B": 6}
_NEEDS = {"F": 0, "I": 1, "W": 3, "B": 1}
_KINDS: tuple[Kind, ...] = ("F", "I", "W", "B")
_EVERYTHING = 7


class _Suspect(NamedTuple):
    """An action that breaks a rule on its rank, and what its stage had done with its microbatch before."""

    place: Place
    step: Step
    action: Action
    done: int


def find_problems(schedule: Schedule) -> tuple[Problem, ...]:
    """Returns every mistake of the orders; see `Schedule.check`."""
    done = bytearray(schedule.num_stages * schedule.num_microbatches)
    suspects = list(_suspects(schedule, done))
    complete = 1 if schedule.forward_only else _EVERYTHING
    if not suspects and done.count(complete) == len(done):
        return tuple(find_circles(schedule, schedule.orders, set()))
    places = _places(schedule)
    return (
        *(_explained(suspect, schedule, places) for suspect in suspects),
        *(_missing(key, what, schedule) for key, what in enumerate(done) if what != complete),
        *find_circles(schedule, _playable(schedule, suspects), _granted(schedule, suspects, done)),
    )


def over_limit(schedule: Schedule, limit: Amount, costs: Costs) -> tuple[Problem, ...]:
    """Returns a problem for each rank that holds more than its limit.

    Raises:
        ScheduleError: a limit that is no number, or a list that has not one per rank.
    """
    limits = tuple(limit) if isinstance(limit, Sequence) else (limit,) * schedule.num_ranks
    if len(limits) != schedule.num_ranks:
        raise ScheduleError(
            f"memory_limit has {len(limits)} values for {schedule.num_ranks} ranks: give one number, or one per rank"
        )
    for most in limits:
        if not most >= 0:  # also refuses nan
            raise ScheduleError(f"memory_limit={most} is no amount of memory: give a number of at least 0")
    stage_costs = costs.per_stage(schedule.placement)
    problems = []
    for rank, (order, most) in enumerate(zip(schedule.orders, limits, strict=True)):
        held = list(levels(order, stage_costs, schedule.forward_only))
        allowed = most * (1 + 1e-9)  # sums of floats may be a hair above what they should be
        first = next((index for index, level in enumerate(held) if level > allowed), None)
        if first is not None:
            text = (
                f"rank {rank} holds {max(held)} activations at most, over the limit of {most}: "
                f"{held[first]} from {order[first]} (step {first}) on"
            )
            problems.append(Problem(text, ((rank, first),)))
    return tuple(problems)


def report(schedule: Schedule, problems: Sequence[Problem]) -> str:
    """Writes the problems, one a line, and the grid of ranks x steps with their places marked."""
    lines = [f"schedule {schedule.name!r} has {len(problems)} problem{'s' if len(problems) > 1 else ''}:"]
    lines += [f"  - {problem.text}" for problem in problems[:_MOST_PRINTED]]
    if len(problems) > _MOST_PRINTED:
        lines.append(f"  - and {len(problems) - _MOST_PRINTED} more")
    marked = {place for problem in problems for place in problem.places}
    return "\n".join([*lines, grid(schedule.orders, marked)])


def _suspects(schedule: Schedule, done: bytearray) -> Iterator[_Suspect]:
    """Looks at every action once, and writes into `done` what each stage does with each microbatch."""
    placement, num_stages, width = schedule.placement, schedule.num_stages, schedule.num_microbatches
    kinds = "F" if schedule.forward_only else "FIWB"
    for rank, order in enumerate(schedule.orders):
        for index, step in enumerate(order):
            # Of an overlapped pair the backward comes first: it cannot use what is made at the same time.
            for action in (step,) if type(step) is Action else reversed(actions_of(step)):
                stage, kind, microbatch = action
                if not (0 <= stage < num_stages and 0 <= microbatch < width and kind in kinds):
                    yield _Suspect((rank, index), step, action, 0)
                    continue
                key = stage * width + microbatch
                before, does, needs = done[key], _DOES[kind], _NEEDS[kind]
                wrong = before & does or before & needs != needs or placement[stage] != rank
                if wrong or (type(step) is not Action and _is_no_pair(step)):
                    yield _Suspect((rank, index), step, action, before)
                done[key] = before | does


def _is_no_pair(step: Step) -> bool:
    return type(step) is Overlapped and (step.forward.kind != "F" or step.backward.kind not in ("I", "B"))


def _places(schedule: Schedule) -> dict[Action, list[Place]]:
    """Finds where each action stands."""
    places: dict[Action, list[Place]] = {}
    for rank, order in enumerate(schedule.orders):
        for index, step in enumerate(order):
            for action in actions_of(step):
                places.setdefault(action, []).append((rank, index))
    return places


def _exists(action: Action, schedule: Schedule) -> bool:
    in_range = 0 <= action.stage < schedule.num_stages and 0 <= action.microbatch < schedule.num_microbatches
    return in_range and action.kind in _DOES


def _explained(suspect: _Suspect, schedule: Schedule, places: dict[Action, list[Place]]) -> Problem:
    place, step, action, done = suspect
    stage, kind, _ = action
    here = where(action, place)
    if not _exists(action, schedule):
        sizes = f"{schedule.num_stages} stages and {schedule.num_microbatches} microbatches"
        return Problem(f"{here} does not exist: there are {sizes}, and the kinds F, I, W and B", (place,))
    if schedule.forward_only and kind != "F":
        return Problem(f"{here} is a backward in a schedule that is forward only", (place,))
    if _is_no_pair(step):
        return Problem(f"{where(step, place)} cannot overlap: a pair is F and B, or F and I", (place,))
    if schedule.placement[stage] != place[0]:
        return Problem(f"{here} is on the wrong rank: stage {stage} is on rank {schedule.placement[stage]}", (place,))
    if done & _DOES[kind]:
        return _doubled(action, places)
    needed = action._replace(kind=_first_needed(kind, done))
    if needed not in places:
        return Problem(f"{here} needs {needed}, which never runs", (place,))
    other = places[needed][0]
    return Problem(f"{here} comes before {where(needed, other)}, which it needs", (place, other))


def _doubled(action: Action, places: dict[Action, list[Place]]) -> Problem:
    """Says where the same work is done. B and I are the same work as well as B and B."""
    stage, kind, microbatch = action
    same = [
        (Action(stage, other, microbatch), place)
        for other in _KINDS
        if _DOES[other] & _DOES[kind]
        for place in places.get(Action(stage, other, microbatch), ())
    ]
    listed = ", ".join(where(other, place) for other, place in same)
    return Problem(f"the work of {action} is done {len(same)} times: {listed}", tuple(place for _, place in same))


def _first_needed(kind: Kind, done: int) -> Kind:
    return "I" if kind == "W" and done & _DOES["F"] else "F"


def _missing(key: int, done: int, schedule: Schedule) -> Problem:
    """Says what a stage never does with a microbatch."""
    stage, microbatch = divmod(key, schedule.num_microbatches)
    kinds: list[Kind] = [] if done & _DOES["F"] else ["F"]
    if not schedule.forward_only:
        if not done & _DOES["B"]:
            kinds.append("B")
        else:
            kinds += [kind for kind in ("I", "W") if not done & _DOES[kind]]
    rank = schedule.placement[stage]
    names = " and ".join(str(Action(stage, kind, microbatch)) for kind in kinds)
    return Problem(f"{names} missing on rank {rank}", ((rank, len(schedule.orders[rank])),))


def _playable(schedule: Schedule, suspects: Sequence[_Suspect]) -> tuple[tuple[Step, ...], ...]:
    """The orders, with actions that do not exist replaced by one that waits for nothing."""
    unknown = [suspect.place for suspect in suspects if not _exists(suspect.action, schedule)]
    if not unknown:
        return schedule.orders
    orders = list(map(list, schedule.orders))
    for rank, index in unknown:
        orders[rank][index] = Action(0, "W", 0)
    return tuple(map(tuple, orders))


def _granted(schedule: Schedule, suspects: Sequence[_Suspect], done: bytearray) -> set[Need]:
    """What the second pass must not wait for: what never comes, and what has been complained about already."""
    width, last = schedule.num_microbatches, schedule.num_stages - 1
    granted = set()
    for key, what in enumerate(done):
        stage, microbatch = divmod(key, width)
        if not what & _DOES["F"] and stage < last:
            granted.add(Need("F", stage + 1, microbatch))
        if not what & _DOES["I"] and stage > 0:
            granted.add(Need("B", stage - 1, microbatch))
    for suspect in suspects:
        if _exists(suspect.action, schedule):
            granted.add(
                Need("F" if suspect.action.kind == "F" else "B", suspect.action.stage, suspect.action.microbatch)
            )
    return granted
