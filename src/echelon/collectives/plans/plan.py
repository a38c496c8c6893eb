"""Plan of a collective as data: for every rank, rounds of sends and receives of numbered chunks.

The steps of one round run at the same time. A rank starts a round when it has finished the one before. Messages from
one rank to another are received in the order of their sends, independent of rounds. The interpreter of a plan decides
what a chunk is: a part of one tensor in a reduction, one tensor per rank in an all-gather.

A step has a text form that parses back:

    0>1     sends chunk 0 to rank 1               0-3,6>1   sends five chunks to rank 1, as one message
    0<1     receives chunk 0 from rank 1          >1        sends a message without chunks, as a signal
    +0<1    combines: own op received             4=0       chunk 0 is chunk 4 as well
    0<1+    combines: received op own
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias, TypeVar

from echelon.errors import PlanError
from echelon.wording import counted

T = TypeVar("T", bound=tuple[object, ...])

Numbers: TypeAlias = tuple[int, ...]
"""Numbers of chunks."""


def _by_kind(step: type[T]) -> type[T]:
    """Decorator of a kind of step: steps of two kinds differ."""

    # A tuple equals any other of the same numbers: a send would equal the receive of its chunks.
    def is_same(one: T, other: object) -> bool:
        return type(one) is type(other) and tuple.__eq__(one, other)

    def differs(one: T, other: object) -> bool:
        return not is_same(one, other)

    step.__eq__, step.__ne__ = is_same, differs  # type: ignore[assignment] # the hash stays that of the numbers
    return step


@_by_kind
class Send(NamedTuple):
    """Sends the chunks as they were at the start of the round, as one message.

    Args:
        peer: rank of the receiver.
        chunks: numbers of the chunks. Empty: a message without chunks, as a signal.
    """

    peer: int
    chunks: Numbers

    def __str__(self) -> str:
        return f"{_text(self.chunks)}>{self.peer}"


@_by_kind
class Recv(NamedTuple):
    """Receives the chunks in place of the rank's own.

    Args:
        peer: rank of the sender.
        chunks: numbers of the chunks, as in the sender's Send.
    """

    peer: int
    chunks: Numbers

    def __str__(self) -> str:
        return f"{_text(self.chunks)}<{self.peer}"


@_by_kind
class Reduce(NamedTuple):
    """Receives the chunks and combines them with the rank's own: own op received.

    Args:
        peer: rank of the sender.
        chunks: numbers of the chunks, as in the sender's Send.
        received_first: True for received op own. Two ranks that combine the same values must do so in the same order.
    """

    peer: int
    chunks: Numbers
    received_first: bool = False

    def __str__(self) -> str:
        text = f"{_text(self.chunks)}<{self.peer}"
        return f"{text}+" if self.received_first else f"+{text}"


@_by_kind
class Copy(NamedTuple):
    """Copies the rank's own chunk `source` to its chunk `chunk`.

    Args:
        source: number of the chunk that is read.
        chunk: number of the chunk that is overwritten.
    """

    source: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.chunk}={self.source}"


Step: TypeAlias = Send | Recv | Reduce | Copy
Round: TypeAlias = tuple[Step, ...]
Program: TypeAlias = tuple[Round, ...]
"""Rounds of one rank."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps of each rank of a collective, in rounds.

    Args:
        name: name in pictures and errors.
        num_chunks: number of chunks that the tensor is cut into.
        rounds: steps of all ranks, by round.
    """

    name: str
    num_chunks: int
    rounds: tuple[Program, ...]
    """Steps by rank, then by round."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.rounds)

    @property
    def num_rounds(self) -> int:
        """Largest number of rounds of any rank, without rounds of copies alone."""
        # Copies take no message, so formulas of cost do not count them.
        return max((sum(map(_communicates, program)) for program in self.rounds), default=0)

    def __str__(self) -> str:
        lines = [f"{self.name}: {counted(self.num_ranks, 'rank')}, {counted(self.num_chunks, 'chunk')}"]
        for rank, program in enumerate(self.rounds):
            lines.append(f"rank {rank}: " + " | ".join(map(text_of_round, program)))
        return "\n".join(lines)

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """Parses the text that `str` returns.

        Raises:
            PlanError: the text is not that of a plan.
        """
        head, *lines = text.strip().splitlines() or [""]
        sizes = _HEAD.fullmatch(head)
        # A line that was lost would otherwise be a rank that does nothing.
        if sizes is None or int(sizes[2]) != len(lines):
            raise PlanError(f"line 1 is {head!r}: give a name and sizes, as 'ring: 4 ranks, 4 chunks', and a line each")
        programs = (_program(line, rank) for rank, line in enumerate(lines))
        return cls(sizes[1], int(sizes[3]), tuple(programs))


def text_of_round(steps: Round) -> str:
    """Returns the steps of a round as text, "." if there are none."""
    return " ".join(map(str, steps)) or "."


_HEAD = re.compile(r"(.+): (\d+) ranks?, (\d+) chunks?")
# No numbers are a message without chunks: ">1" and "<1" are signals.
_NUMBERS = r"((?:\d+(?:-\d+)?,?)*)"
_MESSAGE = re.compile(rf"(\+?){_NUMBERS}([<>])(\d+)(\+?)")
_COPY = re.compile(r"(\d+)=(\d+)")


def _communicates(steps: Round) -> bool:
    return any(not isinstance(step, Copy) for step in steps)


def _program(line: str, rank: int) -> Program:
    title, _, text = line.partition(": ")
    if title.rstrip(":") != f"rank {rank}":
        raise PlanError(f"line {rank + 2} begins with {title!r}: give the rounds of rank {rank}, as 'rank {rank}: 0>1'")
    return tuple(tuple(map(_step, part.replace(".", " ").split())) for part in text.split(" | ") if part)


def _step(text: str) -> Step:
    if copied := _COPY.fullmatch(text):
        return Copy(int(copied[2]), int(copied[1]))
    found = _MESSAGE.fullmatch(text)
    if found is None or (found[1] and found[5]) or (found[3] == ">" and (found[1] or found[5])):
        raise PlanError(f"{text!r} is no step: write 0>1, 0<1, +0<1, 0<1+ or 4=0")
    chunks, peer = _numbers(found[2]), int(found[4])
    if found[3] == ">":
        return Send(peer, chunks)
    return Reduce(peer, chunks, bool(found[5])) if found[1] or found[5] else Recv(peer, chunks)


def _numbers(text: str) -> Numbers:
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def runs(chunks: Numbers) -> list[range]:
    """Returns the numbers as consecutive ranges, in their order."""
    found: list[range] = []
    for chunk in chunks:
        if found and found[-1].stop == chunk:
            found[-1] = range(found[-1].start, chunk + 1)
        else:
            found.append(range(chunk, chunk + 1))
    return found


# Cached: a simulated timeline has the text of every round, and the same chunks recur in it.
@lru_cache(maxsize=4096)
def _text(chunks: Numbers) -> str:
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs(chunks))


# Pictures

# More rows are of no use on a terminal.
_MOST_RANKS = 64


def grid(plan: Plan, width: int | None = None) -> str:
    """Returns the steps of every rank in the text form of `echelon.collectives.plans.plan`, as a grid.

    Rounds line up by number, not by time: two ranks can be in different rounds at the same time.

    Args:
        plan: The plan.
        width: Width in characters. Rounds that do not fit are counted instead. None: no limit.
    """
    num_rounds = max(map(len, plan.rounds), default=0)
    shown = plan.rounds[:_MOST_RANKS]
    titles = ["", *(f"rank {rank}" for rank in range(len(shown)))]
    lines = [title.ljust(max(map(len, titles))) for title in titles]
    drawn = 0
    for number in range(num_rounds):
        cells = [str(number), *(text_of_round(program[number]) if number < len(program) else "" for program in shown)]
        cell_width = max(map(len, cells))
        # The first round is always drawn, even if it is too wide.
        if width is not None and drawn and len(lines[0]) + 2 + cell_width > width:
            break
        lines = [f"{line}  {cell.ljust(cell_width)}" for line, cell in zip(lines, cells, strict=True)]
        drawn += 1
    left_out = [
        f"{count} more {what}{'s' if count > 1 else ''}"
        for count, what in ((num_rounds - drawn, "round"), (plan.num_ranks - len(shown), "rank"))
        if count
    ]
    notes = [f"({' and '.join(left_out)})"] if left_out else []
    return "\n".join([line.rstrip() for line in lines] + notes)


def legend(plan: Plan) -> str:
    """Returns the meanings of the signs that occur in the steps of a plan, in one line."""
    steps = {str(step) for program in plan.rounds for steps in program for step in steps}
    signs = {"".join(character for character in step if character in "><+=") for step in steps}
    return "   ".join(f"{example} {meaning}" for sign, (example, meaning) in _MEANINGS.items() if sign in signs)


_MEANINGS = {
    ">": ("0>1", "sends chunk 0 to rank 1"),
    "<": ("0<1", "receives it from rank 1"),
    "+<": ("+0<1", "combines: own, received"),
    "<+": ("0<1+", "combines: received, own"),
    "=": ("4=0", "copies chunk 0 as 4"),
}
