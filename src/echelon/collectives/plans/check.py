"""Checker of plans: runs a plan on symbolic values and compares the end with the goal of the collective.

A symbolic value records the pieces that were combined into it, the pieces combined twice, and the order. So a plan that
passes is proven for every tensor and every operator that is commutative and associative. If several ranks end with the
same sum, it was added up in the same order, so floats are bit-identical.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from echelon.collectives.plans.plan import Copy, Numbers, Plan, Recv, Reduce, Round, Send, Step
from echelon.errors import PlanError
from echelon.wording import itemized

Piece: TypeAlias = tuple[int, int]
"""Initial value of a chunk on a rank, as rank and number of the chunk."""


@dataclass(frozen=True)
class Goal:
    """Goal of a collective: the chunks of each rank at its start and at its end.

    Args:
        start: For each rank, the chunks that it has.
        end: For each rank and each chunk that it must have, the pieces that it must contain, each once.
        keeps_numbers: A chunk has the same number on its sender and its receiver.
        meets: Every rank must have heard of every other, directly or through others.
    """

    start: tuple[frozenset[int], ...]
    end: tuple[dict[int, frozenset[Piece]], ...]
    keeps_numbers: bool = True
    meets: bool = False


def goal_of(operation: str, plan: Plan, root: int = 0) -> Goal:
    """Returns the goal of a plan for an operation: the chunks that each rank holds at the end.

    Args:
        operation: one of `algorithms.OPERATIONS`.
        plan: the plan, for its ranks and chunks.
        root: rank that sends or gets the tensor, where there is one.

    Raises:
        KeyError: `operation` is none of them.
    """
    return _GOALS[operation](plan.num_ranks, plan.num_chunks, root)


def _all_reduce(num_ranks: int, num_chunks: int, _: int) -> Goal:
    chunks = range(num_chunks)
    return Goal(_everything(num_ranks, chunks), ({chunk: _sum(num_ranks, chunk) for chunk in chunks},) * num_ranks)


def _reduce(num_ranks: int, num_chunks: int, dst: int) -> Goal:
    chunks = range(num_chunks)
    end: list[dict[int, frozenset[Piece]]] = [{} for _ in range(num_ranks)]
    end[dst] = {chunk: _sum(num_ranks, chunk) for chunk in chunks}
    return Goal(_everything(num_ranks, chunks), tuple(end))


def _broadcast(num_ranks: int, num_chunks: int, src: int) -> Goal:
    chunks = range(num_chunks)
    return Goal(_only(src, num_ranks, chunks), ({chunk: frozenset({(src, chunk)}) for chunk in chunks},) * num_ranks)


def _all_gather(num_ranks: int, _: int, __: int) -> Goal:
    return Goal(_own(num_ranks), ({rank: frozenset({(rank, rank)}) for rank in range(num_ranks)},) * num_ranks)


def _reduce_scatter(num_ranks: int, _: int, __: int) -> Goal:
    end = tuple({rank: _sum(num_ranks, rank)} for rank in range(num_ranks))
    return Goal(_everything(num_ranks, range(num_ranks)), end)


def _gather(num_ranks: int, _: int, dst: int) -> Goal:
    end: list[dict[int, frozenset[Piece]]] = [{} for _ in range(num_ranks)]
    end[dst] = {rank: frozenset({(rank, rank)}) for rank in range(num_ranks)}
    return Goal(_own(num_ranks), tuple(end))


def _scatter(num_ranks: int, _: int, src: int) -> Goal:
    end = tuple({rank: frozenset({(src, rank)})} for rank in range(num_ranks))
    return Goal(_only(src, num_ranks, range(num_ranks)), end)


def _all_to_all(num_ranks: int, _: int, __: int) -> Goal:
    ranks = range(num_ranks)
    # Received parts are chunks p to 2 p - 1, so they never overwrite parts to be sent.
    end = tuple({num_ranks + src: frozenset({(src, rank)}) for src in ranks} for rank in ranks)
    return Goal(_everything(num_ranks, ranks), end, keeps_numbers=False)


def _barrier(num_ranks: int, _: int, __: int) -> Goal:
    return Goal(_everything(num_ranks, range(0)), ({},) * num_ranks, meets=True)


_GOALS = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}


def _sum(num_ranks: int, chunk: int) -> frozenset[Piece]:
    return frozenset((rank, chunk) for rank in range(num_ranks))


def _everything(num_ranks: int, chunks: range) -> tuple[frozenset[int], ...]:
    return (frozenset(chunks),) * num_ranks


def _only(root: int, num_ranks: int, chunks: range) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(chunks if rank == root else ()) for rank in range(num_ranks))


def _own(num_ranks: int) -> tuple[frozenset[int], ...]:
    return tuple(frozenset({rank}) for rank in range(num_ranks))


def why_impossible(step: Step, rank: int, plan: Plan) -> str:
    """Returns the mistake of a step by itself. "" if there is none."""
    chunks = (step.source, step.chunk) if isinstance(step, Copy) else step.chunks
    if any(not 0 <= chunk < plan.num_chunks for chunk in chunks):
        return f"names a chunk that does not exist: there are {plan.num_chunks}"
    if isinstance(step, Copy):
        return ""
    # A chunk twice in one message would be combined twice, or overwrite itself.
    if len(set(chunks)) != len(chunks):
        return "names a chunk twice"
    if not 0 <= step.peer < plan.num_ranks:
        return f"names a rank that does not exist: there are {plan.num_ranks}"
    return "is a message of the rank to itself" if step.peer == rank else ""


class Value(NamedTuple):
    """Symbolic value of a chunk: sets of pieces as the bits of an int, and the number of its expression.

    Equal expression numbers mean the same pieces combined in the same order.
    """

    pieces: int
    twice: int
    expression: int


class _Message(NamedTuple):
    values: tuple[Value | None, ...]
    numbers: Numbers
    number: int
    """Number of the sender's round."""
    heard: int
    """Ranks that the sender has heard of, as bits."""


class Standing(NamedTuple):
    """Rank that cannot finish a round, and the rank whose message is missing."""

    rank: int
    number: int
    peer: int


class Play:
    """Symbolic run of a plan. Messages between two ranks arrive in the order of their sends, and a send never waits."""

    def __init__(self, plan: Plan, goal: Goal) -> None:
        self.plan = plan
        self.keeps_numbers = goal.keeps_numbers
        self.problems: list[str] = []
        self.heard = [1 << rank for rank in range(plan.num_ranks)]
        # A number for each expression: comparing the expressions themselves would take time that grows with p.
        self._expressions: dict[tuple[int, int], int] = {}
        self.values = [{chunk: self._piece(rank, chunk) for chunk in chunks} for rank, chunks in enumerate(goal.start)]
        self.seen = [sum(value.pieces for value in held.values()) for held in self.values]
        """For each rank, all pieces that it ever had, as bits."""
        self._position = [0] * plan.num_ranks
        self._entered = [False] * plan.num_ranks
        self._sent: dict[tuple[int, int], deque[_Message]] = {}
        self._crossed: set[tuple[int, int]] = set()

    def bit(self, piece: Piece) -> int:
        """Returns the bit of a piece in `Value.pieces`."""
        return 1 << (piece[0] * self.plan.num_chunks + piece[1])

    def _piece(self, rank: int, chunk: int) -> Value:
        # Negative numbers, since expressions that combine two values count up from 0.
        return Value(self.bit((rank, chunk)), 0, -(rank * self.plan.num_chunks + chunk) - 1)

    def _combined(self, left: Value, right: Value) -> Value:
        # Pieces on both sides are counted twice. A set alone would hide that.
        twice = left.twice | right.twice | (left.pieces & right.pieces)
        key = (left.expression, right.expression)
        return Value(left.pieces | right.pieces, twice, self._expressions.setdefault(key, len(self._expressions)))

    def run(self) -> None:
        """Runs every rank until it ends or waits for ever, and collects the problems."""
        ready = deque(range(self.plan.num_ranks))
        while ready:
            rank = ready.popleft()
            program = self.plan.rounds[rank]
            while (number := self._position[rank]) < len(program):
                steps = program[number]
                # A rank comes back to a round that it has entered when a message arrives; it must not send again.
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
        """Runs the Sends and Copies of a round, and returns the ranks that were sent to."""
        # Sends before copies: a message holds the chunks as they were at the start of the round.
        held, peers = self.values[rank], []
        for step in self._possible(rank, steps):
            if isinstance(step, Send):
                lacking = [chunk for chunk in step.chunks if chunk not in held]
                if lacking:
                    self._complain(rank, number, step, f"sends chunk {lacking[0]}, which the rank does not have")
                # It is sent all the same: its receiver would otherwise report a wait that is not the mistake.
                values = tuple(held.get(chunk) for chunk in step.chunks)
                message = _Message(values, step.chunks, number, self.heard[rank])
                self._sent.setdefault((rank, step.peer), deque()).append(message)
                peers.append(step.peer)
        copied: dict[int, Value] = {}
        for step in self._possible(rank, steps):
            if isinstance(step, Copy):
                if step.source not in held:
                    self._complain(rank, number, step, f"copies chunk {step.source}, which the rank does not have")
                # A copy without an effect: the algorithm meant another chunk.
                elif held[step.source] in (held.get(step.chunk), copied.get(step.chunk)):
                    self._complain(rank, number, step, "copies a value that is there already")
                else:
                    copied[step.chunk] = held[step.source]
        held.update(copied)
        return peers

    def _lacking(self, rank: int, steps: Round) -> int | None:
        """Returns a rank whose message a round waits for. None if all messages are there."""
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
        """Reports a receive that meets a message of other chunks."""
        # Once for each two ranks: after the first mismatch, all later messages between them are off as well.
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
        """Returns the ranks that cannot go on, each with its wait."""
        found = {}
        for rank, number in enumerate(self._position):
            if number < len(self.plan.rounds[rank]):
                peer = self._lacking(rank, self.plan.rounds[rank][number])
                assert peer is not None, "a rank that lacks nothing goes on"
                found[rank] = Standing(rank, number, peer)
        return found

    def unreceived(self, standing: Iterable[int]) -> Iterator[str]:
        """Yields a problem for each pair of ranks with unreceived messages."""
        # Not if the receiver stands still: that has been reported, and is the reason.
        for (src, dst), messages in self._sent.items():
            if messages and dst not in set(standing):
                first = messages[0]
                text = f"{place_of(src, first.number)}: {Send(dst, first.numbers)} is never received"
                yield text if len(messages) == 1 else f"{text}, nor are {len(messages) - 1} more to rank {dst}"


def place_of(rank: int, number: int) -> str:
    """Returns the text of a place: a rank and a round."""
    return f"rank {rank}, round {number}"


# Number of ranks that a problem lists.
_MOST_RANKS = 16


def check(plan: Plan, goal: Goal) -> None:
    """Proves that a plan reaches its goal; see `goal_of`.

    Args:
        plan: the plan.
        goal: what every rank holds at the end.

    Raises:
        PlanError: the plan does not reach it. The message lists the problems with rank and round, of many
            alike the first three.
    """
    problems = find_problems(plan, goal)
    if not problems:
        return
    lines = [f"plan {plan.name!r} has {len(problems)} problem{'s' if len(problems) > 1 else ''}:"]
    raise PlanError("\n".join([*lines, *itemized(problems)]))


def find_problems(plan: Plan, goal: Goal) -> list[str]:
    """Returns every mistake of a plan, causes before their consequences."""
    if len(goal.start) != plan.num_ranks:
        return [f"it is for {plan.num_ranks} ranks, its goal for {len(goal.start)}"]
    # Impossible steps are reported here alone, and left out of the play, which could not run them.
    problems = list(_impossible(plan))
    play = Play(plan, goal)
    play.run()
    problems += play.problems
    standing = play.standing()
    problems += _deadlocks(standing)
    problems += play.unreceived(standing)
    # After a deadlock every end is wrong, which would hide the reason.
    if not standing:
        problems += _compared(play, goal)
    return problems


def _impossible(plan: Plan) -> Iterator[str]:
    """Yields a problem for each step that is wrong by itself."""
    for rank, program in enumerate(plan.rounds):
        for number, steps in enumerate(program):
            for step in steps:
                if why := why_impossible(step, rank, plan):
                    yield f"{place_of(rank, number)}: {step} {why}"


def _deadlocks(standing: dict[int, Standing]) -> Iterator[str]:
    """Yields a problem for each rank that waits for a message that is never sent, and for each cycle of waits."""
    # Each rank waits for one other, so following the waits ends at a rank that has finished, or in a cycle.
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
            yield f"{place_of(last.rank, last.number)}: waits for a message from rank {last.peer}, which sends no more"
        elif rank in path:
            waits = (standing[member] for member in path[path.index(rank) :])
            listed = "; ".join(f"{place_of(wait.rank, wait.number)} for rank {wait.peer}" for wait in waits)
            yield f"ranks wait for each other (deadlock): {listed}"


def _compared(play: Play, goal: Goal) -> Iterator[str]:
    """Yields the differences between the chunks of the ranks at the end and the goal."""
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
            # Cached: in an all-reduce all ranks have the same goals, and a goal has a piece of every rank.
            mask = masks.setdefault(pieces, 0) or sum(map(play.bit, pieces))
            masks[pieces] = mask
            yield from _differences(rank, chunk, value, mask, play)
            other, expression = makers.setdefault(mask, (rank, value.expression))
            # Only of right sums: another set of pieces has been reported already.
            if value.pieces == mask and expression != value.expression:
                yield f"rank {rank} combines chunk {chunk} in another order than rank {other}: sums differ in rounding"


def _differences(rank: int, chunk: int, value: Value, mask: int, play: Play) -> Iterator[str]:
    for what, pieces in (
        ("lacks", mask & ~value.pieces),
        ("wrongly holds", value.pieces & ~mask),
        ("counts twice", value.twice),
    ):
        if pieces:
            listed = list(_pieces(pieces, play.plan.num_chunks))
            more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
            text = f"rank {rank} ends with a chunk {chunk} that {what} {', '.join(listed[:4])}{more}"
            yield text if what != "lacks" else f"{text} (seen on {_holders(pieces & -pieces, play)})"


def _holders(piece: int, play: Play) -> str:
    """Returns the ranks that ever had a piece. The mistake is near the last of them that should have sent it on."""
    ranks = [rank for rank, pieces in enumerate(play.seen) if pieces & piece]
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    listed = ", ".join(map(str, ranks[:_MOST_RANKS]))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}" if ranks else "no rank"


def _pieces(mask: int, num_chunks: int) -> Iterator[str]:
    while mask:
        rank, chunk = divmod(_lowest(mask), num_chunks)
        yield f"chunk {chunk} of rank {rank}"
        mask &= mask - 1


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1
