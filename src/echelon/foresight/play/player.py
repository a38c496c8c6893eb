"""Recorded steps played on a model of devices and their network. Pure.

Strategy: every role has a host, streams, and queues of communication, one for each group as in NCCL. The host goes
through its operations in order and puts them on streams and queues. It waits only where the program lets it wait. A
stream or queue does its operations in order. One that waits keeps a backlog, and goes on when the awaited event has got
its time. An operation is done as soon as its times are known, so the order of the work here is not the order of time.
Kernels on the default stream are slowed down by communication that was under way when they were played, and by kernels
of other streams. If nothing can go on and something waits, the program is in a deadlock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from echelon.errors import DeadlockError
from echelon.foresight.play.cluster import Cluster
from echelon.foresight.play.collectives import Cost, cost_of
from echelon.foresight.play.device import Device
from echelon.foresight.play.played import CommunicationSpan, Played, PlayedRole, RunSpan
from echelon.foresight.play.processors import play_on_processors
from echelon.foresight.play.program import Await, HostAwait, Mark, Post, Program, Run, lower
from echelon.foresight.play.roles import Channel, Meeting, Roles, waiting_text
from echelon.foresight.trace import Collective, Message, Trace

DEFAULT_STREAM = 0


def play(
    traces: Mapping[int, Trace], classes: Mapping[int, int] | Sequence[int], device: Device, cluster: Cluster
) -> Played:
    """Plays one step of all ranks.

    Args:
        traces: A trace for each role, by its rank.
        classes: The role of every rank of the world.
        device: The device of every rank.
        cluster: Hosts and network of all ranks.

    Raises:
        DeadlockError: ranks wait for each other for ever. It names them with their lines.
    """
    if device.is_synchronous:
        return play_on_processors(traces, classes, device, cluster)
    return _Player(traces, classes, device, cluster).run()


class _Ready(NamedTuple):
    """Event that the stream of a communication's call sets."""

    post: int


class _Task(NamedTuple):
    """Operation that a stream or a queue has to do."""

    operation: Run | Mark | Await | Post | _Ready
    issued: float
    """Time at which the host called it."""
    number: int
    """Index of the operation."""


_Key: TypeAlias = tuple[str, int]
"""Name of a point in time: ("event", operation), ("end", entry of a communication) or ("ready", operation)."""


class _Line:
    """A stream, or a queue of communication."""

    __slots__ = ("backlog", "time")

    def __init__(self) -> None:
        self.time = 0.0
        self.backlog: deque[_Task] | None = None
        """Tasks that wait, the first one for an event. None if there are none."""


class _Gathering:
    """A collective or message in which several roles meet."""

    __slots__ = ("arrived", "cost", "end", "lines", "missing", "start")

    def __init__(self, missing: set[int]) -> None:
        self.missing = missing
        self.arrived: dict[int, float] = {}
        self.lines: list[tuple[_Role, _Line]] = []
        self.start = 0.0
        self.end = -1.0
        """-1 until all are there."""
        self.cost: Cost | None = None


class _Role:
    """State of one role."""

    def __init__(self, rank: int, program: Program) -> None:
        self.rank = rank
        self.program = program
        self.trace = program.trace
        self.at = 0
        self.host = 0.0
        self.is_waiting = False
        self.streams: dict[int, _Line] = {}
        self.queues: dict[tuple[str, int], _Line] = {}
        self.times: dict[_Key, float] = {}
        self.waiters: dict[_Key, list[_Line]] = {}
        self.calls: Counter[object] = Counter()
        """Number of messages so far, by their channel and side."""
        self.joined: dict[tuple[int, int], _Gathering] = {}
        """By operation and its part."""
        self.taken: list[tuple[float, float, float]] = []
        """(start, end, share) of the device that communication and other streams take, by start."""
        self.hosts: list[float] = []
        """Time of the host before each operation."""
        self.runs: list[RunSpan] = []
        self.communication: list[CommunicationSpan] = []
        self.met: dict[int, float] = {}
        """Times at which all sides of a communication have come, by its entry."""
        self.waits: list[tuple[float, float]] = []
        """Intervals in which a stream waits until the other sides of a communication come."""

    def stream(self, number: int) -> _Line:
        line = self.streams.get(number)
        if line is None:
            line = self.streams[number] = _Line()
        return line

    def queue(self, name: tuple[str, int]) -> _Line:
        line = self.queues.get(name)
        if line is None:
            line = self.queues[name] = _Line()
        return line


class _Player:
    def __init__(
        self,
        traces: Mapping[int, Trace],
        classes: Mapping[int, int] | Sequence[int],
        device: Device,
        cluster: Cluster,
    ) -> None:
        self._device = device
        self._cluster = cluster
        self._classes = classes
        self._matches = Roles(traces, classes)
        self._roles = {rank: _Role(rank, lower(trace, device)) for rank, trace in traces.items()}
        self._gatherings: dict[tuple[Meeting | Channel, int], _Gathering] = {}
        self._arrivals: dict[tuple[Channel, bool, int], float] = {}
        """Times at which a side of a message has come, by its channel, whether it sends, and its number."""
        self._followers: dict[tuple[Channel, bool, int], list[_Gathering]] = {}
        self._woken: deque[tuple[_Role, _Line]] = deque()
        self._communication_share = device.communication_sms / device.num_sms

    def run(self) -> Played:
        for role in self._roles.values():
            self._advance(role)
            self._wake_all()
        waiting = [role for role in self._roles.values() if self._is_stuck(role)]
        if waiting:
            raise DeadlockError(self._explain(waiting))
        roles = {rank: self._result(role) for rank, role in self._roles.items()}
        return Played(roles, self._classes, self._device, self._cluster)

    # Hosts

    def _advance(self, role: _Role) -> None:
        """Lets the host of a role go on until it waits or has come to its end."""
        operations = role.program.operations
        while role.at < len(operations):
            operation = operations[role.at]
            if len(role.hosts) == role.at:
                role.hosts.append(role.host)
            if type(operation) is HostAwait:
                if not self._host_waits_for(role, operation):
                    role.is_waiting = True
                    return
            elif type(operation) is Post:
                role.host += self._device.launch_seconds
                self._post(role, operation)
            else:
                line = role.stream(operation.stream)
                self._issue(role, line, _Task(operation, role.host, role.at))  # type: ignore[arg-type]
                if type(operation) is Run:
                    role.host += operation.host
            role.at += 1

    def _host_waits_for(self, role: _Role, wait: HostAwait) -> bool:
        """Sets the host to the end of an event or of streams. Returns False if that has no time yet."""
        if wait.event >= 0:
            time = role.times.get(("event", wait.event))
            if time is None:
                return False
            role.host = max(role.host, time)
            return True
        lines = [*role.streams.values(), *role.queues.values()] if wait.stream < 0 else [role.stream(wait.stream)]
        if any(line.backlog is not None for line in lines):
            return False
        role.host = max([role.host, *(line.time for line in lines)])
        return True

    def _post(self, role: _Role, post: Post) -> None:
        """Puts communication on its queue. It starts after the work that its stream has so far."""
        number = role.at
        stream = role.stream(post.stream)
        self._issue(role, stream, _Task(_Ready(number), role.host, number))
        self._issue(role, role.queue(post.queue), _Task(post, role.host, number))
        if post.blocking:
            for entry in post.entries:
                self._issue(role, stream, _Task(Await(post.stream, -1, entry, entry), role.host, number))

    def _issue(self, role: _Role, line: _Line, task: _Task) -> None:
        if line.backlog is not None:
            line.backlog.append(task)
        elif not self._do(role, line, task):
            line.backlog = deque([task])

    # Streams and queues

    def _do(self, role: _Role, line: _Line, task: _Task) -> bool:
        """Does a task. Returns False if it waits for an event without time: the line is then woken by that event."""
        operation = task.operation
        if type(operation) is Run:
            self._kernels(role, line, task, operation)
            return True
        if type(operation) is Await:
            key = ("event", operation.event) if operation.communication < 0 else ("end", operation.communication)
            time = role.times.get(key)
            if time is None:
                role.waiters.setdefault(key, []).append(line)
                return False
            if operation.communication >= 0 and (met := role.met[operation.communication]) > line.time:
                role.waits.append((line.time, met))
            line.time = max(line.time, time)
            return True
        if type(operation) is Post:
            return self._communicate(role, line, task, operation)
        key = ("event", operation.event) if isinstance(operation, Mark) else ("ready", task.number)
        self._set(role, key, max(line.time, task.issued))
        return True

    def _set(self, role: _Role, key: _Key, time: float) -> None:
        role.times[key] = time
        for line in role.waiters.pop(key, ()):
            self._woken.append((role, line))

    def _wake_all(self) -> None:
        """Lets every line go on whose event has got its time, and the hosts that wait for lines."""
        while self._woken:
            role, line = self._woken.popleft()
            while line.backlog:
                if not self._do(role, line, line.backlog[0]):
                    break
                line.backlog.popleft()
            if not line.backlog:
                line.backlog = None
            if role.is_waiting:
                role.is_waiting = False
                self._advance(role)

    def _kernels(self, role: _Role, line: _Line, task: _Task, run: Run) -> None:
        start = max(line.time, task.issued)
        seconds = run.seconds
        if run.stream == DEFAULT_STREAM:
            seconds += _lost(role.taken, start, seconds)
        end = max(line.time + seconds, task.issued + run.least)
        line.time = max(end, start + seconds)
        if run.stream != DEFAULT_STREAM:
            _insert(role.taken, (line.time - run.seconds, line.time, 1.0))
        role.runs.append(RunSpan(run.entries, run.stream, start, line.time))

    def _communicate(self, role: _Role, line: _Line, task: _Task, post: Post) -> bool:
        ready = role.times.get(("ready", task.number))
        if ready is None:
            role.waiters.setdefault(("ready", task.number), []).append(line)
            return False
        begin = max(line.time, ready)
        gatherings = [self._join(role, line, task.number, part, begin) for part in range(len(post.entries))]
        if any(each is not None and each.end < 0 for each in gatherings):
            return False
        for entry, gathering in zip(post.entries, gatherings, strict=True):
            self._end(role, line, entry, begin, gathering)
        met = max(begin if each is None else each.start for each in gatherings)
        for entry in post.entries:
            role.met[entry] = met
            self._set(role, ("end", entry), line.time)
        return True

    def _join(self, role: _Role, line: _Line, number: int, part: int, begin: float) -> _Gathering | None:
        """Returns the gathering of an operation's part, which the role joins once. None if the role meets nobody."""
        known = role.joined.get((number, part))
        if known is not None:
            return known
        operation = role.program.operations[number]
        assert isinstance(operation, Post)
        entry = role.trace.entries[operation.entries[part]]
        assert isinstance(entry, Collective | Message)
        if isinstance(entry, Message):
            self._arrive(role, entry, begin)
        encounter = self._matches.encounter(role.rank, entry)
        if encounter is None:
            followed = self._matches.followed(role.rank, entry) if isinstance(entry, Message) else None
            if followed is None:
                return None
            assert isinstance(entry, Message)
            following = role.joined[number, part] = self._follow(role, line, entry, followed, begin)
            return following
        gathering = self._gatherings.get(encounter.key)
        if gathering is None:
            gathering = self._gatherings[encounter.key] = _Gathering(set(encounter.members))
        role.joined[number, part] = gathering
        gathering.missing.discard(encounter.member)
        gathering.arrived[encounter.member] = begin
        gathering.lines.append((role, line))
        if not gathering.missing:
            gathering.cost = cost_of(self._cluster, role.trace, role.rank, entry)
            self._close(gathering)
            del self._gatherings[encounter.key]
        return gathering

    def _arrive(self, role: _Role, message: Message, begin: float) -> None:
        """Notes that a side of a message has come, for the messages that follow it."""
        channel = self._matches.channel_of(role.rank, message)
        key = channel, message.is_send, _count(role, ("arrive", channel, message.is_send))
        self._arrivals[key] = begin
        for gathering in self._followers.pop(key, ()):
            gathering.arrived[1] = begin
            self._close(gathering)

    def _follow(self, role: _Role, line: _Line, message: Message, followed: Channel, begin: float) -> _Gathering:
        """Returns the gathering of a message whose other side meets another rank."""
        key = followed, not message.is_send, _count(role, ("follow", followed, message.is_send))
        gathering = _Gathering(set())
        gathering.arrived[0] = begin
        gathering.lines.append((role, line))
        gathering.cost = cost_of(self._cluster, role.trace, role.rank, message)
        if (arrived := self._arrivals.get(key)) is None:
            self._followers.setdefault(key, []).append(gathering)
        else:
            gathering.arrived[1] = arrived
            self._close(gathering)
        return gathering

    def _close(self, gathering: _Gathering) -> None:
        """Sets the times of a gathering in which all have come."""
        assert gathering.cost is not None
        gathering.start = max(gathering.arrived.values())
        gathering.end = gathering.start + gathering.cost.seconds
        self._woken.extend(gathering.lines)

    def _end(self, role: _Role, line: _Line, index: int, begin: float, gathering: _Gathering | None) -> None:
        entry = role.trace.entries[index]
        assert isinstance(entry, Collective | Message)
        if gathering is None:
            cost = cost_of(self._cluster, role.trace, role.rank, entry)
            start = begin
            end = start + cost.seconds
        else:
            assert gathering.cost is not None
            cost, start, end = gathering.cost, gathering.start, gathering.end
        line.time = max(line.time, end)
        span = CommunicationSpan(index, begin, start, end, cost.algorithm, cost.protocol)
        role.communication.append(span)
        if end > start and self._communication_share:
            _insert(role.taken, (start, end, self._communication_share))

    # Results

    def _is_stuck(self, role: _Role) -> bool:
        lines = [*role.streams.values(), *role.queues.values()]
        return role.at < len(role.program.operations) or any(line.backlog is not None for line in lines)

    def _explain(self, waiting: Sequence[_Role]) -> str:
        """Returns one sentence for each communication that waits for members."""
        parts = []
        for role in waiting:
            for line in role.queues.values():
                head = line.backlog[0] if line.backlog else None
                if head is None or not isinstance(head.operation, Post):
                    continue
                for part, index in enumerate(head.operation.entries):
                    gathering = role.joined.get((head.number, part))
                    if gathering is not None and gathering.end < 0:
                        parts.append(waiting_text(role.rank, role.trace, index, gathering.missing))
        return "these wait for each other for ever: " + "; ".join(sorted(set(parts)))

    def _result(self, role: _Role) -> PlayedRole:
        lines = [*role.streams.values(), *role.queues.values()]
        role.hosts.append(role.host)
        return PlayedRole(
            program=role.program,
            seconds=max([role.host, *(line.time for line in lines)]),
            runs=tuple(role.runs),
            communication=tuple(sorted(role.communication, key=lambda span: span.start)),
            hosts=tuple(role.hosts),
            waits=tuple(sorted(role.waits)),
        )


def _count(role: _Role, what: object) -> int:
    """Returns the number of a role's call, and counts it."""
    number = role.calls[what]
    role.calls[what] += 1
    return number


def _lost(taken: list[tuple[float, float, float]], start: float, seconds: float) -> float:
    """Returns the time that kernels from `start` on lose to others that take a share of the device."""
    end = start + seconds
    lost = 0.0
    # Kernels of a stream start later and later: intervals that ended before this one are never needed again.
    while taken and taken[0][1] <= start:
        taken.pop(0)
    for begin, until, share in taken:
        if begin >= end:
            break
        begin = max(begin, start)
        if until <= begin:
            continue
        # The interval delays the kernels by its share, at most until they have done their work beside it.
        delay = (until - begin) * share
        if share < 1:
            delay = min(delay, (end - begin) * share / (1 - share))
        end += delay
        lost += delay
    return lost


def _insert(taken: list[tuple[float, float, float]], interval: tuple[float, float, float]) -> None:
    taken.insert(bisect_left(taken, interval), interval)
