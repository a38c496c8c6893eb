"""Recorded steps played on a model of devices and their network. Pure.

Strategy: every role has a host, streams, and queues of communication, one for each group as in NCCL. The host goes
through its operations in order and puts them on streams and queues. It waits only where the program makes it wait. A
stream or queue does its operations in order. While it waits it keeps a backlog, and it goes on as soon as the time of
the awaited event is known. An operation is done as soon as its times are known.

The end of kernels depends on the communication beside them and on kernels of other streams. That of communication
depends on other communication on its links. These ends are found in the order of time, by a queue of events:
communication takes multiprocessors, begins or ends, kernels begin or end. Streams that compute at once share the device
evenly. Communication takes multiprocessors as soon as its own rank has arrived, as NCCL's kernels do, which wait on the
device. At each event, kernels and communication under way on the same device and links get new rates. If no event is
left and something waits, the program is in a deadlock.

A copy between the host and its GPU takes nothing from kernels. It has a copy engine, one for each direction, which does
one copy after another in the order in which streams get to them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeAlias, TypeVar

from echelon.foresight.play.cluster import Cluster
from echelon.foresight.play.counterparts import Channel, deadlock, waiting_text
from echelon.foresight.play.device import Device
from echelon.foresight.play.gatherings import Gatherings
from echelon.foresight.play.job import Job, Price
from echelon.foresight.play.links import Link
from echelon.foresight.play.played import CommunicationSpan, CopySpan, Played, PlayedRole, RunSpan
from echelon.foresight.play.processors import play_on_processors
from echelon.foresight.play.program import Await, HostAwait, HostRun, Mark, Post, Program, Run, Transfer
from echelon.foresight.trace import DEFAULT_STREAM, Message, Trace
from echelon.garbage import collection_paused


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
    with collection_paused():  # it would take half of the time
        job = Job(traces, classes, device, cluster)
        return play_on_processors(job) if device.is_synchronous else _Player(job).run()


_Task: TypeAlias = tuple[Run | Mark | Await | Post | Transfer, float, int]
"""(operation that a stream or a queue has to do, time at which the host called it, index of the operation)."""

_Key: TypeAlias = tuple[str, int]
"""Name of a point in time: ("event", operation that records it) or ("end", entry of a communication)."""


@dataclass(slots=True, eq=False)
class _Line:
    """A stream, or a queue of communication."""

    time: float = 0.0
    backlog: deque[_Task] | None = None
    """Tasks that wait, the first one for an event. None if there are none."""


@dataclass(slots=True, eq=False)
class _Work:
    """Kernels or communication under way: seconds that are left, at a rate."""

    left: float
    """Time that it takes from `since` on at a rate of 1."""
    since: float
    rate: float = field(default=1.0, init=False)
    version: int = field(default=0, init=False)
    """Number of changes of the rate. An end that was queued before a change is void."""

    def change(self, time: float, rate: float) -> None:
        """Goes on at another rate."""
        if time > self.since:
            # Rounding may leave less than nothing.
            self.left = max(0.0, self.left - (time - self.since) * self.rate)
            self.since = time
        self.rate = rate
        self.version += 1

    @property
    def end(self) -> float:
        """Time of the end at this rate."""
        return self.since + self.left / self.rate if self.rate else math.inf


@dataclass(slots=True, eq=False)
class _Gathering(_Work):
    """A collective or message, of one role or of several that meet."""

    missing: set[int]
    price: Price
    lines: list[tuple[_Role, _Line]] = field(default_factory=list)
    taken: list[_Taken] = field(default_factory=list)
    shares: list[tuple[Link, float]] = field(default_factory=list)
    start: float = 0.0
    """Time of the latest arrival so far."""
    end_time: float = 0.0
    is_done: bool = False


@dataclass(frozen=True, eq=False)
class _Taken:
    """Multiprocessors that communication of one role takes until it ends."""

    role: _Role
    left: float
    """Share of the device that is left to kernels."""


@dataclass(slots=True, eq=False)
class _Copying:
    """A copy between the host and its GPU that has come to its engine."""

    role: _Role
    line: _Line
    transfer: Transfer
    start: float = 0.0
    """Time at which the engine begins it."""


@dataclass(slots=True, eq=False)
class _Kernels(_Work):
    """Kernels of one stream in a row, at the head of their stream."""

    role: _Role
    line: _Line
    issued: float
    run: Run
    start: float
    """Time at which their stream comes to them."""
    begin: float
    """Time at which the first one begins."""
    is_slowed: bool
    """Whether communication takes multiprocessors from them."""


class _Role:
    """State of one role."""

    def __init__(self, rank: int, program: Program) -> None:
        self.rank = rank
        self.program = program
        self.trace = program.trace
        self.at = 0
        self.host = 0.0
        self.is_waiting = False
        self.streams: defaultdict[int, _Line] = defaultdict(_Line)
        self.queues: defaultdict[tuple[str, int], _Line] = defaultdict(_Line)
        self.times: dict[_Key, float] = {}
        self.waiters: dict[_Key, list[_Line]] = {}
        self.calls: Counter[object] = Counter()
        """Number of messages so far, by their channel and side."""
        self.joined: dict[tuple[int, int], _Gathering] = {}
        """Gatherings by operation and part."""
        self.kernels: dict[_Kernels, None] = {}
        """Kernels under way, of each stream that computes."""
        self.is_shared = len({each.stream for each in program.operations if type(each) is Run}) > 1
        """Whether several streams compute."""
        self.num_waiting = 0
        """Streams and queues with a backlog."""
        self.taken: dict[_Taken, None] = {}
        """Multiprocessors that communication takes."""
        self.engines: dict[bool, deque[_Copying]] = {True: deque(), False: deque()}
        """Copies that have come to the engine of each direction, by whether they go to the GPU."""
        self.hosts: list[float] = []
        """Time of the host before each operation."""
        self.runs: list[RunSpan] = []
        self.communication: list[CommunicationSpan] = []
        self.copies: list[CopySpan] = []
        self.computed: list[tuple[float, float]] = []
        """Intervals in which the host computes operators itself."""
        self.met: dict[int, float] = {}
        """Times at which all sides of a communication have arrived, by its entry."""
        self.waits: list[tuple[float, float]] = []
        """Intervals in which a stream waits until the other sides of a communication arrive."""

    @property
    def lines(self) -> list[_Line]:
        """All streams and queues."""
        return [*self.streams.values(), *self.queues.values()]

    @property
    def is_stuck(self) -> bool:
        """Whether something waits, after the last event."""
        return self.at < len(self.program.operations) or any(line.backlog is not None for line in self.lines)


# Order of events at the same time: ends make room before the next work begins.
_END, _TAKE, _BEGIN = range(3)

_T = TypeVar("_T")
_W = TypeVar("_W", bound=_Work)


class _Player:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._device = job.device
        self._counterparts = job.counterparts
        self._roles = {rank: _Role(rank, program) for rank, program in job.programs.items()}
        self._gatherings = Gatherings(job, lambda missing, price: _Gathering(0.0, 0.0, missing, price))
        self._arrivals: dict[tuple[Channel, bool, int], float] = {}
        """Times at which a side of a message has arrived, by its channel, whether it sends, and its number."""
        self._followers: dict[tuple[Channel, bool, int], list[_Gathering]] = {}
        self._woken: deque[tuple[_Role, _Line]] = deque()
        # Kernels always keep some multiprocessors, since communication may wait for them.
        self._communication_share = min(0.9, job.device.communication_sms / job.device.num_sms)
        self._events: list[tuple[float, int, int, Callable[[Any], None], Any, int | None]] = []
        self._numbers = count()
        self._now = 0.0

    def run(self) -> Played:
        for role in self._roles.values():
            self._advance(role)
            self._wake_all()
        while self._events:
            self._now, _, _, act, what, version = heappop(self._events)
            # The end of work is void if its rate has changed since the end was queued.
            if version is None or version == what.version:
                act(what)
                self._wake_all()
        if waiting := [role for role in self._roles.values() if role.is_stuck]:
            raise deadlock(text for role in waiting for text in self._waiting_texts(role))
        return self._job.played({rank: self._result(role) for rank, role in self._roles.items()})

    def _at(self, time: float, order: int, act: Callable[[_T], None], what: _T, version: int | None = None) -> None:
        """Queues an act: of work at one of its rates if a version is given, which a change of the rate makes void."""
        heappush(self._events, (time, order, next(self._numbers), act, what, version))

    def _ends_at(self, act: Callable[[_W], None], work: _W) -> None:
        """Queues the end of work at its present rate."""
        # At a rate of 0 there is no end yet. The next change of the rate queues one.
        if (end := work.end) < math.inf:
            self._at(end, _END, act, work, work.version)

    # Hosts

    def _advance(self, role: _Role) -> None:
        """Lets the host of a role go on until it waits or ends."""
        operations = role.program.operations
        while role.at < len(operations):
            operation = operations[role.at]
            # A host that had to wait comes here again for the same operation.
            if len(role.hosts) == role.at:
                role.hosts.append(role.host)
            if type(operation) is HostAwait:
                if not self._host_waits_for(role, operation):
                    role.is_waiting = True
                    return
            elif type(operation) is Post:
                # Communication of NCCL is a kernel, too, which the host launches.
                role.host += self._device.launch_seconds
                self._post(role, operation)
            elif isinstance(operation, HostRun):
                begin, role.host = role.host, role.host + operation.seconds
                role.computed.append((begin, role.host))
            else:
                if type(operation) is Transfer:
                    role.host += self._device.launch_seconds
                line = role.streams[operation.stream]
                self._issue(role, line, (operation, role.host, role.at))  # type: ignore[arg-type]
                if type(operation) is Run:
                    role.host += operation.host
            role.at += 1

    def _host_waits_for(self, role: _Role, wait: HostAwait) -> bool:
        """Moves the host's clock to the end of an event or of streams. Returns False if that is not known yet."""
        if wait.event >= 0:
            time = role.times.get(("event", wait.event))
            if time is None:
                return False
            role.host = max(role.host, time)
            return True
        # Fast path: without a look at each line.
        if wait.stream < 0 and role.num_waiting:
            return False
        lines = role.lines if wait.stream < 0 else [role.streams[wait.stream]]
        if any(line.backlog is not None for line in lines):
            return False
        role.host = max([role.host, *(line.time for line in lines)])
        return True

    def _post(self, role: _Role, post: Post) -> None:
        """Puts communication on its queue. It starts after the work that its stream has so far."""
        number = role.at
        stream = role.streams[post.stream]
        # The queue begins it once the stream has got here.
        self._issue(role, stream, (Mark(post.stream, number), role.host, number))
        self._issue(role, role.queues[post.queue], (post, role.host, number))
        if post.blocking:
            for entry in post.entries:
                self._issue(role, stream, (Await(post.stream, -1, entry, entry), role.host, number))

    def _issue(self, role: _Role, line: _Line, task: _Task) -> None:
        if line.backlog is not None:
            line.backlog.append(task)
        elif not self._do(role, line, task):
            line.backlog = deque([task])
            role.num_waiting += 1

    # Streams and queues

    def _do(self, role: _Role, line: _Line, task: _Task) -> bool:
        """Does a task. Returns False if it waits for an event without time: the line is then woken by that event."""
        operation, issued, number = task
        if type(operation) is Run:
            self._kernels_come(role, line, issued, operation)
            return False
        if type(operation) is Await:
            key = ("event", operation.event) if operation.communication < 0 else ("end", operation.communication)
            time = role.times.get(key)
            if time is None:
                role.waiters.setdefault(key, []).append(line)
                return False
            # Only the time until the other sides arrive is waiting. The rest is communication.
            if operation.communication >= 0 and (met := role.met[operation.communication]) > line.time:
                role.waits.append((line.time, met))
            line.time = max(line.time, time)
            return True
        if type(operation) is Transfer:
            # The engine may be busy then, with a copy that another stream brings in the meantime.
            self._at(max(line.time, issued), _BEGIN, self._copy_comes, _Copying(role, line, operation))
            return False
        if type(operation) is Post:
            return self._communicate(role, line, number, operation)
        self._set(role, ("event", number), max(line.time, issued))
        return True

    def _set(self, role: _Role, key: _Key, time: float) -> None:
        role.times[key] = time
        for line in role.waiters.pop(key, ()):
            self._woken.append((role, line))

    def _wake_all(self) -> None:
        """Lets every line go on whose event now has a time, and the hosts that wait for lines."""
        while self._woken:
            role, line = self._woken.popleft()
            while line.backlog:
                if not self._do(role, line, line.backlog[0]):
                    break
                line.backlog.popleft()
            if line.backlog is not None and not line.backlog:
                line.backlog = None
                role.num_waiting -= 1
            if role.is_waiting:
                role.is_waiting = False
                self._advance(role)

    def _kernels_come(self, role: _Role, line: _Line, issued: float, run: Run) -> None:
        """Brings kernels to the head of their stream. They begin when they are launched."""
        start = begin = max(line.time, issued)
        is_slowed = True
        if run.stream != DEFAULT_STREAM:
            # Gaps between launches come first: a kernel that is not launched yet holds up no other stream.
            begin = max(start, issued + run.least - run.seconds)
            # Side streams without products have the copies of FSDP2, which memory limits. Assumed to be slowed, they
            # gave a median error of the published steps on A100 80 GB of 3.9 % in place of 3.8 %.
            is_slowed = any(role.trace.kernel(entry).kind != "other" for entry in run.entries)
        kernels = _Kernels(run.seconds, begin, role, line, issued, run, start, begin, is_slowed)
        # Fast path: a stream that has the device to itself needs no event for the begin.
        if role.is_shared and begin > self._now:
            self._at(begin, _BEGIN, self._kernels_begin, kernels)
        else:
            self._kernels_begin(kernels)

    def _kernels_begin(self, kernels: _Kernels) -> None:
        kernels.role.kernels[kernels] = None
        kernels.rate = self._rate(kernels)
        self._ends_at(self._kernels_end, kernels)
        if len(kernels.role.kernels) > 1:
            self._set_rates(kernels.role)

    def _kernels_end(self, kernels: _Kernels) -> None:
        role, line, run = kernels.role, kernels.line, kernels.run
        del role.kernels[kernels]
        self._set_rates(role)
        # Kernels at full speed may still have to wait for their launches.
        line.time = max(self._now, kernels.issued + run.least)
        launching = kernels.begin - kernels.start + line.time - self._now
        role.runs.append(RunSpan(run.entries, run.stream, kernels.start, line.time, launching))
        assert line.backlog is not None
        line.backlog.popleft()
        self._woken.append((role, line))

    def _rate(self, kernels: _Kernels) -> float:
        """Returns the rate of kernels under way."""
        role = kernels.role
        # Assumed: kernels of two streams at once take as long as one after the other, since each fills the device.
        share = 1.0 / len(role.kernels)
        if not role.taken or not kernels.is_slowed:
            return share
        return share * math.prod([taken.left for taken in role.taken])

    def _set_rates(self, role: _Role) -> None:
        for kernels in role.kernels:
            if (rate := self._rate(kernels)) != kernels.rate:
                kernels.change(self._now, rate)
                self._ends_at(self._kernels_end, kernels)

    def _copy_comes(self, copy: _Copying) -> None:
        """Brings a copy to its engine, which does one after another."""
        engine = copy.role.engines[copy.transfer.to_gpu]
        engine.append(copy)
        if len(engine) == 1:
            self._copy_begins(copy)

    def _copy_begins(self, copy: _Copying) -> None:
        copy.start = self._now
        self._at(self._now + copy.transfer.seconds, _END, self._copy_ends, copy)

    def _copy_ends(self, copy: _Copying) -> None:
        role, line, transfer = copy.role, copy.line, copy.transfer
        role.copies.append(CopySpan(transfer.entry, transfer.stream, copy.start, self._now))
        engine = role.engines[transfer.to_gpu]
        engine.popleft()
        if engine:
            self._copy_begins(engine[0])
        line.time = self._now
        assert line.backlog is not None
        line.backlog.popleft()
        self._woken.append((role, line))

    def _communicate(self, role: _Role, line: _Line, number: int, post: Post) -> bool:
        ready = role.times.get(("event", number))
        if ready is None:
            role.waiters.setdefault(("event", number), []).append(line)
            return False
        begin = max(line.time, ready)
        gatherings = [self._join(role, line, number, part, begin) for part in range(len(post.entries))]
        if not all(each.is_done for each in gatherings):
            return False
        line.time = max(line.time, *(each.end_time for each in gatherings))
        met = max(each.start for each in gatherings)
        for entry, each in zip(post.entries, gatherings, strict=True):
            cost = each.price.cost
            span = CommunicationSpan(entry, begin, each.start, each.end_time, cost.algorithm, cost.protocol)
            role.communication.append(span)
            role.met[entry] = met
            self._set(role, ("end", entry), line.time)
        return True

    def _join(self, role: _Role, line: _Line, number: int, part: int, begin: float) -> _Gathering:
        """Returns the gathering of an operation's part, which the role joins once."""
        known = role.joined.get((number, part))
        if known is not None:
            return known
        operation = role.program.operations[number]
        assert isinstance(operation, Post)
        entry = role.trace.communication(operation.entries[part])
        if isinstance(entry, Message):
            # Also for a message that meets nobody, since others may follow it.
            self._arrive(role, entry, begin)
        gathering, price, is_alone = self._gatherings.join(role.trace, entry)
        role.joined[number, part] = gathering
        gathering.lines.append((role, line))
        gathering.start = max(gathering.start, begin)
        if self._communication_share and price.cost.seconds:
            taken = _Taken(role, 1.0 - self._communication_share * price.cost.blocks)
            gathering.taken.append(taken)
            self._at(begin, _TAKE, self._take, taken)
        followed = self._counterparts.followed(role.rank, entry) if is_alone and isinstance(entry, Message) else None
        # A message whose other side meets another rank starts with that side.
        if followed is not None:
            assert isinstance(entry, Message)
            self._follow(role, gathering, entry, followed)
        elif not gathering.missing:
            self._close(gathering)
        return gathering

    def _take(self, taken: _Taken) -> None:
        """Takes multiprocessors from the kernels of a role."""
        taken.role.taken[taken] = None
        self._set_rates(taken.role)

    def _arrive(self, role: _Role, message: Message, begin: float) -> None:
        """Notes that a side of a message has arrived, for the messages that follow it."""
        channel = self._counterparts.channel_of(role.rank, message)
        key = channel, message.is_send, _count(role, ("arrive", channel, message.is_send))
        self._arrivals[key] = begin
        for gathering in self._followers.pop(key, ()):
            gathering.start = max(gathering.start, begin)
            self._close(gathering)

    def _follow(self, role: _Role, gathering: _Gathering, message: Message, followed: Channel) -> None:
        """Lets a message wait for its other side, which meets another rank."""
        key = followed, not message.is_send, _count(role, ("follow", followed, message.is_send))
        if (arrived := self._arrivals.get(key)) is None:
            self._followers.setdefault(key, []).append(gathering)
        else:
            gathering.start = max(gathering.start, arrived)
            self._close(gathering)

    def _close(self, gathering: _Gathering) -> None:
        """Schedules the start of a gathering whose members have all arrived."""
        self._at(gathering.start, _BEGIN, self._begin, gathering)

    def _begin(self, gathering: _Gathering) -> None:
        gathering.since, gathering.left = self._now, gathering.price.cost.seconds
        self._go_on(self._job.links.begin(gathering, gathering.shares))

    def _end(self, gathering: _Gathering) -> None:
        gathering.is_done = True
        gathering.end_time = self._now
        self._go_on(self._job.links.end(gathering))
        for taken in gathering.taken:
            del taken.role.taken[taken]
            self._set_rates(taken.role)
        self._woken.extend(gathering.lines)

    def _go_on(self, rates: Iterable[tuple[_Gathering, float]]) -> None:
        """Lets gatherings go on at new rates."""
        for gathering, rate in rates:
            gathering.change(self._now, rate)
            self._ends_at(self._end, gathering)

    # Results

    @staticmethod
    def _waiting_texts(role: _Role) -> Iterator[str]:
        """Yields a text for each communication that waits for members."""
        for line in role.queues.values():
            head = line.backlog[0] if line.backlog else None
            if head is None or not isinstance(head[0], Post):
                continue
            for part, index in enumerate(head[0].entries):
                gathering = role.joined.get((head[2], part))
                if gathering is not None and not gathering.is_done:
                    yield waiting_text(role.rank, role.trace, index, gathering.missing)

    def _result(self, role: _Role) -> PlayedRole:
        # One time more than operations: that of the end.
        role.hosts.append(role.host)
        return PlayedRole(
            program=role.program,
            seconds=max([role.host, *(line.time for line in role.lines)]),
            runs=tuple(role.runs),
            communication=tuple(sorted(role.communication, key=lambda span: span.start)),
            hosts=tuple(role.hosts),
            waits=tuple(sorted(role.waits)),
            copies=tuple(role.copies),
            computed=tuple(role.computed),
        )


def _count(role: _Role, what: object) -> int:
    """Returns the number of a role's call, and counts it."""
    number = role.calls[what]
    role.calls[what] += 1
    return number
