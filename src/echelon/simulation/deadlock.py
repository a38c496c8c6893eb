"""Explains why no rank can go on: who waits for whom, in which operation and at which line."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from echelon.backends.delivery import ANY
from echelon.errors import DeadlockError

_MOST_UNCLAIMED = 8
"""How many messages that nobody has asked for are named."""


class Waiting(NamedTuple):
    """One task that waits."""

    rank: int
    peer: int
    """The rank that it waits for; its own if it waits for what it started beside; ANY if any rank will do."""
    doing: str
    place: str
    """The line of the program; empty if it has none, because its function has returned."""
    is_beside: bool
    """Whether it was started beside the rank's own task; `place` is then where."""

    def __str__(self) -> str:
        whom = "any rank" if self.peer == ANY else f"rank {self.peer}"
        if self.is_beside:
            return f"rank {self.rank}, in {self.doing}, waits for {whom}; begun at {self.place}"
        whom = whom if self.peer != self.rank else "what it began beside"
        where = f", at {self.place}" if self.place else ", at the end of its function"
        return f"rank {self.rank} waits for {whom} in {self.doing}{where}"


def deadlock(
    waiting: Iterable[Waiting],
    returned: Mapping[int, str],
    killed: Collection[int],
    unclaimed: Sequence[str],
    now: float,
) -> DeadlockError:
    """Makes the error for ranks that wait for ever.

    Args:
        waiting: all that wait.
        returned: ranks whose function has returned, with what each called last, and where; empty for nothing.
        killed: ranks that a fault ended.
        unclaimed: what was sent and not asked for, in words.
        now: virtual seconds.
    """
    tasks = sorted(waiting)
    lines = [str(task) for task in tasks]
    lines += [f"rank {rank} has returned, after {last or 'no call'}" for rank, last in sorted(returned.items())]
    lines += [f"rank {rank} was killed" for rank in sorted(killed)]
    lines += unclaimed[:_MOST_UNCLAIMED]
    if len(unclaimed) > _MOST_UNCLAIMED:
        lines.append(f"and {len(unclaimed) - _MOST_UNCLAIMED} more that nobody has asked for")
    return DeadlockError("\n  ".join([f"no rank can go on at {now:g} s: {_reason(tasks, returned)}", *lines]))


def _reason(tasks: Sequence[Waiting], returned: Collection[int]) -> str:
    for task in tasks:
        if task.peer in returned:
            return (
                f"rank {task.rank} waits for rank {task.peer}, which has returned: make both call the same operations"
            )
    edges: dict[int, list[int]] = {}
    for task in tasks:
        if task.peer not in (task.rank, ANY):
            edges.setdefault(task.rank, []).append(task.peer)
    cycle = find_cycle(edges)
    if not cycle:
        return "what they wait for was never sent: let every receive have its send"
    path = " -> ".join(f"rank {rank}" for rank in (*cycle, cycle[0]))
    return f"they wait for each other, {path}: let one of them send what the other waits for before it waits itself"


def find_cycle(edges: Mapping[int, Sequence[int]]) -> list[int]:
    """Returns the nodes of one cycle in order, from its smallest; empty if there is none."""
    done: set[int] = set()
    for start in sorted(edges):
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in done and rank not in path:
            path.append(rank)
            rank = next((peer for peer in edges.get(rank, ()) if peer not in done), None)
        if rank in path:
            cycle = path[path.index(rank) :]
            first = cycle.index(min(cycle))
            return cycle[first:] + cycle[:first]
        done.update(path)
    return []
