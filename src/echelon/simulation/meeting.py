"""Meetings of ranks in collectives that are played whole, each as one event with the cost of its plan.

Strategy. Each rank joins the meeting of its collective and waits. A rank that comes plays the plan for all that have
come. So every rank that waits for none of the others any more learns its end, and an event wakes it then. The rank
whose coming completes the values computes them. The part of a rank ends early if the rank is killed, if a rank that it
needs fails, or with the group.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.backends.collective import Collective
from echelon.backends.formats.wire import Tag
from echelon.backends.matching import Key, Mailbox
from echelon.backends.memory import plain
from echelon.backends.work import Work
from echelon.collectives.plans.plan import Plan
from echelon.errors import EchelonError, Failure, PeerFailed
from echelon.operation_records import OperationRecord
from echelon.simulation.network import Traffic
from echelon.simulation.playback import Framing, Times, Waves
from echelon.simulation.prices import FRAMING, Prices, sizes_of
from echelon.simulation.scheduler import Clock
from echelon.simulation.values import Calls, Take, of_one_class, result_of, snapshot

TO_ROOT = frozenset({"reduce", "gather"})
"""Collectives in which the other ranks need not wait for the root, except in torch.distributed programs."""
FROM_ROOT = frozenset({"broadcast", "broadcast_rows", "scatter"})
"""Collectives in which the root need not wait for the others, except in torch.distributed programs."""


class Part:
    """Part of one rank in a meeting, from its coming to its end."""

    __slots__ = ("arrival", "collective", "free", "has_end", "meeting", "out", "rank", "tensor", "work")

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        collective: Collective,
        tensor: Tensor | None,
        out: Tensor | None,
        arrival: float,
        free: float,
    ) -> None:
        self.meeting = meeting
        self.rank = rank
        """Rank in the group."""
        self.collective = collective
        self.tensor = tensor
        """Contiguous values. None if the rank has none, or they are nobody's business."""
        self.out = out
        self.arrival = arrival
        self.free = free
        """Time at which the rank's earlier messages have left."""
        self.has_end = False
        """Whether the time of its end is known."""
        self.work: Work[None]

    def fails_with(self, peer: int) -> bool:
        """Whether the failure of a rank of the world prevents the end of this part."""
        return self.meeting.needs(self.rank, peer)


class Meeting:
    """One collective of one group."""

    def __init__(self, group: GroupMeetings, note: str, first: int, kind: str, root: int, plan: Plan) -> None:
        self.note = note
        """Text that ranks compare."""
        self.first = first
        """Rank of the world that came first."""
        self._group = group
        self._kind = kind
        self._root = root
        self._plan = plan
        self._parts: list[Part | None] = [None] * len(group.ranks)
        self._present = 0
        """Ranks that have come, as a set of bits."""
        # Bits of one number, so that sets of many ranks are compared at once.
        self._all = (1 << len(group.ranks)) - 1
        self._num_open = len(group.ranks)
        """Number of ranks whose end is not known."""
        self._num_joined = 0
        self._times: Times | None = None
        self._take: Take | None = None
        self._framing = FRAMING.get(kind, Framing.ROWS)
        self._all_need_all = kind not in TO_ROOT and kind not in FROM_ROOT

    @property
    def is_over(self) -> bool:
        """Whether the ends of all ranks are known."""
        return self._num_open == 0

    def join(self, rank: int, collective: Collective, tensor: Tensor | None, out: Tensor | None) -> Part:
        """Begins the part of a rank of the group."""
        if tensor is not None:
            ends_alone = rank == self._root if self._kind in FROM_ROOT else self._kind in TO_ROOT and rank != self._root
            # A rank that need not wait may change its tensor before the others have read it.
            tensor = snapshot(tensor) if ends_alone else plain(tensor)
        free = self._group.traffic.free_at(self._group.ranks[rank])
        part = self._parts[rank] = Part(self, rank, collective, tensor, out, self._group.clock.now, free)
        self._present |= 1 << rank
        self._num_joined += 1
        return part

    def play(self) -> None:
        """Schedules the ends of all ranks that wait for no other any more."""
        if self._all_need_all and self._present != self._all:
            return
        ready = [part for part in self._parts if part and not part.has_end and not self._lacks(part.rank)]
        if not ready:
            return
        if self._take is None and (self._kind not in TO_ROOT or any(part.rank == self._root for part in ready)):
            try:
                self._take = result_of(self._calls())
            except Exception as error:
                self._blame(error)
                return
            for part in filter(None, self._parts):
                part.tensor = part.out = None  # kept no longer than needed
        self._num_open -= len(ready)
        now = self._group.clock.now
        ends = self._ends(ready)
        by_end: defaultdict[float, list[Part]] = defaultdict(list)
        for part, end in zip(ready, ends, strict=True):
            part.has_end = True
            by_end[end].append(part)
        for end, parts in by_end.items():
            if end <= now:
                _complete(parts)
            else:
                self._group.clock.at(end, partial(_complete, parts))

    def _blame(self, error: Exception) -> None:
        """Fails the rank whose tensor is of a class of its own, which may compute otherwise. Raises if there is none.

        The other ranks hear of it as the group is revoked.
        """
        odd = (part for part in self._parts if part and type(part.tensor) not in (torch.Tensor, type(None)))
        culprit = next(odd, None)
        if culprit is None:
            raise error
        culprit.work.complete(error=error)

    def _lacks(self, rank: int) -> int:
        """Returns the ranks that a rank of the group still waits for, as a set of bits."""
        needed = self._all if self._all_need_all else self._waves.needs[rank]
        if self._group.waits_for_neighbours and not self._all_need_all:
            needed |= sum(1 << index for index in self._waves.neighbours[rank])
        return needed & ~self._present

    @property
    def _waves(self) -> Waves:
        return self._group.prices.waves(self._plan, self._framing)

    def _calls(self) -> Calls:
        plan = self._plan if self._group.follows_plans else None
        return Calls(
            self._collectives(),
            of_one_class([None if part is None else part.tensor for part in self._parts]),
            [None if part is None else part.out for part in self._parts],
            plan,
        )

    def _collectives(self) -> list[Collective | None]:
        return [None if part is None else part.collective for part in self._parts]

    def _ends(self, ready: Sequence[Part]) -> list[float]:
        group, now = self._group, self._group.clock.now
        # Without time a price is asked for once, for the bytes that were sent.
        if group.is_instant and not self.is_over:
            return [now] * len(ready)
        sizes = sizes_of(self._collectives(), self._plan)
        price = group.prices.of(self._plan, self._framing, group.ranks, sizes)
        if self.is_over:
            price.times_played += 1
        if group.is_instant:
            return [now] * len(ready)
        arrivals = [part.arrival if part else math.inf for part in self._parts]
        free = [part.free if part else 0.0 for part in self._parts]
        if self._all_need_all:
            # What a rank has sent since it came delays its messages as well, unless it has left by now.
            busy = [group.traffic.free_at(rank) for rank in group.ranks]
            free = [max(mine, other) if other > now else mine for mine, other in zip(free, busy, strict=True)]
        earlier, self._times = self._times, price.play(arrivals, free)
        for part in ready:
            price.use(self._times, part.rank)
        price.hold_up(self._times, earlier)
        # Rounding apart, no end lies before now: the rank that came last is needed by all that are ready.
        return [max(now, float(self._times.ends[part.rank])) for part in ready]

    def take(self, part: Part, tensor: Tensor | None, out: Tensor | None, call: OperationRecord) -> Any:
        """Returns the result of a rank whose end has come."""
        if self._kind in TO_ROOT and part.rank != self._root:
            return tensor if self._kind == "reduce" else None
        assert self._take is not None, "a part ends after its values are known"
        return self._take(part.rank, tensor, out, call)

    def give_up(self, part: Part) -> None:
        """Takes back the part of a rank that has failed."""
        self._parts[part.rank] = None
        self._present &= ~(1 << part.rank)
        self.leave()

    def leave(self) -> None:
        """Ends the part of a rank."""
        self._num_joined -= 1
        # Breaks the cycle of meeting and parts, so that the values go at once.
        if self._num_joined == 0 and self.is_over:
            self._parts = [None] * len(self._parts)
            self._take = None

    def needs(self, rank: int, peer: int) -> bool:
        """Whether a rank of the group cannot end if a rank of the world has failed."""
        index = self._busy(peer)
        if index is None or self._all_need_all:
            return index is not None
        is_neighbour = self._group.waits_for_neighbours and index in self._waves.neighbours[rank]
        return is_neighbour or bool(self._waves.needs[rank] >> index & 1)

    def sends_to(self, rank: int, peer: int) -> bool:
        """Whether a rank of the group exchanges messages with a rank of the world, which has not ended its part."""
        index = self._busy(peer)
        return index is not None and (self._all_need_all or index in self._waves.neighbours[rank])

    def _busy(self, peer: int) -> int | None:
        """Returns a rank's number in the group. None if it is not in the group, or has ended its part."""
        index = self._group.index.get(peer)
        part = None if index is None else self._parts[index]
        return None if part is not None and part.work.has_ended else index

    def awaited_by(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of the world that have not come, for which a rank of the group waits."""
        lacks = self._lacks(rank)
        return tuple(peer for index, peer in enumerate(self._group.ranks) if lacks >> index & 1)

    def absent(self) -> list[int]:
        """Returns the ranks of the world that have not come."""
        return [peer for peer, part in zip(self._group.ranks, self._parts, strict=True) if part is None]


def _complete(parts: Sequence[Part]) -> None:
    for part in parts:
        if not part.work.has_ended:
            part.work.complete()


class LeftOut(NamedTuple):
    """Collective that a rank has not called, though no rank waits for it any more."""

    absent: int
    caller: int
    """Rank that has called it."""
    tag: Tag
    note: str


class GroupMeetings:
    """Meetings of one group."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        context: int,
        clock: Clock,
        traffic: Traffic,
        prices: Prices,
        is_instant: bool,
        follows_plans: bool,
        rendezvous: Set[int] = frozenset(),
    ) -> None:
        self.ranks = ranks
        """Ranks of the world."""
        self.index = {rank: index for index, rank in enumerate(ranks)}
        self.clock = clock
        self.traffic = traffic
        self.prices = prices
        self.is_instant = is_instant
        """Whether messages take no time."""
        self.follows_plans = follows_plans
        """Whether values are combined in the order of the plan, not of the ranks."""
        self._context = context
        self._rendezvous = rendezvous
        self._meetings: dict[int, Meeting] = {}

    @property
    def waits_for_neighbours(self) -> bool:
        """Whether senders in a collective wait until the ranks that receive from them come, as over Gloo."""
        return self._context in self._rendezvous

    def meeting(self, sequence: int, make: Callable[[GroupMeetings], Meeting]) -> Meeting:
        """Returns the meeting of a collective. The first rank that comes makes it."""
        found = self._meetings.get(sequence)
        if found is None:
            found = self._meetings[sequence] = make(self)
        return found

    def end(self, sequence: int) -> None:
        """Forgets a meeting whose ends are all known."""
        self._meetings.pop(sequence, None)

    def left_out(self) -> Iterator[LeftOut]:
        """Yields the collectives that a rank has not called."""
        for sequence, meeting in sorted(self._meetings.items()):
            absent = meeting.absent()
            if len(absent) < len(self.ranks) and absent:
                yield LeftOut(absent[0], meeting.first, Tag(self._context, sequence), meeting.note)


class AwaitedReceive:
    """Send that ends once its transfer is done and a receive has taken its message, as over Gloo and NCCL."""

    def __init__(self, dst: int, work: Work[None]) -> None:
        self.dst = dst
        self.work = work
        self._remaining = 2

    def advance(self) -> None:
        """Records one of both. The second one ends the send."""
        self._remaining -= 1
        if not self._remaining:
            self.work.complete()


class MeetingMailbox(Mailbox):
    """Mailbox of a simulated rank, which also ends its parts in meetings when a peer or a group fails."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[Part, int] = {}
        """Parts whose end has not come, each with the context of its group."""
        self.awaiting: dict[Key, deque[AwaitedReceive]] = {}
        """Sends of other ranks that wait for a receive here, in order, by source and tag."""
        self.own_sends: list[AwaitedReceive] = []
        """Sends of this rank that wait for a receive."""

    def count_claimed(self, src: int, tag: Tag) -> None:  # noqa: D102
        super().count_claimed(src, tag)
        # Messages of one source and tag are taken in the order of their sends.
        if queue := self.awaiting.get((src, tag)):
            queue.popleft().advance()

    def add_own_send(self, send: AwaitedReceive) -> None:
        """Adds a send of this rank, which ends with an error if its receiver fails."""
        self.own_sends = [each for each in self.own_sends if not each.work.has_ended]
        self.own_sends.append(send)

    def failure_of(self, part: Part, context: int) -> Failure | None:
        """Returns the failure that prevents the end of a part, as far as this rank knows by now."""
        failures = self.failures
        if error := failures.contexts.get(context):
            return error
        for peer, failure in failures.peers.items():
            if part.fails_with(peer) or part.meeting.sends_to(part.rank, peer):
                return failure
        return None

    def fail_peer(self, rank: int, error: PeerFailed) -> PeerFailed:  # noqa: D102
        first = super().fail_peer(rank, error)
        self._end_sends(first, lambda send: send.dst == rank)
        self._end_parts(first, lambda part, _: part.fails_with(rank))
        return first

    def fail_context(self, context: int, error: Failure, *arriving: Any) -> Failure:  # noqa: D102
        first = super().fail_context(context, error, *arriving)
        self._end_parts(first, lambda _, own: own == context)
        return first

    def fail_all(self, error: EchelonError) -> None:  # noqa: D102
        super().fail_all(error)
        self._end_sends(error, lambda _: True)
        self._end_parts(error, lambda *_: True)

    def _end_sends(self, error: EchelonError, concerns: Callable[[AwaitedReceive], bool]) -> None:
        for send in self.own_sends:
            if concerns(send):
                send.work.complete(error=error)

    def _end_parts(self, error: EchelonError, concerns: Callable[[Part, int], bool]) -> None:
        for part, context in list(self.parts.items()):
            if not part.work.has_ended and concerns(part, context):
                part.work.complete(error=error)
