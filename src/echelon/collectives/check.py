"""Finds the mistakes in a plan: plays it with symbols instead of numbers, and compares the end with the goal.

A symbol knows which pieces of which ranks were combined into it, which of them twice, and in what order. So a plan
that passes is proven for every tensor and every operator that is commutative and associative; and where ranks end with
the same sum, it was added up in the same order, so that floats are bit-identical.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from echelon.collectives.goal import Goal, Piece
from echelon.collectives.plan import Copy, Numbers, Plan, Recv, Reduce, Round, Send, Step
from echelon.errors import PlanError

_MOST_PRINTED = 20


def check(plan: Plan, goal: Goal) -> None:
    """Proves that a plan reaches its goal; see `goal_of`.

    Raises:
        PlanError: it does not. Lists every problem, each with its rank and round.
    """
    problems = find_problems(plan, goal)
    if not problems:
        return
    lines = [f"plan {plan.name!r} has {len(problems)} problem{'s' if len(problems) > 1 else ''}:"]
    lines += [f"  - {problem}" for problem in problems[:_MOST_PRINTED]]
    if len(problems) > _MOST_PRINTED:
        lines.append(f"  - and {len(problems) - _MOST_PRINTED} more")
    raise PlanError("\n".join(lines))


def find_problems(plan: Plan, goal: Goal) -> list[str]:
    """Returns every mistake of a plan, the first causes first."""
    if len(goal.start) != plan.num_ranks:
        return [f"it is for {plan.num_ranks} ranks, its goal for {len(goal.start)}"]
    problems = list(_impossible(plan))
    play = _Play(plan, goal)
    play.run()
    problems += play.problems
    standing = play.standing()
    problems += _deadlocks(standing)
    problems += play.unreceived(standing)
    if not standing:
        problems += _compared(play, goal)
    return problems


def _impossible(plan: Plan) -> Iterator[str]:
    """Finds steps with ranks or chunks that do not exist."""
    for rank, program in enumerate(plan.rounds):
        for number, steps in enumerate(program):
            for step in steps:
                if why := _why_impossible(step, rank, plan):
                    yield f"{_place(rank, number)}: {step} {why}"


def _why_impossible(step: Step, rank: int, plan: Plan) -> str:
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


class _Value(NamedTuple):
    """What a chunk holds: sets of pieces as the bits of a number, and the expression that made it by its number."""

    pieces: int
    twice: int
    expression: int


class _Message(NamedTuple):
    values: tuple[_Value | None, ...]
    numbers: Numbers
    number: int
    """Of the sender's round."""
    heard: int
    """The ranks that the sender knows to have come, as bits."""


class _Standing(NamedTuple):
    """A rank that can not finish a round, and the rank whose message it lacks."""

    rank: int
    number: int
    peer: int


class _Play:
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
        return 1 << (piece[0] * self.plan.num_chunks + piece[1])

    def _piece(self, rank: int, chunk: int) -> _Value:
        return _Value(self.bit((rank, chunk)), 0, -(rank * self.plan.num_chunks + chunk) - 1)

    def _combined(self, left: _Value, right: _Value) -> _Value:
        twice = left.twice | right.twice | (left.pieces & right.pieces)
        key = (left.expression, right.expression)
        return _Value(left.pieces | right.pieces, twice, self._expressions.setdefault(key, len(self._expressions)))

    def run(self) -> None:
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
        return (step for step in steps if not _why_impossible(step, rank, self.plan))

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
        copied: dict[int, _Value] = {}
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

    def _receive(self, rank: int, number: int, step: Recv | Reduce, chunk: int, value: _Value | None) -> None:
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
        self.problems.append(f"{_place(rank, number)}: {step} {text}")

    def standing(self) -> dict[int, _Standing]:
        """Returns, by rank, those that cannot go on."""
        found = {}
        for rank, number in enumerate(self._position):
            if number < len(self.plan.rounds[rank]):
                peer = self._lacking(rank, self.plan.rounds[rank][number])
                assert peer is not None, "a rank that lacks nothing goes on"
                found[rank] = _Standing(rank, number, peer)
        return found

    def unreceived(self, standing: Iterable[int]) -> Iterator[str]:
        for (src, dst), messages in self._sent.items():
            if messages and dst not in set(standing):
                first = messages[0]
                text = f"{_place(src, first.number)}: {Send(dst, first.numbers)} is never received"
                yield text if len(messages) == 1 else f"{text}, nor are {len(messages) - 1} more to rank {dst}"


def _deadlocks(standing: dict[int, _Standing]) -> Iterator[str]:
    """Says who waits for what never comes, and who waits for each other in a circle."""
    seen: set[int] = set()
    for first in standing.values():
        path: list[int] = []
        rank = first.rank
        while rank in standing and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = standing[rank].peer
        if path and rank not in standing:
            last = standing[path[-1]]
            yield f"{_place(last.rank, last.number)}: waits for a message of rank {last.peer}, which sends no more"
        elif rank in path:
            waits = (standing[member] for member in path[path.index(rank) :])
            listed = "; ".join(f"{_place(wait.rank, wait.number)} for rank {wait.peer}" for wait in waits)
            yield f"ranks wait for each other (deadlock): {listed}"


def _compared(play: _Play, goal: Goal) -> Iterator[str]:
    """Compares what ranks have at the end with what they must have."""
    everybody = (1 << play.plan.num_ranks) - 1
    makers: dict[int, tuple[int, int]] = {}
    masks: dict[frozenset[Piece], int] = {}
    for rank, wanted in enumerate(goal.end):
        if goal.meets and play.heard[rank] != everybody:
            yield f"rank {rank} goes on without knowing of rank {_lowest(everybody & ~play.heard[rank])}"
        for chunk, pieces in wanted.items():
            value = play.values[rank].get(chunk)
            if value is None:
                yield f"rank {rank} ends without chunk {chunk}"
                continue
            mask = masks.setdefault(pieces, 0) or sum(map(play.bit, pieces))
            masks[pieces] = mask
            yield from _differences(rank, chunk, value, mask, play)
            other, expression = makers.setdefault(mask, (rank, value.expression))
            if value.pieces == mask and expression != value.expression:
                yield f"rank {rank} combines chunk {chunk} in another order than rank {other}: sums differ in rounding"


def _differences(rank: int, chunk: int, value: _Value, mask: int, play: _Play) -> Iterator[str]:
    for what, pieces in (
        ("lacks", mask & ~value.pieces),
        ("holds what it must not,", value.pieces & ~mask),
        ("counts twice", value.twice),
    ):
        if pieces:
            listed = list(_pieces(pieces, play.plan.num_chunks))
            more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
            text = f"rank {rank} ends with a chunk {chunk} that {what} {', '.join(listed[:4])}{more}"
            yield text if what != "lacks" else f"{text} (seen on {_holders(pieces & -pieces, play)})"


def _holders(piece: int, play: _Play) -> str:
    """Says where a piece got to: the mistake is near the last of them that was to hand it on."""
    ranks = [rank for rank, pieces in enumerate(play.seen) if pieces & piece]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "no rank"


def _pieces(mask: int, num_chunks: int) -> Iterator[str]:
    while mask:
        rank, chunk = divmod(_lowest(mask), num_chunks)
        yield f"chunk {chunk} of rank {rank}"
        mask &= mask - 1


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _place(rank: int, number: int) -> str:
    return f"rank {rank}, round {number}"
