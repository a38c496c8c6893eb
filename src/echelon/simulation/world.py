"""World of a simulation: clock, network, faults, mailboxes and record, shared by all ranks."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch

from echelon.backends.formats.wire import TRANSFERS, Tag, as_sent, readable
from echelon.backends.matching import Mailbox
from echelon.backends.memory import as_bytes, describe, without_class
from echelon.backends.modes import normal_mode
from echelon.backends.status import Question, Status, status_of
from echelon.backends.work import Work
from echelon.call_site import Place, calling_place, line_of, source_of
from echelon.errors import CollectiveMismatch, PeerFailed, UnsupportedOp
from echelon.operation_records import FlightRecorder
from echelon.purposes import SAME_ARGUMENTS
from echelon.replacements import Replacement
from echelon.simulation.called_lines import CalledLines
from echelon.simulation.costs import Meter, StepCost
from echelon.simulation.faults import FaultPlan, Kill
from echelon.simulation.meeting import AwaitedReceive, GroupMeetings, MeetingMailbox
from echelon.simulation.memory import MemoryMeter, resizes_counted
from echelon.simulation.network import Network, Traffic, link_function
from echelon.simulation.prices import Prices
from echelon.simulation.process.state import RankStates
from echelon.simulation.record import Event, Recorder
from echelon.simulation.scheduler import Scheduler, Task
from echelon.simulation.values import Inputs


def is_plain(tag: Tag) -> bool:
    """Whether a message is no part of a collective."""
    return tag.sequence == 0 or tag.sequence >= TRANSFERS


@dataclass(slots=True, eq=False)
class _Arrival:
    """Event: a message arrives."""

    world: World
    src: int
    dst: int
    tensor: torch.Tensor
    tag: Tag
    note: str

    def __call__(self) -> None:
        self.world.arrive(self.src, self.dst, self.tensor, self.tag, self.note)


@dataclass(slots=True, eq=False)
class _Departure:
    """Event: a send is done. Checks that its tensor has not changed, which it may from now on."""

    world: World
    task: Task
    place: Place | None
    dst: int
    tag: Tag
    note: str
    original: torch.Tensor
    sent: torch.Tensor
    complete: Callable[[], None]

    def __call__(self) -> None:
        self.check()
        self.complete()

    def check(self) -> None:
        """Ends the simulation if the tensor has changed since its send, unless that send was given up."""
        if have_equal_bits(self.original, self.sent):
            return
        # A killed rank, or a group that has failed, waits for its sends no longer.
        src = self.task.rank
        if src not in self.world.killed and self.world.mailboxes[src].failures.of(self.dst, self.tag) is None:
            what = readable(self.note) or describe(self.sent.shape, self.sent.dtype)
            self.world.fail_overwritten(self.task, self.place, self.dst, what)


class World:
    """One simulated world. Its methods are called by the running task, and none of them blocks."""

    def __init__(
        self,
        hosts: tuple[int, ...],
        *,
        seed: int = 0,
        link: Callable[[int, int], Network] | None = None,
        faults: FaultPlan | None = None,
        cost: StepCost | None = None,
        meter: Meter | None = None,
        measures_memory: bool = False,
        late_sends: bool = False,
        is_instant: bool = True,
        follows_plans: bool = False,
    ) -> None:
        """Makes a world at time 0.

        Args:
            hosts: number of each rank's host.
            seed: seed of the order of events at the same time.
            link: network between two ranks. None: messages take no time.
            faults: faults. None: there are none.
            cost: cost of a rank's step. None: steps take no time.
            meter: meter of the time that steps take here. None: it is not measured.
            measures_memory: whether the memory of each rank's tensors is counted.
            late_sends: whether a send is done only after all that can happen at the time of its arrival.
            is_instant: whether messages take no time.
            follows_plans: whether reductions combine values in the order of their plan, not of the ranks.
        """
        world_size = len(hosts)
        link = link or link_function(None, world_size)
        faults = faults or FaultPlan((), world_size, has_costs=False)
        # The one source of order between events at the same time: one seed gives one run.
        self.scheduler = Scheduler(random.Random(seed).random)
        self.clock = self.scheduler.clock
        self.faults = faults
        self.cost = cost
        self.meter = meter
        self.hosts = hosts
        """Number of each rank's host."""
        self.late_sends = late_sends
        """Whether a send is done only after all that can happen at the time of its arrival."""
        self.traffic = Traffic(self.scheduler, world_size, link, faults)
        self.recorder = Recorder(world_size)
        self.rank_states = RankStates((), world_size)
        """States of the process that each rank has for itself."""
        self.mailboxes = [MeetingMailbox() for _ in range(world_size)]
        self.prices = Prices(self.traffic)
        self.inputs: dict[tuple[int, tuple[int, ...], int], Inputs] = {}
        """Values of the reductions under way, by context, ranks and sequence."""
        self.rendezvous: set[int] = set()
        """Contexts of the groups whose sends wait for their receives: those of torch.distributed."""
        self._is_instant = is_instant
        self._follows_plans = follows_plans
        self._meetings: dict[tuple[int, tuple[int, ...]], GroupMeetings] = {}
        self.lines: dict[tuple[int, tuple[int, ...]], CalledLines] = {}
        """Lines of the calls of each group, by context and ranks."""
        self.memory_meters = [MemoryMeter() for _ in range(world_size)] if measures_memory else []
        self.flight_recorders: dict[int, FlightRecorder] = {}
        self.returned: set[int] = set()
        """Ranks whose function has returned."""
        self.killed: set[int] = set()
        self.num_messages = [0] * world_size
        """Sends and receives that each rank has called, those of collectives included."""
        by_op = ((kill.at_op, kill) for kill in faults.kills if kill.at_op is not None)
        self.deaths_by_op = {kill.rank: kill for _, kill in sorted(by_op, key=itemgetter(0), reverse=True)}
        """First kill by number of message of each rank that has one."""
        self._told_of: set[int] = set()
        self.overwritten: UnsupportedOp | None = None
        """Error for the first tensor that was changed during its send. None if there is none."""
        # Only with pauses: it is asked at every turn.
        if faults.pauses:
            self.scheduler.available_at = faults.available_at
        for kill in faults.kills:
            if kill.at is not None:
                self.clock.at(kill.at, partial(self.kill, kill))

    def send_tensor(
        self, src: int, dst: int, tensor: torch.Tensor, tag: Tag, note: str, complete: Callable[[], None]
    ) -> None:
        """Sends a copy of a tensor, and calls `complete` when the send is done, which may be at once.

        A real network reads the tensor itself until then. So tensor and copy are compared at that time.
        """
        original, tensor = tensor, self._copy(src, tensor)
        num_bytes, recorder = tensor.nbytes, self.recorder
        times = self.traffic.send(src, dst, num_bytes)
        recorder.bytes_sent[src, dst] += num_bytes
        recorder.events.append((self.clock.now, src, "sends to rank", num_bytes, dst, tag, note))
        if times.arrives < math.inf:
            # A collective is a span itself; only messages between two ranks are drawn as transfers.
            if is_plain(tag):
                recorder.sent(src, dst, tag, times.left, times.arrives)
            self.clock.at(times.arrives, _Arrival(self, src, dst, tensor, tag, note), times.draw)
        if times.done <= self.clock.now and not self.late_sends:
            complete()
        # Not compared with memory meters, because the event keeps the tensor alive, so it would count for longer.
        elif self.memory_meters:
            self.clock.at(times.done, complete)
        else:
            copy = tensor.clone()  # the receiver may change the sent copy as soon as it has arrived
            # All other draws are below 1: a late send comes after every event and turn of its instant.
            draw = self.clock.draw() + self.late_sends
            sender, place = self.scheduler.current(), calling_place(2)
            done = _Departure(self, sender, place, dst, tag, note, original.detach(), copy, complete)
            self.clock.at(times.done, done, draw)

    def end_of_send(self, src: int, dst: int, tag: Tag, work: Work[None]) -> Callable[[], None]:
        """Returns the function to call when the transfer of a send is done: it ends the Work, at once or later.

        A send of torch.distributed also waits until a receive takes its message.
        """
        if tag.context not in self.rendezvous or tag.sequence:
            return work.complete
        send = AwaitedReceive(dst, work)
        self.mailboxes[src].add_own_send(send)
        self.mailboxes[dst].awaiting.setdefault((src, tag), deque()).append(send)
        work.on_completion(self.clock.wake_pollers)
        return send.advance

    def memory_meter(self, rank: int) -> AbstractContextManager[object]:
        """Inside, the memory of new tensors of a rank is counted, if the simulation has `memory=True`."""
        return self.memory_meters[rank] if self.memory_meters else nullcontext()

    def resizes_counted(self) -> list[Replacement]:
        """Lets storages that ranks resize count with their new size, if the simulation has `memory=True`."""
        return resizes_counted(self._memory_meter_here) if self.memory_meters else []

    def _memory_meter_here(self) -> MemoryMeter | None:
        rank = self.scheduler.rank_here()
        return None if rank is None else self.memory_meters[rank]

    @contextmanager
    def uncounted_memory(self, rank: int) -> Iterator[None]:
        """Inside, new tensors count as no rank's memory. Called in a thread of `rank`."""
        if not self.memory_meters:
            yield
            return
        meter = self.memory_meters[rank]
        before, meter.is_paused = meter.is_paused, True
        try:
            yield
        finally:
            meter.is_paused = before

    def count_memory(self, rank: int, tensor: torch.Tensor | None) -> None:
        """Counts a tensor that was made inside of `uncounted_memory`, if the simulation has `memory=True`."""
        if self.memory_meters and tensor is not None:
            self.memory_meters[rank].count(tensor)

    def meetings(self, context: int, ranks: tuple[int, ...]) -> GroupMeetings:
        """Returns the meetings of a group's collectives."""
        # With the ranks, because disjoint groups may have one context.
        found = self._meetings.get((context, ranks))
        if found is None:
            found = self._meetings[context, ranks] = GroupMeetings(
                *(ranks, context, self.clock, self.traffic, self.prices, self._is_instant, self._follows_plans),
                self.rendezvous,
            )
        return found

    def lines_of(self, context: int, ranks: tuple[int, ...]) -> CalledLines:
        """Returns the lines at which the ranks of a group call its collectives."""
        found = self.lines.get((context, ranks))
        if found is None:
            found = self.lines[context, ranks] = CalledLines(ranks)
        return found

    def _copy(self, src: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a sent tensor, for the receiver. Its memory does not count as the sender's."""
        # In normal mode: torch refuses to change a tensor of inference mode outside of it, where the receiver may be.
        if not self.memory_meters:
            with normal_mode():
                return without_class(tensor.detach().clone() if tensor.requires_grad else tensor.clone())
        with self.uncounted_memory(src), normal_mode():
            return without_class(tensor.detach().clone())

    def arrive(self, src: int, dst: int, tensor: torch.Tensor, tag: Tag, note: str) -> None:
        """Delivers a message to the mailbox of its receiver."""
        self.recorder.events.append((self.clock.now, dst, "gets from rank", tensor.nbytes, src, tag, note))
        # From its arrival a message takes the receiver's memory, received or not.
        if self.memory_meters:
            self.memory_meters[dst].count(tensor)
        self.mailboxes[dst].take(src, tag, tensor, as_sent(note))

    def tell(self, src: int, dst: int, news: Callable[[Mailbox], object]) -> None:
        """Sends news to a rank: calls `news` with its mailbox once all earlier messages from `src` have arrived."""
        # As a message of 0 bytes, so that news never overtakes data that was sent before.
        times = self.traffic.send(src, dst, 0, is_news=True)
        if times.arrives < math.inf:
            self.clock.at(times.arrives, partial(news, self.mailboxes[dst]), times.draw)

    def answers(self, ranks: Iterable[int], question: Question) -> dict[int, Status]:
        """Returns the status of ranks, for another rank's question. Killed ranks give none. Takes no virtual time."""
        return {
            rank: status_of(self.flight_recorders[rank], question)
            for rank in ranks
            if rank in self.flight_recorders and rank not in self.killed
        }

    def kill(self, fault: Kill) -> bool:
        """Ends a rank, and sends PeerFailed to all others. False, without effect, if it was killed or has returned."""
        rank = fault.rank
        if rank in self.killed or rank in self.returned:
            return False
        self.killed.add(rank)
        self.faults.happened.add(fault)
        self.note(rank, "is killed")
        self.scheduler.cancel(rank)
        failure = PeerFailed(rank, f"killed at {self.clock.now:g} s by a fault of the simulation")
        for peer in range(len(self.mailboxes)):
            if peer != rank:
                self.tell(rank, peer, partial(_fail_peer, rank, failure))
        return True

    def tell_of_returned(self) -> bool:
        """Sends PeerFailed for each rank that has returned since the last call. True if there was one."""
        news = sorted(self.returned - self._told_of)
        self._told_of.update(news)
        for rank in news:
            failure = PeerFailed(rank, "its function has returned, after a fault")
            for peer in range(len(self.mailboxes)):
                if peer != rank:
                    self.tell(rank, peer, partial(_fail_peer, rank, failure))
        return bool(news)

    def missed(self) -> CollectiveMismatch | None:
        """Returns the error for a collective in which a rank took no part, or for a message that was never received.

        None if there is none. Called at the end, for calls that no other rank had to wait for.
        """
        # After a failure that the program has handled, messages are left over legally: neither faults nor failed
        # mailboxes or contexts are examined.
        if self.faults.faults:
            return None
        unreceived = self._unreceived()
        if not any(mailbox.failures.has_any for mailbox in self.mailboxes):
            for dst, src, tag in unreceived:
                # Messages of a backend without a group are the program's own affair.
                if tag.sequence == 0 and tag.context:
                    place = self._place_of_send(src, dst, tag)
                    return CollectiveMismatch(
                        f"rank {dst} has returned without having received a message from rank {src}, tag {tag.step}"
                        f"{place and f', sent at {place}'}: receive it there, or do not send it"
                    )
        for dst, src, tag in unreceived:
            if not is_plain(tag) and not any(mailbox.failures.of(src, tag) for mailbox in self.mailboxes):
                # The name of the collective is in the trace, which has the note of each message.
                events = (Event(*event) for event in self.recorder.events)  # type: ignore[arg-type]
                note = next((event.note for event in events if event.rank == src and event.tag == tag), "")
                return self._absence(dst, src, tag, note)
        for meetings in self._meetings.values():
            for absent, caller, tag, note in meetings.left_out():
                if not any(mailbox.failures.of(caller, tag) for mailbox in self.mailboxes):
                    return self._absence(absent, caller, tag, note)
        return None

    def _absence(self, absent: int, caller: int, tag: Tag, note: str) -> CollectiveMismatch:
        flight = self.flight_recorders[caller].find(tag.context, tag.sequence)
        place = "" if flight is None else f" at {line_of(flight.place)}"
        return CollectiveMismatch(
            f"rank {absent} has returned without {readable(note) or 'a collective'}, which rank {caller} called"
            f"{place}: {SAME_ARGUMENTS}"
        )

    def _place_of_send(self, src: int, dst: int, tag: Tag) -> str:
        """Returns the line of the last message from a rank to another with a tag. Empty if it is not known."""
        words = f"send to rank {dst}, tag {tag.step} "
        records = reversed(self.flight_recorders[src].records())
        return next((record.place for record in records if record.operation.startswith(words)), "")

    def _unreceived(self) -> list[tuple[int, int, Tag]]:
        """Returns receiver, sender and tag of all messages that were not received, in flight or not, sorted."""
        arrived = [(dst, src, tag) for dst, mailbox in enumerate(self.mailboxes) for src, tag in mailbox.unclaimed]
        in_flight = [action for action in self.clock.actions() if isinstance(action, _Arrival)]
        # Sorted, so that the same seed gives the same error.
        return sorted([*arrived, *((action.dst, action.src, action.tag) for action in in_flight)])

    def check_sends(self) -> UnsupportedOp | None:
        """Checks all sends in flight. Ends the simulation, and returns its error, if a tensor of any was changed."""
        for action in self.clock.actions():
            if isinstance(action, _Departure):
                action.check()
        return self.overwritten

    def fail_overwritten(self, sender: Task, place: Place | None, dst: int, what: str) -> None:
        """Ends the simulation with the error for a tensor that was changed during its send. The first one counts."""
        # A lane has no line of the program but the one that began it.
        line = source_of(place) or source_of(sender.origin)
        self._fail_changed(
            f"rank {sender.rank} changed a tensor before its send to rank {dst} was done, at "
            f"{self.clock.now:g} s in {what}{line and f', sent at {line}'}: wait for the Work of the send first"
        )

    def fail_changed(self, rank: int, what: str) -> None:
        """Ends the simulation with the error for a tensor that was changed before its collective began."""
        self._fail_changed(
            f"rank {rank} changed a tensor before {what} had begun: wait for its Work before you change the tensor or "
            "pass it to another call"
        )

    def _fail_changed(self, text: str) -> None:
        if self.overwritten is None:
            self.overwritten = UnsupportedOp(text)
            self.scheduler.fail(self.overwritten)

    def fault_notes(self) -> tuple[str, ...]:
        """Returns a sentence for each fault that had no effect."""
        return self.faults.notes(self.num_messages, self.killed)

    def bytes_sent(self) -> dict[tuple[int, int], int]:
        """Returns the bytes of all messages, by (sender, receiver), sorted."""
        sent = self.recorder.bytes_sent.copy()
        sent.update(self.prices.bytes_sent())
        return dict(sorted(sent.items()))

    def forget(self) -> None:
        """Drops all tensors of collectives, and the reference cycles, after the end of the simulation."""
        self.inputs.clear()
        self._meetings.clear()
        self.flight_recorders.clear()  # their clock refers to this world

    def note(self, rank: int, what: str) -> None:
        """Adds a line to the trace."""
        self.recorder.events.append((self.clock.now, rank, what))


# By bits, because NaN equals nothing.
def have_equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same bytes."""
    return torch.equal(as_bytes(one), as_bytes(other))


def _fail_peer(rank: int, failure: PeerFailed, mailbox: Mailbox) -> None:
    mailbox.fail_peer(rank, failure)
