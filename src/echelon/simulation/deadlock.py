"""Explanation of a deadlock: which rank waits for which, in which call and at which line of the program."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from echelon.backends.delivery import ANY
from echelon.backends.formats.wire import Tag, readable
from echelon.call_site import place_of_thread, source_of
from echelon.errors import DeadlockError
from echelon.operation_records import FlightRecorder, OperationRecord
from echelon.pipeline.run.transfer import what_passes
from echelon.simulation.backend import Passage, StoreWait, VirtualWork
from echelon.simulation.scheduler import Task
from echelon.simulation.world import World, is_plain

_MOST_UNCLAIMED = 8
"""Most unclaimed messages that a DeadlockError lists."""


class Waiting(NamedTuple):
    """Waiting task, as a DeadlockError lists it."""

    rank: int
    peer: int
    """Rank that it waits for. Its own if it waits for an asynchronous operation, ANY if any rank will do."""
    doing: str
    place: str
    """Line of the program. Empty if the rank's function has returned."""
    is_beside: bool
    """Whether the task is a lane. `place` is then the line that started the operation."""
    of_store: bool
    """Whether it waits for a key of a store of torch.distributed."""

    def __str__(self) -> str:
        whom = "any rank" if self.peer == ANY else f"rank {self.peer}"
        if self.is_beside:
            return f"rank {self.rank}, in {self.doing}, waits for {whom}; begun at {self.place}"
        whom = whom if self.peer != self.rank else "its own asynchronous operation"
        where = f", at {self.place}" if self.place else ", at the end of its function"
        return f"rank {self.rank} waits for {whom} in {self.doing}{where}"


def explain(world: World, tasks: Sequence[Task], hint: str = "") -> DeadlockError:
    """Returns the error for tasks of a world that wait for ever. `hint` is a mistake that may be the cause."""
    waiting = sorted(_waiting(world, task) for task in tasks)
    # A rank that has returned but still waits for its asynchronous operations is listed as waiting.
    returned = sorted(world.returned - {task.rank for task in tasks if task.number == 0})
    unclaimed = sorted(_unclaimed(world))
    lines = [str(task) for task in waiting]
    lines += [
        f"rank {rank} has returned, after {_last_call(world.flight_recorders[rank]) or 'no call'}" for rank in returned
    ]
    lines += [f"rank {rank} was killed" for rank in sorted(world.killed)]
    lines += unclaimed[:_MOST_UNCLAIMED]
    if len(unclaimed) > _MOST_UNCLAIMED:
        lines.append(f"and {len(unclaimed) - _MOST_UNCLAIMED} more messages that were not received")
    reason = hint or _reason(waiting, returned)
    return DeadlockError("\n  ".join([f"no rank can go on at {world.clock.now:g} s: {reason}", *lines]))


def _reason(tasks: Sequence[Waiting], returned: Collection[int]) -> str:
    # Before any cycle: a rank that has returned can send nothing more.
    for task in tasks:
        if task.peer in returned:
            return (
                f"rank {task.rank} waits for rank {task.peer}, which has returned: make both call the same operations"
            )
    edges: dict[int, list[int]] = {}
    for task in tasks:
        if task.peer not in (task.rank, ANY):
            edges.setdefault(task.rank, []).append(task.peer)
    cycle = _find_cycle(edges)
    if not cycle and (in_store := next((task for task in tasks if task.of_store), None)):
        return f"no other rank will end the wait of rank {in_store.rank} in {in_store.doing}"
    if not cycle:
        return "the messages that they wait for were never sent: match every receive with a send"
    path = " -> ".join(f"rank {rank}" for rank in (*cycle, cycle[0]))
    return f"they wait for each other, {path}: let one of them send before it waits"


def _find_cycle(edges: Mapping[int, Sequence[int]]) -> list[int]:
    """Returns the nodes of one cycle in order, from its smallest. Empty if there is none."""
    # A node is left out once no cycle goes through it, so this ends after one visit of each.
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


def _waiting(world: World, task: Task) -> Waiting:
    work = task.awaits
    assert isinstance(work, VirtualWork)
    return Waiting(
        rank=task.rank,
        peer=work.peer,
        doing=_doing(work, world.flight_recorders[task.rank]),
        place=_line_of_lane(world, task, work) if task.number else source_of(place_of_thread(task.thread.ident)),
        is_beside=task.number > 0,
        of_store=isinstance(work, StoreWait),
    )


def _line_of_lane(world: World, task: Task, work: VirtualWork[object]) -> str:
    """Returns the line that started the operation of a lane. That of its first operation, if it has no record."""
    flight = _flight_of(work, world.flight_recorders[task.rank])
    return source_of(flight.place) if flight is not None else task.origin


def _flight_of(work: VirtualWork[object], recorder: FlightRecorder) -> OperationRecord | None:
    passage = work.description
    if work.flight is not None or not isinstance(passage, Passage):
        return work.flight
    return recorder.find(passage.tag.context, passage.tag.sequence)


def _doing(work: VirtualWork[object], recorder: FlightRecorder) -> str:
    passage = work.description
    if not isinstance(passage, Passage):
        return str(passage)
    if value := what_passes(passage.tag):
        return f"{passage.doing} rank {passage.peer}, {value}"
    flight = _flight_of(work, recorder)
    group = "" if flight is None or flight.group == "world" else f", of group {flight.group!r}"
    return (readable(work.operation) or str(passage)) + group


def _last_call(recorder: FlightRecorder) -> str:
    """Returns a rank's last call and its line. Empty if it made no call."""
    records = recorder.records()
    if not records:
        return ""
    last = records[-1]
    number = f", #{last.sequence}" if last.sequence else ""
    return f"{last.operation}{number} at {last.place}"


def _unclaimed(world: World) -> Iterator[str]:
    for rank, mailbox in enumerate(world.mailboxes):
        for src, tag in mailbox.unclaimed:
            if is_plain(tag):
                yield f"rank {rank} has not received a message of rank {src}, {_name_of(tag)}"


def _name_of(tag: Tag) -> str:
    return what_passes(tag) or f"tag {tag.step}"
