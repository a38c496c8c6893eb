"""Recorded steps played on ranks that compute on the processors of their hosts, and share them. Pure.

Strategy. A host computes its kernels itself, in order. Communication goes on beside it, in one queue for each group,
and takes a processor of each member as well, unless it goes to another host. While more of these compute on a host than
it has processors, all of them are slowed down alike (processor sharing). Communication is also slowed down where its
links are too full; the slower of both rates counts. Time advances from one event to the next: the end of kernels or of
communication.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from echelon.foresight.play.counterparts import deadlock, waiting_text
from echelon.foresight.play.gatherings import Gatherings
from echelon.foresight.play.job import Job, Price
from echelon.foresight.play.links import Link
from echelon.foresight.play.played import CommunicationSpan, Played, PlayedRole, RunSpan
from echelon.foresight.play.program import Await, HostAwait, Mark, Post, Program, Run
from echelon.foresight.trace import DEFAULT_STREAM, Trace

_EPSILON = 1e-15
"""Seconds of remaining work below which work counts as done, because of rounding."""


def play_on_processors(job: Job) -> Played:
    """Plays one step of all ranks; see `echelon.foresight.play.player.play`.

    Raises:
        DeadlockError: ranks wait for each other for ever. It names them with their lines.
    """
    player = _Player(job)
    player.run()
    return job.played({rank: role.result() for rank, role in player.roles.items()})


@dataclass(eq=False)
class _Communication:
    """A collective or message, from the arrival of its first member on."""

    missing: set[int]
    price: Price
    """If it is local, processors of the host move the bytes."""
    members: list[tuple[_Role, _Posted, int]] = field(default_factory=list)
    """(role, its call, the call's part)."""
    shares: list[tuple[Link, float]] = field(default_factory=list)
    begun: float = -1.0
    remaining: float = 0.0


@dataclass
class _Posted:
    """Call of communication that is in a queue."""

    post: Post
    ready: float
    left: int
    """Parts that have not ended."""


@dataclass
class _Role:
    """State of one role."""

    rank: int
    program: Program
    at: int = 0
    host: float = 0.0
    remaining: float = 0.0
    """Work left of the kernels that the host computes. 0 if it computes none."""
    computes: Run | None = None
    awaits: set[int] = field(default_factory=set)
    """Entries of communication that the host waits for."""
    waits_since: float = 0.0
    held: dict[int, frozenset[int]] = field(default_factory=dict)
    """Entries of communication that a stream beside the default one waits for. It holds up no other stream."""
    events: dict[int, frozenset[int]] = field(default_factory=dict)
    """Entries of communication that an event waits for, by the operation that recorded it."""
    queues: dict[tuple[str, int], deque[_Posted]] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    """Times at which all members of ended communication had arrived, by its entry."""
    seconds: float = 0.0
    hosts: list[float] = field(default_factory=list)
    runs: list[RunSpan] = field(default_factory=list)
    spans: list[CommunicationSpan] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)

    @property
    def trace(self) -> Trace:
        return self.program.trace

    @property
    def is_done(self) -> bool:
        return self.at >= len(self.program.operations) and not any(self.queues.values())

    def result(self) -> PlayedRole:
        """Returns the step, after its end."""
        return PlayedRole(
            program=self.program,
            seconds=self.seconds,
            runs=tuple(self.runs),
            communication=tuple(sorted(self.spans, key=lambda span: span.start)),
            hosts=(*self.hosts, self.host),
            waits=tuple(self.waits),
        )


_Shares: TypeAlias = Counter[int]
"""Processors that are asked for, by host."""


class _Player:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._members = job.members
        self.roles = {rank: _Role(rank, program) for rank, program in job.programs.items()}
        self._gatherings = Gatherings(job, _Communication)
        self._running: list[_Communication] = []
        self._time = 0.0

    def run(self) -> None:
        """Plays until all roles are done."""
        for role in self.roles.values():
            self._advance(role)
        while self._step():
            pass
        if not all(role.is_done for role in self.roles.values()):
            raise deadlock(
                waiting_text(member.rank, member.trace, posted.post.entries[part], each.missing)
                for each in self._gatherings.waiting()
                for member, posted, part in each.members
            )

    def _step(self) -> bool:
        """Goes on to the next event. Returns False if there is none."""
        computing = [role for role in self.roles.values() if role.computes is not None]
        if not computing and not self._running:
            return False
        asked: _Shares = Counter()
        for role in computing:
            asked.update(self._members[role.rank])
        for each in self._running:
            if each.price.is_local:
                # A role that meets itself is a member twice, but asks for its processors once.
                for role in {id(member): member for member, _, _ in each.members}.values():
                    asked.update(self._members[role.rank])
        cores = self._job.device.cores
        rates = {host: min(1.0, cores / count) if cores else 1.0 for host, count in asked.items()}
        # A role stands for ranks on several hosts, of which the slowest sets the pace.
        speeds = {rank: min(rates.get(host, 1.0) for host in hosts) for rank, hosts in self._members.items()}
        of_running = [self._rate(each, speeds) for each in self._running]
        pause = min(
            [role.remaining / speeds[role.rank] for role in computing]
            + [each.remaining / speed for each, speed in zip(self._running, of_running, strict=True)]
        )
        self._time += pause
        for each, speed in zip(self._running, of_running, strict=True):
            each.remaining -= pause * speed
        for role in computing:
            role.remaining -= pause * speeds[role.rank]
        ended = [each for each in self._running if each.remaining <= _EPSILON]
        self._running = [each for each in self._running if each.remaining > _EPSILON]
        for each in ended:
            self._end(each)
        for role in computing:
            if role.remaining <= _EPSILON:
                assert role.computes is not None
                role.runs.append(RunSpan(role.computes.entries, role.computes.stream, role.host, self._time))
                role.computes = None
                self._advance(role)
        return True

    def _rate(self, communication: _Communication, speeds: Mapping[int, float]) -> float:
        """Returns the speed of communication relative to that of the same communication alone, on free processors."""
        rate = self._job.links.rate(communication)
        if not communication.price.is_local:
            return rate
        return min(rate, *(speeds[role.rank] for role, _, _ in communication.members))

    def _advance(self, role: _Role) -> None:
        """Lets the host of a role go on until it computes or waits."""
        operations = role.program.operations
        while role.computes is None:
            role.host = self._time
            if role.awaits:
                if not role.awaits <= role.ended.keys():
                    return
                # Only the time until all members have arrived is waiting. The rest is communication.
                met = max(role.ended[entry] for entry in role.awaits)
                if met > role.waits_since:
                    role.waits.append((role.waits_since, met))
                role.awaits = set()
            if role.at >= len(operations):
                if role.is_done:
                    role.seconds = max(role.seconds, self._time)
                return
            operation = operations[role.at]
            role.hosts.append(self._time)
            role.at += 1
            if isinstance(operation, Run):
                # The host computes its kernels itself, so its own work for them comes on top.
                role.computes, role.remaining = operation, operation.seconds + operation.host
            elif isinstance(operation, Post):
                self._post(role, operation)
                if operation.blocking:
                    self._wait(role, operation.stream, operation.entries)
            elif isinstance(operation, Mark):
                role.events[operation.event] = role.held.get(operation.stream, frozenset())
            elif isinstance(operation, Await):
                known = role.events.get(operation.event, ())
                self._wait(role, operation.stream, known if operation.communication < 0 else (operation.communication,))
            elif isinstance(operation, HostAwait) and operation.event >= 0:
                self._wait(role, DEFAULT_STREAM, role.events.get(operation.event, ()))
            else:
                # Kernels have ended when the host is here, so streams can only wait for communication.
                under_way = [posted.post.entries for queue in role.queues.values() for posted in queue]
                self._wait(role, DEFAULT_STREAM, chain.from_iterable(under_way))

    def _wait(self, role: _Role, stream: int, entries: Iterable[int]) -> None:
        """Lets a stream wait for communication. The default stream is the host itself."""
        left = frozenset(entry for entry in entries if entry not in role.ended)
        if stream == DEFAULT_STREAM:
            role.awaits, role.waits_since = set(left), self._time
        else:
            role.held[stream] = role.held.get(stream, frozenset()) | left

    def _post(self, role: _Role, post: Post) -> None:
        queue = role.queues.setdefault(post.queue, deque())
        queue.append(_Posted(post, self._time, len(post.entries)))
        if len(queue) == 1:
            self._begin(role, queue[0])

    def _begin(self, role: _Role, posted: _Posted) -> None:
        """Lets a role take part in the communication at the head of a queue, which starts when all have arrived."""
        posted.ready = self._time
        for part, index in enumerate(posted.post.entries):
            entry = role.trace.communication(index)
            found = self._gatherings.join(role.trace, entry).gathering
            found.members.append((role, posted, part))
            # Without an encounter nobody is missing, and the communication begins at once.
            if not found.missing:
                found.begun, found.remaining = self._time, found.price.cost.seconds
                self._job.links.begin(found, found.shares)
                self._running.append(found)

    def _end(self, communication: _Communication) -> None:
        cost = communication.price.cost
        self._job.links.end(communication)
        for role, posted, part in communication.members:
            index = posted.post.entries[part]
            role.spans.append(
                CommunicationSpan(index, posted.ready, communication.begun, self._time, cost.algorithm, cost.protocol)
            )
            role.ended[index] = communication.begun
            role.seconds = max(role.seconds, self._time)
            posted.left -= 1
            if posted.left == 0:
                queue = role.queues[posted.post.queue]
                queue.popleft()
                if queue:
                    self._begin(role, queue[0])
            if role.computes is None:
                self._advance(role)
