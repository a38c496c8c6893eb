"""Playback of a plan: the times at which its ranks end, by arithmetic on many ranks at once.

A rank starts the messages of a round when it comes to the round. They leave one after another, each for bytes /
bandwidth, and arrive a latency later. A round ends when its messages have arrived, sent and received ones.

Strategy. The rounds of all ranks are put into waves: the messages that a wave receives were sent in it or before. So a
wave is a few operations on arrays, however many ranks it has. Its order depends on the plan alone, not on times. A rank
that has not come yet counts as coming at infinity, and so does all that depends on it.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from echelon.collectives.plans.plan import Copy, Numbers, Plan, Round, Send, runs
from echelon.errors import PlanError

Seconds: TypeAlias = npt.NDArray[np.float64]
Indices: TypeAlias = npt.NDArray[np.int64]

_COUNT_BYTES = 8
"""Bytes of a number of rows, which precedes several chunks of rows in one message."""


class Framing(enum.Enum):
    """Messages that carry the chunks of a step."""

    PARTS = "parts"
    """Chunks are parts of one tensor: a message for each run of successive numbers."""
    ROWS = "rows"
    """Chunks are tensors of their own: several are sent as a message of their numbers of rows and one of all rows."""
    EXCHANGED = "exchanged"
    """As ROWS, but the chunks of each rank have sizes of their own, and keep them on their way."""


class Wave(NamedTuple):
    """Rounds of several ranks that are played together."""

    senders: Indices
    """Ranks that come to a round with messages."""
    sent: Indices
    """Numbers of their messages, a row for each rank. A row that is too short repeats its last message."""
    is_sent: npt.NDArray[np.bool_]
    """Whether an entry of `sent` is a message, not a repetition."""
    receivers: Indices
    """Ranks that end a round with messages."""
    received: Indices
    """Numbers of their messages, a row for each rank. A row that is too short repeats its first message."""


class Waves(NamedTuple):
    """Messages of a plan in the order in which they can be played."""

    num_ranks: int
    waves: tuple[Wave, ...]
    src: Indices
    """Sender of each message."""
    dst: Indices
    extra_bytes: Indices
    """Bytes of each message beside its chunks."""
    chunks: Indices
    """Chunks of all messages, one after another, as indices into the sizes."""
    bounds: Indices
    """Where the chunks of each message begin in `chunks`, and the end of the last."""
    needs: tuple[int, ...]
    """Ranks that each rank waits for, itself included, as a set of bits."""
    neighbours: tuple[frozenset[int], ...]
    """Ranks that each rank sends to or receives from."""

    def num_bytes(self, sizes: Sequence[int]) -> Indices:
        """Returns the bytes of each message.

        Args:
            sizes: Bytes of each chunk; those of all ranks one after another if the framing is EXCHANGED.
        """
        sums = np.concatenate(([0], np.cumsum(np.asarray(sizes, dtype=np.int64)[self.chunks])))
        return self.extra_bytes + sums[self.bounds[1:]] - sums[self.bounds[:-1]]


class Link(NamedTuple):
    """Costs of the messages from one rank to another."""

    latency: float
    bandwidth: float
    overhead: float = 0.0


class _Parcel(NamedTuple):
    """Step's messages under way."""

    messages: list[int]
    chunks: list[int]
    """Indices of its chunks into the sizes."""
    needs: int


# The waves of a ring of 256 ranks take 0.4 s to make, and 3 MB.
_MOST_KNOWN = 16
_known: dict[tuple[int, Framing], tuple[Plan, Waves]] = {}


def waves_of(plan: Plan, framing: Framing) -> Waves:
    """Returns the waves of a plan.

    Raises:
        PlanError: a rank waits for a message that is never sent.
    """
    # Cached by identity: a Send equals a Recv with the same numbers, so plans that differ may be equal.
    found = _known.get((id(plan), framing))
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        # The plan is kept with them, so that its identity stays its own.
        found = _known[id(plan), framing] = plan, _Sorter(plan, framing).waves()
    return found[1]


class _Sorter:
    """Sorter of a plan's messages into waves."""

    def __init__(self, plan: Plan, framing: Framing) -> None:
        self._plan = plan
        self._framing = framing
        own = plan.num_chunks if framing is Framing.EXCHANGED else 0
        self._holds = [list(range(rank * own, rank * own + plan.num_chunks)) for rank in range(plan.num_ranks)]
        """Index into the sizes of each rank's chunks."""
        self._needs = [1 << rank for rank in range(plan.num_ranks)]
        self._under_way: defaultdict[tuple[int, int], deque[_Parcel]] = defaultdict(deque)
        self._src: list[int] = []
        self._dst: list[int] = []
        self._extra: list[int] = []
        self._chunks: list[int] = []
        self._bounds = [0]
        self._neighbours: list[set[int]] = [set() for _ in range(plan.num_ranks)]

    def waves(self) -> Waves:
        rounds = self._plan.rounds
        position = [0] * len(rounds)
        entering = [rank for rank, program in enumerate(rounds) if program]
        blocked: list[int] = []
        waves = []
        while entering or blocked:
            sent = {rank: self._send(rank, rounds[rank][position[rank]]) for rank in entering}
            received, following, still = {}, [], []
            for rank in (*blocked, *entering):
                steps = rounds[rank][position[rank]]
                if not self._have_come(rank, steps):
                    still.append(rank)
                    continue
                received[rank] = self._receive(rank, steps)
                position[rank] += 1
                if position[rank] < len(rounds[rank]):
                    following.append(rank)
            if not received:
                raise PlanError(f"plan {self._plan.name!r}: rank {still[0]} waits for ever: check it")
            waves.append(_wave(sent, received))
            entering, blocked = following, still
        return Waves(
            num_ranks=len(rounds),
            waves=tuple(waves),
            src=np.array(self._src, dtype=np.int64),
            dst=np.array(self._dst, dtype=np.int64),
            extra_bytes=np.array(self._extra, dtype=np.int64),
            chunks=np.array(self._chunks, dtype=np.int64),
            bounds=np.array(self._bounds, dtype=np.int64),
            needs=tuple(self._needs),
            neighbours=tuple(map(frozenset, self._neighbours)),
        )

    def _send(self, rank: int, steps: Round) -> list[int]:
        """Sends the messages of a rank's round. Returns their numbers."""
        holds, numbers, copies = self._holds[rank], [], []
        for step in steps:
            if isinstance(step, Send):
                chunks = [holds[chunk] for chunk in step.chunks]
                messages = [self._message(rank, step.peer, *content) for content in self._contents(step.chunks, chunks)]
                self._under_way[rank, step.peer].append(_Parcel(messages, chunks, self._needs[rank]))
                self._neighbours[rank].add(step.peer)
                self._neighbours[step.peer].add(rank)
                numbers += messages
            elif isinstance(step, Copy):
                copies.append(step)
        # After all sends, which carry the chunks as they were before.
        for copy in copies:
            holds[copy.chunk] = holds[copy.source]
        return numbers

    def _contents(self, numbers: Numbers, chunks: list[int]) -> list[tuple[int, list[int]]]:
        """Returns extra bytes and chunks of the messages that carry some chunks."""
        if len(chunks) == 1:
            return [(0, chunks)]
        if self._framing is Framing.PARTS:
            return [(0, list(run)) for run in runs(numbers)]
        return [(_COUNT_BYTES * len(chunks), []), (0, chunks)] if chunks else [(0, [])]

    def _message(self, src: int, dst: int, extra: int, chunks: list[int]) -> int:
        self._src.append(src)
        self._dst.append(dst)
        self._extra.append(extra)
        self._chunks += chunks
        self._bounds.append(len(self._chunks))
        return len(self._src) - 1

    def _have_come(self, rank: int, steps: Round) -> bool:
        sources = [step.peer for step in steps if not isinstance(step, Send | Copy)]
        if len(sources) == 1:  # fast path for most rounds
            return bool(self._under_way[sources[0], rank])
        return all(len(self._under_way[peer, rank]) >= sources.count(peer) for peer in set(sources))

    def _receive(self, rank: int, steps: Round) -> list[int]:
        """Receives the messages of a rank's round. Returns their numbers."""
        numbers = []
        for step in steps:
            if not isinstance(step, Send | Copy):
                parcel = self._under_way[step.peer, rank].popleft()
                self._needs[rank] |= parcel.needs
                for chunk, held in zip(step.chunks, parcel.chunks, strict=True):
                    self._holds[rank][chunk] = held
                numbers += parcel.messages
        return numbers


def _wave(sent: dict[int, list[int]], received: dict[int, list[int]]) -> Wave:
    senders = [rank for rank, numbers in sent.items() if numbers]
    receivers = [rank for rank, numbers in received.items() if numbers]
    lengths = [len(sent[rank]) for rank in senders]
    longest = max(lengths, default=0)
    most = max((len(received[rank]) for rank in receivers), default=0)
    return Wave(
        senders=np.array(senders, dtype=np.int64),
        sent=_table([sent[rank] + sent[rank][-1:] * (longest - len(sent[rank])) for rank in senders], longest),
        is_sent=np.arange(longest) < np.array(lengths, dtype=np.int64).reshape(-1, 1),
        receivers=np.array(receivers, dtype=np.int64),
        received=_table(
            [received[rank] + received[rank][:1] * (most - len(received[rank])) for rank in receivers], most
        ),
    )


def _table(rows: Sequence[Sequence[int]], width: int) -> Indices:
    return np.array(rows, dtype=np.int64).reshape(len(rows), width)


class Routes:
    """Waves over the links of a network."""

    def __init__(self, waves: Waves, link: Callable[[int, int], Link]) -> None:
        """Looks up the links of all messages; `link` is a function of two ranks of the plan."""
        self.waves = waves
        pairs = waves.src * waves.num_ranks + waves.dst
        self._pairs, self._pair_of = np.unique(pairs, return_inverse=True)
        links = [link(*divmod(int(pair), waves.num_ranks)) for pair in self._pairs]
        costs = np.array(links, dtype=np.float64).reshape(-1, 3)
        self.latency, self.bandwidth, self.overhead = (costs[self._pair_of, column] for column in range(3))

    def traffic(self, num_bytes: Indices) -> dict[tuple[int, int], int]:
        """Returns the bytes from one rank to another, in all their messages."""
        totals = np.zeros(len(self._pairs), dtype=np.int64)
        # Not by bincount, whose sums are floats.
        np.add.at(totals, self._pair_of, num_bytes)
        return {
            divmod(pair, self.waves.num_ranks): total
            for pair, total in zip(self._pairs.tolist(), totals.tolist(), strict=True)
        }


class Times(NamedTuple):
    """Times of a plan. Infinite where they depend on a rank that has not come."""

    ends: Seconds
    """End of each rank."""
    last_left: Seconds
    """Time at which all messages of a rank have left."""
    left: Seconds
    """Time at which each message has left."""
    arrives: Seconds


class _Step(NamedTuple):
    """Wave with the durations of its messages."""

    senders: Indices
    sent: Indices
    transmission: Seconds
    """Duration of each message on its sender's link, a row for each rank."""
    latency: Seconds
    receivers: Indices
    received: Indices


class Playback:
    """Plan with the sizes of its messages, ready to be played."""

    def __init__(self, routes: Routes, num_bytes: Indices) -> None:
        self.routes = routes
        self.num_bytes = num_bytes
        """Bytes of each message."""
        transmission = num_bytes / routes.bandwidth
        waves = routes.waves
        self.busy = np.bincount(waves.src, weights=transmission, minlength=waves.num_ranks)
        """Seconds for which each rank's messages use its link."""
        self._steps = [
            _Step(
                wave.senders,
                wave.sent,
                np.where(wave.is_sent, transmission[wave.sent], 0.0),
                routes.latency[wave.sent],
                wave.receivers,
                wave.received,
            )
            for wave in waves.waves
        ]

    def play(self, arrivals: Sequence[float], free: Sequence[float]) -> Times:
        """Plays the plan.

        Args:
            arrivals: Time at which each rank begins. Infinite: not yet.
            free: Time at which the earlier messages of each rank have left.
        """
        ready, link = np.array(arrivals, dtype=np.float64), np.array(free, dtype=np.float64)
        left = np.zeros(len(self.num_bytes))
        arrives = np.zeros(len(self.num_bytes))
        for senders, sent, transmission, latency, receivers, received in self._steps:
            if len(senders):
                begin = np.maximum(ready[senders], link[senders])
                # Summed in the order of the messages, so that rounding is the same as one by one.
                gone = np.cumsum(np.column_stack((begin, transmission)), axis=1)[:, 1:]
                link[senders] = gone[:, -1]
                left[sent] = gone
                arrives[sent] = come = gone + latency
                ready[senders] = np.maximum(ready[senders], come.max(axis=1))
            if len(receivers):
                ready[receivers] = np.maximum(ready[receivers], arrives[received].max(axis=1))
        return Times(ready, link, left, arrives)
