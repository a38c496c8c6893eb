"""Simulator of plans on a virtual clock.

A message of b bytes takes alpha + b beta, and combining it b gamma more. A rank sends one message at a time, and at the
same time receives and combines one (the single-port model of Hockney, 1994). A round ends when its messages have left,
have arrived, and are combined. A message starts when both of its ranks have come to its rounds. If ranks would
otherwise deadlock, the earliest pending message starts before its receiver has come to its round. With whole numbers or
Fractions the times are exact.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from echelon.collectives.plans.plan import Copy, Plan, Recv, Reduce, Round, Send, text_of_round
from echelon.errors import PlanError
from echelon.timeline.timeline import Time, Timeline, Transfer


@dataclass(frozen=True)
class LinkCosts:
    """Costs of messages.

    Args:
        alpha: Seconds per message (latency).
        beta: Seconds per byte of a message.
        gamma: Seconds to combine a byte with another.
        hosts: The host of each rank, by any name. None: every rank is on a host of its own.
        local_alpha, local_beta: The same for a message inside a host. None: as between hosts.
    """

    alpha: Time
    beta: Time
    gamma: Time = 0
    hosts: Sequence[object] | None = None
    local_alpha: Time | None = None
    local_beta: Time | None = None

    def of_message(self, src: int, dst: int, num_bytes: Time) -> Time:
        """Returns the time of a message in seconds, without combining.

        Args:
            src, dst: ranks of the sender and the receiver.
            num_bytes: bytes of the message.
        """
        alpha, beta = self.alpha, self.beta
        if self.hosts is not None and self.hosts[src] == self.hosts[dst]:
            alpha = alpha if self.local_alpha is None else self.local_alpha
            beta = beta if self.local_beta is None else self.local_beta
        return alpha + num_bytes * beta


def simulate(plan: Plan, chunk_bytes: Time, costs: LinkCosts) -> Timeline:
    """Simulates a plan that `check` accepts. Returns its timeline, in seconds.

    A span of the timeline is a round of a rank, from the start of its first message. Its step is text, such as
    "exchange [0>1 1<1]".

    Args:
        plan: The plan.
        chunk_bytes: Size of every chunk; see `algorithms.chunk_bytes`.
        costs: Costs of messages and of combining.

    Raises:
        PlanError: a rank waits for a message that is never sent.
    """
    play = _Play(plan, chunk_bytes, costs)
    play.run()
    return play.timeline()


class _Move(NamedTuple):
    """Message that is pending, in flight or done."""

    src: int
    dst: int
    num_bytes: Time
    cause: int
    """Index of the sender's span before it. -1 if there is none."""
    start: Time = 0
    end: Time = 0


class _Rank:
    """State of a rank: its round, its messages, and the times at which its two ports are free."""

    def __init__(self) -> None:
        self.number = 0
        self.entered: Time = 0
        self.to_send: deque[_Move] = deque()
        self.sent: list[_Move] = []
        self.out_free: Time = 0
        self.in_free: Time = 0
        self.arrived: defaultdict[int, deque[_Move]] = defaultdict(deque)
        """Arrived messages by sender, those of later rounds included."""
        self.steps: list[str] = []
        self.starts: list[Time] = []
        self.ends: list[Time] = []


class _Play:
    """Simulation of a plan, message by message in the order of their possible starts."""

    def __init__(self, plan: Plan, chunk_bytes: Time, costs: LinkCosts) -> None:
        self._plan = plan
        self._chunk_bytes = chunk_bytes
        self._costs = costs
        self._ranks = [_Rank() for _ in range(plan.num_ranks)]
        self._ready: list[tuple[Time, int]] = []
        """Heap of (earliest possible start of a rank's next message, rank)."""
        self._early: dict[int, Time] = {}
        """Ranks whose next message waits for its receiver to come to its round, and since when."""
        self._transfers: list[Transfer] = []

    def run(self) -> None:
        for rank in range(self._plan.num_ranks):
            self._enter(rank, 0)
            self._advance(rank)
        while self._ready or self._early:
            if self._ready:
                time, src = heapq.heappop(self._ready)
                is_forced = False
            else:
                # No message can start by the rules, so the one that has waited longest is sent early.
                time, src = min((time, src) for src, time in self._early.items())
                del self._early[src]
                is_forced = True
            move = self._ranks[src].to_send[0]
            receiver = self._ranks[move.dst]
            possible = receiver.in_free if is_forced else max(receiver.in_free, receiver.entered)
            # A message of a later round does not take the receiver's port from those of this round.
            if not is_forced and not self._is_wanted(move):
                self._early[src] = time
            # Back to the heap at its possible start: another message may use the receiver's port before.
            elif possible > time and not is_forced:
                heapq.heappush(self._ready, (possible, src))
            else:
                self._move(move, max(time, possible))
        self._complain_of_waits()  # only a plan that `check` refuses has any

    def _is_wanted(self, move: _Move) -> bool:
        receiver = self._ranks[move.dst]
        return len(receiver.arrived[move.src]) < self._num_receives(move.dst, move.src)

    def _num_receives(self, rank: int, peer: int) -> int:
        """Returns the number of messages from `peer` that a rank's current round receives."""
        return sum(isinstance(step, Recv | Reduce) and step.peer == peer for step in self._round(rank) or ())

    def _move(self, move: _Move, time: Time) -> None:
        sender, receiver = self._ranks[move.src], self._ranks[move.dst]
        end = time + self._costs.of_message(move.src, move.dst, move.num_bytes)
        moved = sender.to_send.popleft()._replace(start=time, end=end)
        sender.out_free = receiver.in_free = end  # one message out and one in at a time: a single port each way
        sender.sent.append(moved)
        receiver.arrived[move.src].append(moved)
        if sender.to_send:
            heapq.heappush(self._ready, (end, move.src))
        self._advance(move.src)
        self._advance(move.dst)

    def _round(self, rank: int) -> Round | None:
        program, number = self._plan.rounds[rank], self._ranks[rank].number
        return program[number] if number < len(program) else None

    def _enter(self, rank: int, time: Time) -> None:
        """Begins the next round of a rank, and wakes the messages that waited for it."""
        state, steps = self._ranks[rank], self._round(rank) or ()
        state.entered, state.sent = time, []
        for step in steps:
            if isinstance(step, Send):
                num_bytes = len(step.chunks) * self._chunk_bytes
                state.to_send.append(_Move(rank, step.peer, num_bytes, len(state.ends) - 1))
            elif not isinstance(step, Copy) and step.peer in self._early:
                heapq.heappush(self._ready, (max(time, self._early.pop(step.peer)), step.peer))
        if state.to_send:
            heapq.heappush(self._ready, (max(time, state.out_free), rank))

    def _advance(self, rank: int) -> None:
        """Finishes the rounds of a rank whose messages all have a start and an end."""
        state = self._ranks[rank]
        while (steps := self._round(rank)) is not None:
            receives = [step for step in steps if isinstance(step, Recv | Reduce)]
            lacks = any(len(state.arrived[step.peer]) < self._num_receives(rank, step.peer) for step in receives)
            if state.to_send or lacks:
                return
            time = state.entered
            moves = list(state.sent)
            for step in receives:
                move = state.arrived[step.peer].popleft()
                moves.append(move)
                time = max(time, move.end) + (move.num_bytes * self._costs.gamma if isinstance(step, Reduce) else 0)
                # A receiver's span begins when its first message starts, so the transfer ends then: the time of the
                # message itself is part of the span.
                if move.cause >= 0:
                    transfer = Transfer(move.src, move.cause, rank, len(state.ends), move.start, move.start)
                    self._transfers.append(transfer)
            end = max([time, *(move.end for move in moves)])
            # A round of copies alone takes no time and has no span.
            if moves:
                state.steps.append(f"{_kind(steps)} [{text_of_round(steps)}]")
                state.starts.append(max(state.entered, min(move.start for move in moves)))
                state.ends.append(end)
            state.number += 1
            self._enter(rank, end)

    def _complain_of_waits(self) -> None:
        for rank, state in enumerate(self._ranks):
            if self._round(rank) is not None:
                raise PlanError(
                    f"plan {self._plan.name!r}: rank {rank} waits for ever in round {state.number}: check it"
                )

    def timeline(self) -> Timeline:
        return Timeline(
            steps=tuple(tuple(state.steps) for state in self._ranks),
            starts=tuple(tuple(state.starts) for state in self._ranks),
            ends=tuple(tuple(state.ends) for state in self._ranks),
            transfers=tuple(self._transfers),
            name=self._plan.name,
            unit="s",
        )


def _kind(steps: Round) -> str:
    sends = any(isinstance(step, Send) for step in steps)
    if any(isinstance(step, Reduce) for step in steps):
        return "exchange and reduce" if sends else "reduce"
    receives = any(isinstance(step, Recv) for step in steps)
    return "exchange" if sends and receives else "send" if sends else "receive"
