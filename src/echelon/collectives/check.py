"""Finds the mistakes in a plan: plays it with symbols instead of numbers, and compares the end with the goal.

A symbol knows which pieces of which ranks were combined into it, which of them twice, and in what order. So a plan
that passes is proven for every tensor and every operator that is commutative and associative; and where ranks end with
the same sum, it was added up in the same order, so that floats are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.collectives.goal import Goal, Piece
from echelon.collectives.plan import Plan
from echelon.collectives.provenance import Play, Standing, Value, place_of, why_impossible
from echelon.errors import PlanError

_MOST_PRINTED = 20
_MOST_RANKS = 16
"""How many ranks a problem lists."""


def check(plan: Plan, goal: Goal) -> None:
    """Proves that a plan reaches its goal; see `goal_of`.

    Raises:
        PlanError: it does not. Lists every problem, each with its rank and round.
    """
    problems = find_problems(plan, goal)
    if not problems:
        return
    lines = [f"plan {plan.name!r} has {len(problems)} problem{'s' if len(problems) > 1 else ''}:"]
    lines += [f"  - {problem}" for problem in problems[:_MOST_PRINTED]]
    if len(problems) > _MOST_PRINTED:
        lines.append(f"  - and {len(problems) - _MOST_PRINTED} more")
    raise PlanError("\n".join(lines))


def find_problems(plan: Plan, goal: Goal) -> list[str]:
    """Returns every mistake of a plan, the first causes first."""
    if len(goal.start) != plan.num_ranks:
        return [f"it is for {plan.num_ranks} ranks, its goal for {len(goal.start)}"]
    problems = list(_impossible(plan))
    play = Play(plan, goal)
    play.run()
    problems += play.problems
    standing = play.standing()
    problems += _deadlocks(standing)
    problems += play.unreceived(standing)
    if not standing:
        problems += _compared(play, goal)
    return problems


def _impossible(plan: Plan) -> Iterator[str]:
    """Finds steps with ranks or chunks that do not exist."""
    for rank, program in enumerate(plan.rounds):
        for number, steps in enumerate(program):
            for step in steps:
                if why := why_impossible(step, rank, plan):
                    yield f"{place_of(rank, number)}: {step} {why}"


def _deadlocks(standing: dict[int, Standing]) -> Iterator[str]:
    """Says who waits for what never comes, and who waits for each other in a circle."""
    seen: set[int] = set()
    for first in standing.values():
        path: list[int] = []
        rank = first.rank
        while rank in standing and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = standing[rank].peer
        if path and rank not in standing:
            last = standing[path[-1]]
            yield f"{place_of(last.rank, last.number)}: waits for a message of rank {last.peer}, which sends no more"
        elif rank in path:
            waits = (standing[member] for member in path[path.index(rank) :])
            listed = "; ".join(f"{place_of(wait.rank, wait.number)} for rank {wait.peer}" for wait in waits)
            yield f"ranks wait for each other (deadlock): {listed}"


def _compared(play: Play, goal: Goal) -> Iterator[str]:
    """Compares what ranks have at the end with what they must have."""
    everybody = (1 << play.plan.num_ranks) - 1
    makers: dict[int, tuple[int, int]] = {}
    masks: dict[frozenset[Piece], int] = {}
    for rank, wanted in enumerate(goal.end):
        if goal.meets and play.heard[rank] != everybody:
            yield f"rank {rank} goes on without knowing of rank {_lowest(everybody & ~play.heard[rank])}"
        for chunk, pieces in wanted.items():
            value = play.values[rank].get(chunk)
            if value is None:
                yield f"rank {rank} ends without chunk {chunk}"
                continue
            mask = masks.setdefault(pieces, 0) or sum(map(play.bit, pieces))
            masks[pieces] = mask
            yield from _differences(rank, chunk, value, mask, play)
            other, expression = makers.setdefault(mask, (rank, value.expression))
            if value.pieces == mask and expression != value.expression:
                yield f"rank {rank} combines chunk {chunk} in another order than rank {other}: sums differ in rounding"


def _differences(rank: int, chunk: int, value: Value, mask: int, play: Play) -> Iterator[str]:
    for what, pieces in (
        ("lacks", mask & ~value.pieces),
        ("holds what it must not,", value.pieces & ~mask),
        ("counts twice", value.twice),
    ):
        if pieces:
            listed = list(_pieces(pieces, play.plan.num_chunks))
            more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
            text = f"rank {rank} ends with a chunk {chunk} that {what} {', '.join(listed[:4])}{more}"
            yield text if what != "lacks" else f"{text} (seen on {_holders(pieces & -pieces, play)})"


def _holders(piece: int, play: Play) -> str:
    """Says where a piece got to: the mistake is near the last of them that was to hand it on."""
    ranks = [rank for rank, pieces in enumerate(play.seen) if pieces & piece]
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    listed = ", ".join(map(str, ranks[:_MOST_RANKS]))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}" if ranks else "no rank"


def _pieces(mask: int, num_chunks: int) -> Iterator[str]:
    while mask:
        rank, chunk = divmod(_lowest(mask), num_chunks)
        yield f"chunk {chunk} of rank {rank}"
        mask &= mask - 1


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1
