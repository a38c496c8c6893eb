"""Collects what there is to say when no rank can go on: who waits where, who has gone, and what nobody asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.backends.tag import Tag
from echelon.backends.wire import readable
from echelon.errors import DeadlockError
from echelon.flights import FlightRecorder
from echelon.pipeline.transfer import what_passes
from echelon.places import place_of_thread, source_of
from echelon.simulation.deadlock import Waiting, deadlock
from echelon.simulation.task import Task
from echelon.simulation.work import Passage, VirtualWork
from echelon.simulation.world import World, is_plain


def explain(world: World, tasks: Sequence[Task]) -> DeadlockError:
    """Makes the error for tasks of a world that wait for ever."""
    idle = world.returned - {task.rank for task in tasks if task.number == 0}
    return deadlock(
        waiting=[_waiting(world, task) for task in tasks],
        returned={rank: _last_call(world.flight_recorders[rank]) for rank in idle},
        killed=world.killed,
        unclaimed=sorted(_unclaimed(world)),
        now=world.scheduler.now,
    )


def _waiting(world: World, task: Task) -> Waiting:
    work = task.awaits
    assert isinstance(work, VirtualWork)
    return Waiting(
        rank=task.rank,
        peer=work.peer,
        doing=_doing(work, world.flight_recorders[task.rank]),
        place=task.origin if task.number else source_of(place_of_thread(task.thread.ident)),
        is_beside=task.number > 0,
    )


def _doing(work: VirtualWork[object], recorder: FlightRecorder) -> str:
    passage = work.description
    if not isinstance(passage, Passage):
        return str(passage)
    if value := what_passes(passage.tag):
        return f"{passage.doing} rank {passage.peer}, {value}"
    flight = work.flight or recorder.find(passage.tag.context, passage.tag.sequence)
    group = "" if flight is None or flight.group == "world" else f", of group {flight.group!r}"
    return (readable(work.operation) or str(passage)) + group


def _last_call(recorder: FlightRecorder) -> str:
    """Returns what a rank called last, and where; empty if it called nothing."""
    records = recorder.records()
    if not records:
        return ""
    last = records[-1]
    number = f", #{last.sequence}" if last.sequence else ""
    return f"{last.operation}{number} at {last.place}"


def _unclaimed(world: World) -> Iterator[str]:
    for rank, mailbox in enumerate(world.mailboxes):
        for src, tag in mailbox.unclaimed():
            if is_plain(tag):
                yield f"rank {rank} has not asked for what rank {src} has sent it, {_name_of(tag)}"


def _name_of(tag: Tag) -> str:
    return what_passes(tag) or f"tag {tag.step}"
