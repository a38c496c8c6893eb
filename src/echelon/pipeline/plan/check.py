"""Checker of schedules.

Two passes. `find_problems` looks at each rank alone, for actions that are missing, doubled, on the wrong rank, or
before an action of the same stage that they need. `find_cycles` looks for deadlocks: ranks that wait for each other.

Strategy of the second pass. The schedule is played. A rank that stands still waits for one action of one rank, which
stands still as well. So following the waits from any of these ranks leads into a cycle. The cycle is reported, one
wait in it is granted, and the schedule is played again, since there may be others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from echelon.arguments import is_number
from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import Action, Handover, Kind, Overlapped, Place, Step, actions_of
from echelon.pipeline.plan.cost import Amount, Costs
from echelon.pipeline.plan.simulate import levels, play
from echelon.wording import counted, itemized

if TYPE_CHECKING:
    from echelon.pipeline.plan.schedule import Schedule


class Mistake(NamedTuple):
    """Mistake in the orders and its places. A missing step is at the index after its rank's last step."""

    text: str
    places: tuple[Place, ...]


# One mistake can cause many cycles, and each costs one more run of the schedule.
_MOST_CIRCLES = 8


class _Wait(NamedTuple):
    """Step that cannot start, its missing input, and the action that would produce it."""

    step: Step
    place: Place
    need: Handover
    maker: Action
    maker_place: Place


def find_cycles(
    schedule: Schedule, orders: Sequence[Sequence[Step]], granted: Collection[Handover]
) -> Iterator[Mistake]:
    """Yields a problem for each cycle of waits, up to 8.

    Args:
        schedule: Gives the placement and the sizes.
        orders: Orders to play. All of their actions must exist.
        granted: Inputs that no step waits for.
    """
    granted = set(granted)
    # Durations cannot cause or cure a deadlock, so zeros do.
    costs = Costs(0, 0, 0).per_stage(schedule.placement)
    for _ in range(_MOST_CIRCLES):
        ran = play(orders, schedule.placement, schedule.num_microbatches, costs, granted)
        standing = {rank: len(ends) for rank, ends in enumerate(ran.ends) if len(ends) < len(orders[rank])}
        if not standing:
            return
        cycle = _cycle(_waits(orders, standing, schedule.num_stages, granted))
        yield _problem(cycle)
        # Breaks this cycle, so the next run stops at another one or comes to the end.
        granted.add(cycle[0].need)


def _waits(
    orders: Sequence[Sequence[Step]], standing: dict[int, int], num_stages: int, granted: Collection[Handover]
) -> dict[int, _Wait]:
    """Returns the wait of each rank that stands still."""
    # Filled from the end of each order, so that of equal actions the earliest stays.
    still_to_come = {
        (action.kind == "F", action.stage, action.microbatch): (action, Place(rank, index))
        for rank, position in standing.items()
        for index in range(len(orders[rank]) - 1, position - 1, -1)
        for action in actions_of(orders[rank][index])
        if action.kind != "W"
    }
    waits = {}
    for rank, position in standing.items():
        step = orders[rank][position]
        for stage, kind, microbatch in actions_of(step):
            is_forward = kind == "F"
            maker_stage = stage - 1 if is_forward else stage + 1
            need = Handover(stage, microbatch, not is_forward)
            maker = still_to_come.get((is_forward, maker_stage, microbatch))
            if kind != "W" and maker is not None and need not in granted and 0 <= maker_stage < num_stages:
                waits[rank] = _Wait(step, Place(rank, position), need, *maker)
    return waits


def _cycle(waits: dict[int, _Wait]) -> list[_Wait]:
    """Follows the waits until a rank repeats, and returns the waits of the cycle."""
    path: list[int] = []
    rank = min(waits)
    while rank not in path:
        path.append(rank)
        rank = waits[rank].maker_place.rank
    return [waits[rank] for rank in path[path.index(rank) :]]


def _problem(cycle: Sequence[_Wait]) -> Mistake:
    places = tuple(place for wait in cycle for place in (wait.place, wait.maker_place))
    if len(cycle) == 1:
        wait = cycle[0]
        text = f"{where(wait.step, wait.place)} comes before {where(wait.maker, wait.maker_place)}, which it needs"
        return Mistake(text, places)
    waits = "; ".join(
        f"{where(wait.step, wait.place)} waits for {where(wait.maker, wait.maker_place)}" for wait in cycle
    )
    return Mistake(f"ranks wait for each other (deadlock): {waits}", places)


# Work of an action, and work that must precede it, as bits: 1 forward, 2 input gradient, 4 weight gradient.
_DOES = {"F": 1, "I": 2, "W": 4, "B": 6}
_NEEDS = {"F": 0, "I": 1, "W": 3, "B": 1}
_KINDS: tuple[Kind, ...] = ("F", "I", "W", "B")
_EVERYTHING = 7


class _Suspect(NamedTuple):
    """Action that breaks a rule on its rank, and the bits of work that preceded it on its stage and microbatch."""

    place: Place
    step: Step
    action: Action
    done: int


def find_problems(schedule: Schedule) -> tuple[Mistake, ...]:
    """Returns every mistake of the orders; see `Schedule.check`."""
    # Bits of the work done so far, per stage and microbatch.
    done = bytearray(schedule.num_stages * schedule.num_microbatches)
    suspects = list(_suspects(schedule, done))
    complete = 1 if schedule.forward_only else _EVERYTHING
    # Fast path of a valid schedule: it needs no index of places, which explanations do.
    if not suspects and done.count(complete) == len(done):
        return tuple(find_cycles(schedule, schedule.orders, set()))
    places = _places(schedule)
    return (
        # A pair that cannot overlap is suspect for each of its actions.
        *dict.fromkeys(_explained(suspect, schedule, places) for suspect in suspects),
        *(_missing(key, what, schedule) for key, what in enumerate(done) if what != complete),
        *find_cycles(schedule, _playable(schedule), _granted(schedule, suspects, done)),
    )


def over_limit(schedule: Schedule, limit: Amount, costs: Costs) -> tuple[Mistake, ...]:
    """Returns a problem for each rank that holds more than its limit.

    Raises:
        ScheduleError: a limit that is no number, or a list without one number per rank.
    """
    limits = tuple(limit) if isinstance(limit, Sequence) else (limit,) * schedule.num_ranks
    if len(limits) != schedule.num_ranks:
        raise ScheduleError(
            f"memory_limit has {len(limits)} values for {schedule.num_ranks} ranks: give one number, or one per rank"
        )
    for most in limits:
        if not (is_number(most) and float(most) >= 0):  # also refuses nan
            raise ScheduleError(f"memory_limit={most} is no amount of memory: give a number of at least 0")
    stage_costs = costs.per_stage(schedule.placement)
    problems = []
    for rank, (order, most) in enumerate(zip(schedule.orders, limits, strict=True)):
        held = list(levels(order, stage_costs, schedule.forward_only))
        allowed = most * (1 + 1e-9)  # sums of floats may be a hair above the exact sum
        first = next((index for index, level in enumerate(held) if level > allowed), None)
        if first is not None:
            text = (
                f"rank {rank} holds {max(held)} activations at most, over the limit of {most}: "
                f"{held[first]} from {order[first]} (step {first}) on"
            )
            problems.append(Mistake(text, (Place(rank, first),)))
    return tuple(problems)


def report(schedule: Schedule, problems: Sequence[Mistake]) -> str:
    """Returns the problems, one a line, and the grid of ranks x steps with their places marked.

    Of many problems the lines have the first ones of each kind. The grid marks all.
    """
    lines = [f"schedule {schedule.name!r} has {len(problems)} problem{'s' if len(problems) > 1 else ''}:"]
    lines += itemized([problem.text for problem in problems])
    marked = {place for problem in problems for place in problem.places}
    return "\n".join([*lines, grid(schedule.orders, marked)])


def _suspects(schedule: Schedule, done: bytearray) -> Iterator[_Suspect]:
    """Yields actions that break a rule, and adds the work of every action to `done`."""
    placement, num_stages, width = schedule.placement, schedule.num_stages, schedule.num_microbatches
    kinds = "F" if schedule.forward_only else "FIWB"
    for rank, order in enumerate(schedule.orders):
        for index, step in enumerate(order):
            # The backward of an overlapped pair is looked at first: it cannot use the output of its own forward.
            for action in (step,) if type(step) is Action else reversed(actions_of(step)):
                stage, kind, microbatch = action
                if not (0 <= stage < num_stages and 0 <= microbatch < width and kind in kinds):
                    yield _Suspect(Place(rank, index), step, action, 0)
                    continue
                key = stage * width + microbatch
                before, does, needs = done[key], _DOES[kind], _NEEDS[kind]
                wrong = before & does or before & needs != needs or placement[stage] != rank
                if wrong or (type(step) is not Action and _is_no_pair(step)):
                    yield _Suspect(Place(rank, index), step, action, before)
                done[key] = before | does


def _is_no_pair(step: Step) -> bool:
    return type(step) is Overlapped and (step.forward.kind != "F" or step.backward.kind not in ("I", "B"))


def _places(schedule: Schedule) -> dict[Action, list[Place]]:
    places: dict[Action, list[Place]] = {}
    for rank, order in enumerate(schedule.orders):
        for index, step in enumerate(order):
            for action in actions_of(step):
                places.setdefault(action, []).append(Place(rank, index))
    return places


def _exists(action: Action, schedule: Schedule) -> bool:
    in_range = 0 <= action.stage < schedule.num_stages and 0 <= action.microbatch < schedule.num_microbatches
    return in_range and action.kind in _DOES


def _explained(suspect: _Suspect, schedule: Schedule, places: dict[Action, list[Place]]) -> Mistake:
    # The order of the tests decides which text a reader sees: an action that does not exist breaks other rules as well.
    place, step, action, done = suspect
    stage, kind, _ = action
    here = where(action, place)
    if not _exists(action, schedule):
        sizes = f"{counted(schedule.num_stages, 'stage')} and {counted(schedule.num_microbatches, 'microbatch')}"
        return Mistake(f"{here} does not exist: the schedule has {sizes}, and the kinds F, I, W and B", (place,))
    if schedule.forward_only and kind != "F":
        return Mistake(f"{here} is a backward in a schedule that is forward only", (place,))
    if _is_no_pair(step):
        return Mistake(f"{where(step, place)} cannot overlap: a pair is F and B, or F and I", (place,))
    if schedule.placement[stage] != place.rank:
        return Mistake(f"{here} is on the wrong rank: stage {stage} is on rank {schedule.placement[stage]}", (place,))
    if done & _DOES[kind]:
        return _doubled(action, places)
    needed = action._replace(kind=_first_needed(kind, done))
    if needed not in places:
        return Mistake(f"{here} needs {needed}, which never runs", (place,))
    other = places[needed][0]
    return Mistake(f"{here} comes before {where(needed, other)}, which it needs", (place, other))


def _doubled(action: Action, places: dict[Action, list[Place]]) -> Mistake:
    """Lists the places of the same work. B and I share work, as B and B do."""
    stage, kind, microbatch = action
    same = [
        (Action(stage, other, microbatch), place)
        for other in _KINDS
        if _DOES[other] & _DOES[kind]
        for place in places.get(Action(stage, other, microbatch), ())
    ]
    listed = ", ".join(where(other, place) for other, place in same)
    return Mistake(f"the work of {action} is done {len(same)} times: {listed}", tuple(place for _, place in same))


def _first_needed(kind: Kind, done: int) -> Kind:
    return "I" if kind == "W" and done & _DOES["F"] else "F"


def _missing(key: int, done: int, schedule: Schedule) -> Mistake:
    """Names the work that a stage never does for a microbatch."""
    stage, microbatch = divmod(key, schedule.num_microbatches)
    kinds: list[Kind] = [] if done & _DOES["F"] else ["F"]
    if not schedule.forward_only:
        if not done & _DOES["B"]:
            kinds.append("B")
        else:
            # Half of a backward exists, so its other half is missing, not a B.
            kinds += [kind for kind in ("I", "W") if not done & _DOES[kind]]
    rank = schedule.placement[stage]
    names = " and ".join(str(Action(stage, kind, microbatch)) for kind in kinds)
    return Mistake(f"{names} missing on rank {rank}", (Place(rank, len(schedule.orders[rank])),))


def _playable(schedule: Schedule) -> list[list[Step]]:
    """Returns the orders with a W, which waits for nothing, in place of steps none of whose actions exist.

    An action alone stands for a pair whose other action does not exist.
    """

    def playable(step: Step) -> Step:
        known = [action for action in actions_of(step) if _exists(action, schedule)]
        return step if len(known) == len(actions_of(step)) else (*known, Action(0, "W", 0))[0]

    return [list(map(playable, order)) for order in schedule.orders]


def _granted(schedule: Schedule, suspects: Sequence[_Suspect], done: bytearray) -> set[Handover]:
    """Returns the inputs that the second pass takes as granted: never produced, or reported by the first pass."""
    # Else one missing action would be reported a second time, as a deadlock of every rank that waits for it.
    width, last = schedule.num_microbatches, schedule.num_stages - 1
    granted = set()
    for key, what in enumerate(done):
        stage, microbatch = divmod(key, width)
        if not what & _DOES["F"] and stage < last:
            granted.add(Handover(stage + 1, microbatch, False))
        if not what & _DOES["I"] and stage > 0:
            granted.add(Handover(stage - 1, microbatch, True))
    for suspect in suspects:
        if _exists(suspect.action, schedule):
            stage, kind, microbatch = suspect.action
            granted.add(Handover(stage, microbatch, kind != "F"))
    return granted


def where(step: object, place: Place) -> str:
    """Returns the text of a step with its place, such as "2F0 (rank 2, step 5)"."""
    return f"{step} (rank {place.rank}, step {place.position})"


_MOST_COLUMNS = 24
_MOST_ROWS = 24
_AROUND = 3


def grid(orders: Sequence[Sequence[object]], marked: Collection[Place] = ()) -> str:
    """Returns the orders as text, a row per rank and a column per step, with marked places as >2F0<.

    More than 24 rows or columns are cut to the surroundings of the marked places.
    """
    most_steps = max(map(len, orders), default=0)
    # One column more than there are steps: a missing step is marked after the last one.
    columns = _selected({step for _, step in marked}, most_steps + 1, _MOST_COLUMNS)
    rows = _selected({rank for rank, _ in marked}, len(orders), _MOST_ROWS)
    table = [["", *(str(column) for column in columns)]]
    table += [[f"rank {rank}", *(_cell(orders[rank], rank, step, marked) for step in columns)] for rank in rows]
    if not any(row[-1] for row in table[1:]):  # nothing is missing at the end
        table = [row[:-1] for row in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [_line(row, widths, [-1, *columns]) for row in table]
    left_out = len(orders) - len(rows)
    return "\n".join([*lines, f"({left_out} more ranks)"] if left_out else lines)


def _selected(marked: set[int], count: int, most: int) -> list[int]:
    """Returns the indices to show: all, or the marked ones with their neighbours, or the first if none is marked."""
    if count <= most:
        return list(range(count))
    near: list[int] = []
    for index in sorted(marked) or [0]:
        around = range(max(0, index - _AROUND), min(count, index + _AROUND + 1))
        near += [other for other in around if other not in near]
        if len(near) >= most:
            break
    return sorted(near[:most])


def _cell(order: Sequence[object], rank: int, step: int, marked: Collection[Place]) -> str:
    text = str(order[step]) if step < len(order) else ""
    if (rank, step) in marked:
        return f">{text or '?'}<"
    return f" {text} " if text else ""


def _line(row: list[str], widths: list[int], columns: list[int]) -> str:
    """Joins a row, with dots in place of omitted columns."""
    cells = [row[0].ljust(widths[0])]
    for index in range(1, len(row)):
        gap = " " if columns[index] == columns[index - 1] + 1 else " .. "
        cells.append(gap + row[index].ljust(widths[index]))
    return "".join(cells).rstrip()
