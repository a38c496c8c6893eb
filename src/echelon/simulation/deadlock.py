"""Explanation of a deadlock: which rank waits for which, in which call and at which line of the program."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from echelon.backends.delivery import ANY
from echelon.backends.formats.wire import TRANSFERS, Tag, readable
from echelon.call_site import line_of, outwards, place_of_thread, source_of
from echelon.collectives.calls.hang_diagnosis import first_at_other_lines
from echelon.errors import DeadlockError
from echelon.operation_records import FlightRecorder, OperationRecord
from echelon.purposes import cure_of
from echelon.simulation.boundary import SEND, Activity, StoreWait, VirtualWork
from echelon.simulation.scheduler import Task
from echelon.simulation.watchdog import Blocked
from echelon.simulation.world import World, is_plain
from echelon.wording import listed

_PIPELINING = os.path.join("torch", "distributed", "pipelining", "schedules.py")
"""File of torch's schedules, whose order of messages is not the program's own."""
_SAME_SCHEDULE = (
    "make the same schedule on every rank, with as many microbatches and with the stages in the same order, and call "
    "its step as often"
)
_MOST_UNCLAIMED = 8
"""Most unclaimed messages that a DeadlockError lists."""
_MOST_RECEIVES = 3
"""Most receives of a rank that stand beside a message that it has not received."""


class Waiting(NamedTuple):
    """Waiting task, as a DeadlockError lists it."""

    rank: int
    peers: tuple[int, ...]
    """Ranks that it waits for. Its own if it waits for an asynchronous operation, ANY if any rank will do."""
    doing: str
    place: str
    """Line of the program, and of its caller. Empty if the rank's function has returned."""
    is_beside: bool
    """Whether the task is a lane. `place` is then the line that started the operation."""
    is_send: bool
    """Whether it waits for the receive of a message that it sends."""
    is_collective: bool
    """Whether it waits in a collective, or for an asynchronous operation."""
    of_store: bool
    """Whether it waits for a key of a store of torch.distributed."""
    group: str
    """Name of the group of the collective that it waits in. Empty for other waits."""
    context: int
    """Context of that group."""
    in_schedule: bool
    """Whether a schedule of torch.distributed.pipelining waits."""

    @property
    def text(self) -> str:
        """Operation and place, which names a module of FSDP2."""
        return f"{self.doing} at {self.place}" if self.place else self.doing

    def __str__(self) -> str:
        whom = "any rank" if self.peers == (ANY,) else listed(self.peers)
        if self.is_beside:
            return f"rank {self.rank}, in {self.doing}, waits for {whom}; begun at {self.place}"
        whom = whom if self.peers != (self.rank,) else "its own asynchronous operation"
        where = f", at {self.place}" if self.place else ", at the end of its function"
        return f"rank {self.rank} waits for {whom} in {self.doing}{where}"


def explain(world: World, tasks: Sequence[Task], hint: str = "") -> DeadlockError:
    """Returns the error for tasks of a world that wait for ever. `hint` is a mistake that may be the cause."""
    # Sorted, so that the same seed gives the same text.
    waiting = sorted(_waiting(world, task) for task in tasks)
    # A rank that has returned but still waits for its asynchronous operations is listed as waiting.
    returned = sorted(world.returned - {task.rank for task in tasks if task.number == 0})
    in_receive = {task.rank for task in waiting if not (task.is_send or task.is_collective or task.of_store)}
    unclaimed = sorted(_unclaimed(world, in_receive))
    lines = [str(task) for task in _each_once(waiting)]
    lines += [
        f"rank {rank} has returned, after {_last_call(world.flight_recorders[rank]) or 'no call'}" for rank in returned
    ]
    lines += [f"rank {rank} was killed" for rank in sorted(world.killed)]
    lines += unclaimed[:_MOST_UNCLAIMED]
    if len(unclaimed) > _MOST_UNCLAIMED:
        lines.append(f"and {len(unclaimed) - _MOST_UNCLAIMED} more messages that were not received")
    reason = hint or _reason(waiting, returned, _mispaired(world)) + _parted(world, waiting, returned)
    return DeadlockError("\n  ".join([f"no rank can go on at {world.clock.now:g} s: {reason}", *lines]))


def _parted(world: World, waiting: Sequence[Waiting], returned: Collection[int]) -> str:
    """Returns the first lines that differ between a rank in a collective and one that has returned without it."""
    pairs = ((task, peer) for task in waiting if task.group for peer in task.peers if peer in returned)
    for task, peer in pairs:
        recorder, other = world.flight_recorders[task.rank], world.flight_recorders[peer]
        last = other.latest(task.context)
        agreed = recorder.find(task.context, last.sequence) if last is not None else None
        ranks = (task.rank, peer)
        if found := first_at_other_lines(recorder, agreed, partial(_text_of, other), ranks):
            return found
    return ""


def _text_of(recorder: FlightRecorder, call: OperationRecord) -> str:
    """Returns another rank's text of a call, from its record. Empty if it has left the record."""
    return str(recorder.find(call.context, call.sequence) or "")


def _each_once(waiting: Sequence[Waiting]) -> list[Waiting]:
    """Returns the waiting tasks without a rank's wait for its own asynchronous operation at the line that began it.

    DDP's backward begins its operations and waits for them in one call. The operation is then listed as the rank's own.
    """
    ends = {(task.rank, task.place) for task in waiting if not task.is_beside and task.peers == (task.rank,)}
    began = {(task.rank, task.place) for task in waiting if task.is_beside}
    return [
        task._replace(is_beside=task.is_beside and (task.rank, task.place) not in ends)
        for task in waiting
        if task.is_beside or (task.rank, task.place) not in ends & began
    ]


def explain_blocked(world: World, blocked: Blocked) -> DeadlockError:
    """Returns the error for a rank that waits for another thread outside of the library."""
    rank, ident = blocked.task.rank, blocked.task.ident
    line = source_of(place_of_thread(ident))
    innermost = _innermost(ident)
    inside = f", in {innermost}" if innermost and not line.startswith(f"{innermost}:") else ""
    native = ", ".join(filter(None, (blocked.code, blocked.wait.channel)))
    reason = (
        f"rank {rank} waits for another thread outside of Echelon, at {line or 'the end of its function'}{inside}"
        f"{native and f' ({native})'}: no other rank gets a turn meanwhile, so let ranks wait for each other by "
        "messages, collectives and stores alone"
    )
    others = [line for line in _lines(world) if not line.startswith(f"rank {rank} ")]
    return DeadlockError("\n  ".join([f"no rank can go on at {world.clock.now:g} s: {reason}", *others]))


def whereabouts(world: World) -> str:
    """Returns where each rank is, a line for each."""
    return "\n".join(_lines(world))


def _lines(world: World) -> list[str]:
    """Returns where each rank is, a line for each, sorted by rank. Called while the ranks run, or are blocked."""
    mains = {task.rank: task for task in world.scheduler.tasks() if task.number == 0}
    lines = []
    for rank in range(len(world.mailboxes)):
        task, recorder = mains.get(rank), world.flight_recorders.get(rank)
        if rank in world.killed:
            lines.append(f"rank {rank} was killed")
        elif recorder is None:
            lines.append(f"rank {rank} has not begun")
        elif task is None:
            lines.append(f"rank {rank} has returned, after {_last_call(recorder) or 'no call'}")
        # A rank whose wait is over may not have had its turn yet.
        elif isinstance(task.awaits, VirtualWork) and task.awaits.awaited() and not task.is_queued:
            lines.append(str(_waiting(world, task)))
        else:
            line = source_of(place_of_thread(task.ident))
            doing = "runs" if task is world.scheduler.running else "is about to go on"
            lines.append(f"rank {rank} {doing}{line and f', at {line}'}")
    return lines


def _innermost(ident: int) -> str:
    """Returns "file:line" of the innermost Python call of a thread. Empty if it has ended."""
    frame = sys._current_frames().get(ident)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _reason(tasks: Sequence[Waiting], returned: Collection[int], mispaired: Collection[int]) -> str:
    # Before any cycle: a rank that has returned can send nothing more.
    for task in tasks:
        if gone := [peer for peer in task.peers if peer in returned]:
            which, all_of_them = ("which has returned", "both") if len(gone) == 1 else ("which have returned", "all")
            cure = cure_of({task.rank: task.text, **dict.fromkeys(gone, "")}, have_ended=True)
            advice = cure or (_SAME_SCHEDULE if task.in_schedule else f"make {all_of_them} call the same operations")
            return f"rank {task.rank} waits for {listed(gone)}, {which}: {advice}"
    edges: dict[int, list[int]] = {}
    for task in tasks:
        edges.setdefault(task.rank, []).extend(peer for peer in task.peers if peer not in (task.rank, ANY))
    cycle = _find_cycle(edges)
    if not cycle and (in_store := next((task for task in tasks if task.of_store), None)):
        return f"no other rank will end the wait of rank {in_store.rank} in {in_store.doing}"
    if not cycle:
        return "the messages that they wait for were never sent: match every receive with a send"
    path = " -> ".join(f"rank {rank}" for rank in (*cycle, cycle[0]))
    return f"they wait for each other, {path}: {_advice([task for task in tasks if task.rank in cycle], mispaired)}"


def _advice(cycle: Sequence[Waiting], mispaired: Collection[int]) -> str:
    """Returns the remedy for tasks that wait for each other. `mispaired`: ranks whose receives fit no message."""
    # Not of a rank's wait for its own asynchronous operation, which is listed twice.
    calls = {task.rank: task.text for task in cycle if task.group or task.peers != (task.rank,)}
    if cure := cure_of(calls):
        return cure
    if all(task.in_schedule for task in cycle):
        return _SAME_SCHEDULE
    if len({task.context for task in cycle}) == 1 or not all(task.group for task in cycle):
        if all(task.is_collective for task in cycle):
            return "make all ranks call the collectives in the same order"
        # A rank whose program waits for its asynchronous collective is listed twice.
        if in_collective := sorted({task.rank for task in cycle if task.is_collective}):
            others = sorted({task.rank for task in cycle if not task.is_collective})
            return (
                f"with {listed(in_collective)} in a collective and {listed(others)} in a message: make all ranks of "
                "the group call the collective, or pass the message before it"
            )
        if all(task.is_send for task in cycle) and all(task.rank in mispaired for task in cycle):
            return "their receives are of other ranks or tags than the messages: make both sides agree"
        if all(task.is_send for task in cycle):
            return "let one of them receive before it sends, or start the sends with isend"
        if any(task.rank in mispaired for task in cycle):
            return "a receive is of another rank or tag than the message that has come: make both sides agree"
        return "let one of them send before it waits"
    if len({task.group for task in cycle}) == 1:
        return (
            f"{listed(task.rank for task in cycle)} are in different groups, though of the same ranks: make the same "
            "groups in the same order on every rank"
        )
    return "they are in collectives of different groups: use the groups in the same order on every rank"


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
    flight = _flight_of(work, world.flight_recorders[task.rank])
    is_collective = flight is not None and flight.sequence > 0
    return Waiting(
        rank=task.rank,
        peers=work.awaited(),
        doing=_doing(work, world.flight_recorders[task.rank]),
        place=_line_of_lane(world, task, work) if task.number else _line_of_main(task, flight),
        is_beside=task.number > 0,
        is_send=isinstance(work.description, Activity) and work.description.doing == SEND,
        is_collective=work.awaited() == (task.rank,) or bool(work.operation),
        of_store=isinstance(work, StoreWait),
        group=flight.group if flight is not None and is_collective else "",
        context=flight.context if flight is not None and is_collective else 0,
        in_schedule=_is_in_schedule(task.thread.ident),
    )


def _is_in_schedule(ident: int | None) -> bool:
    frames = outwards(None if ident is None else sys._current_frames().get(ident))
    return any(frame.f_code.co_filename.endswith(_PIPELINING) for frame in frames)


def _line_of_lane(world: World, task: Task, work: VirtualWork[object]) -> str:
    """Returns the line that started the operation of a lane. That of the operation in the lane, if it has no record."""
    flight = _flight_of(work, world.flight_recorders[task.rank])
    return source_of(task.origin if flight is None else flight.place)


def _line_of_main(task: Task, flight: OperationRecord | None) -> str:
    """Returns the line at which a rank's program waits, with the caller if the operation was called there."""
    place = place_of_thread(task.thread.ident)
    return source_of(place) + (flight.called_from() if flight is not None and flight.place == place else "")


def _flight_of(work: VirtualWork[object], recorder: FlightRecorder) -> OperationRecord | None:
    activity = work.description
    if work.flight is not None or not isinstance(activity, Activity):
        return work.flight
    return recorder.find(activity.tag.context, activity.tag.sequence)


def _doing(work: VirtualWork[object], recorder: FlightRecorder) -> str:
    activity = work.description
    if not isinstance(activity, Activity):
        return str(activity)
    if activity.tag.sequence >= TRANSFERS:
        return str(activity)
    flight = _flight_of(work, recorder)
    group = "" if flight is None or flight.shown_group == "world" else f", of group {flight.shown_group!r}"
    purpose = None if flight is None else flight.purpose
    return str(purpose or readable(work.operation) or activity) + group


def _last_call(recorder: FlightRecorder) -> str:
    """Returns a rank's last call and its line. Empty if it made no call."""
    last = recorder.last_call()
    return "" if last is None else f"{last.call} at {line_of(last.place)}"


def _unclaimed(world: World, in_receive: Collection[int]) -> Iterator[str]:
    """Yields a line for each message without a receive. The lines of ranks `in_receive` name their receives already."""
    for rank, mailbox in enumerate(world.mailboxes):
        posted = [] if rank in in_receive else _posted(world, rank)
        receives = [f"one from {_whom(peer)}, {_name_of(tag)}" for peer, tag in posted[:_MOST_RECEIVES]]
        other = f", but waits for {' and '.join(receives)}" if receives else ""
        for src, tag in mailbox.unclaimed:
            if is_plain(tag):
                yield f"rank {rank} has not received a message from rank {src}, {_name_of(tag)}{other}"


def _mispaired(world: World) -> set[int]:
    """Returns the ranks that have both messages which they do not receive, and receives without a message."""
    ranks = range(len(world.mailboxes))
    return {
        rank
        for rank in ranks
        if _posted(world, rank) and any(is_plain(tag) for _, tag in world.mailboxes[rank].unclaimed)
    }


def _posted(world: World, rank: int) -> list[tuple[int, Tag]]:
    """Returns source and tag of the receives that a rank has begun."""
    return [(src, tag) for (src, tag), receives in world.mailboxes[rank].posted.items() if receives and is_plain(tag)]


def _whom(peer: int) -> str:
    return "any rank" if peer == ANY else f"rank {peer}"


def _name_of(tag: Tag) -> str:
    return str(tag) if tag.sequence >= TRANSFERS else f"tag {tag.step}"
