"""Faults of a simulation, as values, and the plan that applies them to ranks and messages."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from echelon.arguments import is_amount, is_count, is_factor, refuse_others
from echelon.errors import InvalidRank, LaunchError
from echelon.wording import counted, listed


@refuse_others(time="at", step="at_op")
@dataclass(frozen=True)
class Kill:
    """Ends a rank at once, as SIGKILL does. The others detect it when the news has crossed the network.

    Args:
        rank: the rank.
        at: time of death, virtual seconds.
        at_op: number of the send or receive at which it dies, from 1, instead of a time. Sends and receives inside of
            collectives count, too.

    Raises:
        LaunchError: not one of `at` and `at_op`, seconds below 0, or a number of a message below 1.
    """

    rank: int
    at: float | None = None
    at_op: int | None = None

    def __post_init__(self) -> None:
        if (self.at is None) == (self.at_op is None):
            raise LaunchError(f"Kill(rank={self.rank}) needs either at= (seconds) or at_op= (number of a message)")
        if self.at is not None and not is_amount(self.at):
            raise LaunchError(f"Kill(rank={self.rank}, at={self.at!r}): give seconds, at least 0")
        if self.at_op is not None and not is_count(self.at_op, 1):
            raise LaunchError(f"Kill(rank={self.rank}, at_op={self.at_op!r}): messages are counted from 1")


@refuse_others()
@dataclass(frozen=True)
class Slow:
    """Makes the computing of a rank take `factor` times as long. Needs a simulation with `costs`.

    Args:
        rank: the rank.
        factor: above 0; 2 takes twice as long.

    Raises:
        LaunchError: `factor` is not above 0.
    """

    rank: int
    factor: float

    def __post_init__(self) -> None:
        if not is_factor(self.factor):
            raise LaunchError(f"Slow(rank={self.rank}, factor={self.factor!r}): give a factor above 0")


@refuse_others()
@dataclass(frozen=True)
class NetworkPartition:
    """Blocks all messages between two sets of ranks for a while. Messages sent meanwhile arrive after `end`.

    TCP behaves so, because it retransmits. Without an end the messages never arrive, and ranks that wait for them run
    into their timeouts.

    Args:
        left, right: the two sets of ranks, without a common one.
        start, end: virtual seconds between which messages are blocked.

    Raises:
        LaunchError: a set is empty, both have a common rank, or `end` does not come after `start`.
    """

    left: Collection[int]
    right: Collection[int]
    start: float = 0.0
    end: float = math.inf

    def __post_init__(self) -> None:
        _check_interval(self.start, self.end, "NetworkPartition")
        sides = (self.left, self.right)
        if not all(isinstance(side, Collection) and side for side in sides) or set(self.left) & set(self.right):
            raise LaunchError(
                f"NetworkPartition({self.left}, {self.right}): give two sets of ranks without a common one"
            )
        # A list may change after the check, and a set is faster to look into for each message.
        object.__setattr__(self, "left", frozenset(self.left))
        object.__setattr__(self, "right", frozenset(self.right))

    def concerns(self, src: int, dst: int) -> bool:
        """Whether the partition blocks messages from `src` to `dst`.

        Args:
            src, dst: ranks of the sender and the receiver.
        """
        # A partition blocks both ways, as an unplugged cable does.
        return (src in self.left and dst in self.right) or (src in self.right and dst in self.left)


@refuse_others(latency="seconds")
@dataclass(frozen=True)
class Delay:
    """Makes messages between two ranks, or any, arrive later.

    Args:
        seconds: how much later messages arrive, above 0.
        src, dst: ranks of the sender and the receiver. None: any.
        start, end: virtual seconds between which messages leave.

    Raises:
        LaunchError: `seconds` is not above 0, or `end` does not come after `start`.
    """

    seconds: float
    src: int | None = None
    dst: int | None = None
    start: float = 0.0
    end: float = math.inf

    def __post_init__(self) -> None:
        _check_interval(self.start, self.end, "Delay")
        if not is_factor(self.seconds):
            raise LaunchError(f"Delay(seconds={self.seconds!r}): give seconds above 0")

    def concerns(self, src: int, dst: int) -> bool:
        """Whether the fault delays messages from `src` to `dst`.

        Args:
            src, dst: ranks of the sender and the receiver.
        """
        return self.src in (None, src) and self.dst in (None, dst)


@refuse_others()
@dataclass(frozen=True)
class Pause:
    """Stops a rank from `start` to `end`, as SIGSTOP does. Computing under way then ends that much later.

    Args:
        rank: the rank.
        start, end: virtual seconds.

    Raises:
        LaunchError: `end` does not come after `start`, or `start` is below 0.
    """

    rank: int
    start: float = 0.0
    end: float = math.inf

    def __post_init__(self) -> None:
        _check_interval(self.start, self.end, f"Pause of rank {self.rank}")


Fault: TypeAlias = Kill | Slow | NetworkPartition | Delay | Pause
Faults: TypeAlias = Sequence[Fault] | Callable[[random.Random, int], Sequence[Fault]]
"""Faults, or a function that draws them from a generator seeded for this run and the number of ranks."""


class FaultPlan:
    """Faults of one simulation by kind, and their effect on messages and ranks."""

    def __init__(self, faults: Sequence[Fault], world_size: int, has_costs: bool) -> None:
        """Checks and sorts the faults.

        Raises:
            InvalidRank: a fault names a rank that is not in the world.
            LaunchError: `faults` is no list of faults, or a fault would have no effect.
        """
        if not isinstance(faults, Sequence) or not all(isinstance(fault, Fault) for fault in faults):
            raise LaunchError(f"faults={faults!r}: give a list of Kill, Slow, NetworkPartition, Delay, Pause")
        for fault in faults:
            for rank in ranks_of(fault):
                if not is_count(rank) or rank >= world_size:
                    raise InvalidRank(rank, world_size, f"{type(fault).__name__}: rank")
            # Refused rather than ignored: the user would take the result for one with a slow rank.
            if isinstance(fault, Slow) and not has_costs:
                raise LaunchError(
                    f"{fault_text(fault)} changes nothing, because computing costs nothing here: give "
                    'costs="measured", say'
                )
        self.faults = tuple(faults)
        self.happened: set[Fault] = set()
        """Faults that have had an effect."""
        self.kills = [fault for fault in faults if isinstance(fault, Kill)]
        self._delays = [fault for fault in faults if isinstance(fault, Delay)]
        self._slow = [fault for fault in faults if isinstance(fault, Slow)]
        # In order of time: a message that one partition holds back may run into the next, and so may a paused rank.
        pauses = [fault for fault in faults if isinstance(fault, Pause)]
        self.pauses = sorted(pauses, key=lambda pause: pause.start)
        partitions = [fault for fault in faults if isinstance(fault, NetworkPartition)]
        self._partitions = sorted(partitions, key=lambda partition: partition.start)

    def on_messages(self) -> Fault | None:
        """Returns a fault that acts on messages. None if all act on ranks."""
        kills = [kill for kill in self.kills if kill.at_op is not None]
        faults: tuple[Fault, ...] = (*kills, *self._delays, *self._partitions)
        return faults[0] if faults else None

    def arrival(self, src: int, dst: int, left: float, arrives: float, is_news: bool = False) -> float:
        """Returns the arrival time of a message that left at `left` and arrives at `arrives` without faults.

        math.inf if it never arrives. News, such as that of a rank's end, are no effect of a fault.
        """
        felt: list[Fault] = [
            delay for delay in self._delays if delay.start <= left < delay.end and delay.concerns(src, dst)
        ]
        arrives += sum(fault.seconds for fault in felt if isinstance(fault, Delay))
        travel = arrives - left
        for partition in self._partitions:
            if partition.concerns(src, dst) and left < partition.end and arrives >= partition.start:
                left, arrives = partition.end, partition.end + travel
                felt.append(partition)
        if not is_news:
            self.happened.update(felt)
        return arrives

    def separation(self, ranks: Collection[int], time: float) -> str:
        """Returns which of these ranks a partition cuts off from which others at a time. Empty if none does."""
        for partition in self._partitions:
            left, right = set(partition.left) & set(ranks), set(partition.right) & set(ranks)
            if left and right and partition.start <= time < partition.end:
                return f"the fault {fault_text(partition)} cuts {listed(left)} off from {listed(right)}"
        return ""

    def available_at(self, rank: int, time: float) -> float:
        """Returns the time at which a rank with a turn at `time` can take it: later while it is paused."""
        for pause in self.pauses:
            if pause.rank == rank and pause.start <= time < pause.end:
                time = pause.end
                self.happened.add(pause)
        return time

    def duration(self, rank: int, began: float, seconds: float) -> float:
        """Returns the duration of `seconds` of computing that begin at `began`, with slowness and pauses."""
        slow = [fault for fault in self._slow if fault.rank == rank]
        if seconds > 0:
            self.happened.update(slow)
        seconds *= math.prod(fault.factor for fault in slow)
        for pause in self.pauses:
            if pause.rank == rank and began < pause.end and began + seconds > pause.start:
                seconds += pause.end - max(pause.start, began)
                self.happened.add(pause)
        return seconds

    def notes(self, num_messages: Sequence[int], killed: Collection[int]) -> tuple[str, ...]:
        """Returns a sentence for each fault that had no effect until the end of the simulation.

        Args:
            num_messages: sends and receives that each rank has called.
            killed: ranks that were killed.
        """
        return tuple(
            f"{fault_text(fault)} did not happen: {_cause(fault, num_messages, killed)}"
            for fault in dict.fromkeys(self.faults)
            if fault not in self.happened
        )


def fault_text(fault: Fault) -> str:
    """Returns a fault as `--faults` takes it, such as "kill:2@op=17"."""
    match fault:
        case Kill():
            return f"kill:{fault.rank}@{f'op={fault.at_op}' if fault.at is None else f't={_number(fault.at)}'}"
        case Slow():
            return f"slow:{fault.rank}x{_number(fault.factor)}"
        case Delay():
            src, dst = ("*" if rank is None else rank for rank in (fault.src, fault.dst))
            return f"delay:{src}-{dst}:{_number(fault.seconds)}{_interval(fault)}"
        case NetworkPartition():
            left, right = (",".join(map(str, sorted(side))) for side in (fault.left, fault.right))
            return f"partition:{left}|{right}{_interval(fault)}"
        case Pause():
            return f"pause:{fault.rank}{_interval(fault) or '@0-'}"


def _interval(fault: NetworkPartition | Delay | Pause) -> str:
    """Returns the interval of a fault, such as "@0.5-1" or "@0.5-". Empty if it is the whole simulation."""
    end = "" if fault.end == math.inf else _number(fault.end)
    return f"@{_number(fault.start)}-{end}" if fault.start or end else ""


def _number(value: float) -> str:
    return repr(float(value)).removesuffix(".0")


def _cause(fault: Fault, num_messages: Sequence[int], killed: Collection[int]) -> str:
    """Returns the reason for which a fault had no effect."""
    match fault:
        case Kill() if fault.rank in killed:
            return f"rank {fault.rank} was killed before"
        case Kill() if fault.at_op is not None:
            return f"rank {fault.rank} sent and received {counted(num_messages[fault.rank], 'message')}"
        case Kill():
            return f"rank {fault.rank} had ended by then"
        case Slow():
            return f"rank {fault.rank} computed nothing that takes time"
        case Delay():
            src, dst = ("any rank" if rank is None else f"rank {rank}" for rank in (fault.src, fault.dst))
            return f"no message went from {src} to {dst}{_in_that_time(fault)}"
        case NetworkPartition():
            return f"no message went between its two sides{_in_that_time(fault)}"
        case Pause():
            return f"rank {fault.rank} did nothing in that time"


def _in_that_time(fault: NetworkPartition | Delay) -> str:
    return " in that time" if _interval(fault) else ""


def ranks_of(fault: Fault) -> list[int]:
    """Returns the ranks that a fault names."""
    if isinstance(fault, NetworkPartition):
        return sorted(fault.left) + sorted(fault.right)
    if isinstance(fault, Delay):
        return [rank for rank in (fault.src, fault.dst) if rank is not None]
    return [fault.rank]


def _check_interval(start: float, end: float, what: str) -> None:
    if not is_amount(start) or not (is_amount(end) or end == math.inf) or end <= start:
        raise LaunchError(f"{what} from {start!r} to {end!r} s: the end must come after the start, which is at least 0")
