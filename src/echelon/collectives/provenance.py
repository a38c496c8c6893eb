"""Plays a plan with symbols, which know what they were made of, instead of numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from echelon.collectives.goal import Goal, Piece
from echelon.collectives.plan import Copy, Numbers, Plan, Recv, Reduce, Round, Send, Step


def why_impossible(step: Step, rank: int, plan: Plan) -> str:
    """Says what is wrong with a step by itself; "" if nothing."""
    chunks = (step.source, step.chunk) if isinstance(step, Copy) else step.chunks
    if any(not 0 <= chunk < plan.num_chunks for chunk in chunks):
        return f"names a chunk that does not exist: there are {plan.num_chunks}"
    if isinstance(step, Copy):
        return ""
    if len(set(chunks)) != len(chunks):
        return "names a chunk twice"
    if not 0 <= step.peer < plan.num_ranks:
        return f"names a rank that does not exist: there are {plan.num_ranks}"
    return "is a message of the rank to itself" if step.peer == rank else ""


class Value(NamedTuple):
    """What a chunk holds: sets of pieces as the bits of a number, and the expression that made it by its number."""

    pieces: int
    twice: int
    expression: int


class _Message(NamedTuple):
    values: tuple[Value | None, ...]
    numbers: Numbers
    number: int
    """Of the sender's round."""
    heard: int
    """The ranks that the sender knows to have come, as bits."""


class Standing(NamedTuple):
    """A rank that cannot finish a round, and the rank whose message it lacks."""

    rank: int
    number: int
    peer: int


class Play:
    """A plan under way. A message is received in the order it was sent in; a send never waits."""

    def __init__(self, plan: Plan, goal: Goal) -> None:
        self.plan = plan
        self.keeps_numbers = goal.keeps_numbers
        self.problems: list[str] = []
        self.heard = [1 << rank for rank in range(plan.num_ranks)]
        self._expressions: dict[tuple[int, int], int] = {}
        self.values = [{chunk: self._piece(rank, chunk) for chunk in chunks} for rank, chunks in enumerate(goal.start)]
        self.seen = [sum(value.pieces for value in held.values()) for held in self.values]
        """For each rank, all pieces that it ever had."""
        self._position = [0] * plan.num_ranks
        self._entered = [False] * plan.num_ranks
        self._sent: dict[tuple[int, int], deque[_Message]] = {}
        self._crossed: set[tuple[int, int]] = set()

    def bit(self, piece: Piece) -> int:
        """Returns the one bit that stands for a piece in a value."""
        return 1 << (piece[0] * self.plan.num_chunks + piece[1])

    def _piece(self, rank: int, chunk: int) -> Value:
        return Value(self.bit((rank, chunk)), 0, -(rank * self.plan.num_chunks + chunk) - 1)

    def _combined(self, left: Value, right: Value) -> Value:
        twice = left.twice | right.twice | (left.pieces & right.pieces)
        key = (left.expression, right.expression)
        return Value(left.pieces | right.pieces, twice, self._expressions.setdefault(key, len(self._expressions)))

    def run(self) -> None:
        """Lets every rank go as far as it gets, and writes down what goes wrong."""
        ready = deque(range(self.plan.num_ranks))
        while ready:
            rank = ready.popleft()
            program = self.plan.rounds[rank]
            while (number := self._position[rank]) < len(program):
                steps = program[number]
                if not self._entered[rank]:
                    self._entered[rank] = True
                    ready.extend(self._enter(rank, number, steps))
                if self._lacking(rank, steps) is not None:
                    break
                self._finish(rank, number, steps)
                self._position[rank], self._entered[rank] = number + 1, False

    def _possible(self, rank: int, steps: Round) -> Iterator[Step]:
        return (step for step in steps if not why_impossible(step, rank, self.plan))

    def _enter(self, rank: int, number: int, steps: Round) -> list[int]:
        """Sends, then copies. Returns the ranks that are sent to."""
        held, peers = self.values[rank], []
        for step in self._possible(rank, steps):
            if isinstance(step, Send):
                lacking = [chunk for chunk in step.chunks if chunk not in held]
                if lacking:
                    self._complain(rank, number, step, f"sends chunk {lacking[0]}, which the rank does not have")
                values = tuple(held.get(chunk) for chunk in step.chunks)
                message = _Message(values, step.chunks, number, self.heard[rank])
                self._sent.setdefault((rank, step.peer), deque()).append(message)
                peers.append(step.peer)
        copied: dict[int, Value] = {}
        for step in self._possible(rank, steps):
            if isinstance(step, Copy):
                if step.source not in held:
                    self._complain(rank, number, step, f"copies chunk {step.source}, which the rank does not have")
                elif held[step.source] in (held.get(step.chunk), copied.get(step.chunk)):
                    self._complain(rank, number, step, "copies what is there already")
                else:
                    copied[step.chunk] = held[step.source]
        held.update(copied)
        return peers

    def _lacking(self, rank: int, steps: Round) -> int | None:
        """Returns a rank whose message a round waits for; None: all are there."""
        wanted: dict[int, int] = {}
        for step in self._possible(rank, steps):
            if isinstance(step, Recv | Reduce):
                wanted[step.peer] = wanted.get(step.peer, 0) + 1
        for peer, count in wanted.items():
            if len(self._sent.get((peer, rank), ())) < count:
                return peer
        return None

    def _finish(self, rank: int, number: int, steps: Round) -> None:
        written: set[int] = set()
        for step in self._possible(rank, steps):
            if isinstance(step, Recv | Reduce):
                message = self._sent[step.peer, rank].popleft()
                self.heard[rank] |= message.heard
                self._compare(rank, number, step, message)
                for chunk, value in zip(step.chunks, message.values, strict=False):
                    if isinstance(step, Recv) and chunk in written:
                        self._complain(rank, number, step, f"overwrites chunk {chunk}, which came in the same round")
                    self._receive(rank, number, step, chunk, value)
                written.update(step.chunks)

    def _compare(self, rank: int, number: int, step: Recv | Reduce, message: _Message) -> None:
        """Says where a receive meets a message of other chunks; for two ranks once, for the rest follows from it."""
        same = step.chunks == message.numbers
        if not self.keeps_numbers:
            same = len(step.chunks) == len(message.numbers)
        if not same and (step.peer, rank) not in self._crossed:
            self._crossed.add((step.peer, rank))
            sent = Send(rank, message.numbers)
            self._complain(rank, number, step, f"meets {sent} of rank {step.peer}, round {message.number}")

    def _receive(self, rank: int, number: int, step: Recv | Reduce, chunk: int, value: Value | None) -> None:
        held = self.values[rank]
        self.seen[rank] |= 0 if value is None else value.pieces
        if isinstance(step, Reduce):
            own = held.get(chunk)
            if own is None:
                self._complain(rank, number, step, f"combines chunk {chunk}, which the rank does not have")
            elif value is not None:
                held[chunk] = self._combined(value, own) if step.received_first else self._combined(own, value)
        elif value is not None:
            held[chunk] = value

    def _complain(self, rank: int, number: int, step: Step, text: str) -> None:
        self.problems.append(f"{place_of(rank, number)}: {step} {text}")

    def standing(self) -> dict[int, Standing]:
        """Returns those that cannot go on, by rank."""
        found = {}
        for rank, number in enumerate(self._position):
            if number < len(self.plan.rounds[rank]):
                peer = self._lacking(rank, self.plan.rounds[rank][number])
                assert peer is not None, "a rank that lacks nothing goes on"
                found[rank] = Standing(rank, number, peer)
        return found

    def unreceived(self, standing: Iterable[int]) -> Iterator[str]:
        """Yields a problem for each two ranks with messages left, unless the receiver stands still: that is why."""
        for (src, dst), messages in self._sent.items():
            if messages and dst not in set(standing):
                first = messages[0]
                text = f"{place_of(src, first.number)}: {Send(dst, first.numbers)} is never received"
                yield text if len(messages) == 1 else f"{text}, nor are {len(messages) - 1} more to rank {dst}"


def place_of(rank: int, number: int) -> str:
    """Writes a rank and a round."""
    return f"rank {rank}, round {number}"
