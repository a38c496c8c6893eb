"""Plans made of plans: one after the other, backwards in time, and on some of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from echelon.collectives.plans.plan import Copy, Numbers, Plan, Program, Recv, Reduce, Send, Step


def joined(name: str, *plans: Plan) -> Plan:
    """Makes the plan that runs others of as many ranks one after the other."""
    num_chunks = max(plan.num_chunks for plan in plans)
    programs = zip(*(plan.rounds for plan in plans), strict=True)
    return Plan(name, num_chunks, tuple(sum(parts, ()) for parts in programs))


def mirrored(name: str, plan: Plan, reduces: bool = False) -> Plan:
    """Makes the plan that takes every message back, the last first.

    So a scatter becomes a gather, a reduce-scatter an all-gather and, if what comes back `reduces`, a broadcast a
    reduce.
    """
    rounds = (
        tuple(tuple(_returned(step, reduces) for step in reversed(steps)) for steps in reversed(program))
        for program in plan.rounds
    )
    return Plan(name, plan.num_chunks, tuple(rounds))


def _returned(step: Step, reduces: bool) -> Step:
    assert not isinstance(step, Copy), "a copy cannot be taken back"
    if not isinstance(step, Send):
        return Send(step.peer, step.chunks)
    return Reduce(step.peer, step.chunks) if reduces else Recv(step.peer, step.chunks)


class Part(NamedTuple):
    """A plan that some of the ranks run, each of its chunks as several of a larger plan."""

    plan: Plan
    ranks: Numbers
    """Of the larger plan, by those of this one."""
    chunks: Sequence[Numbers]
    """Of the larger plan, by those of this one."""

    def programs(self) -> Iterator[tuple[int, Program]]:
        """Returns the rounds of each rank of the larger plan that has any."""
        for rank, program in zip(self.ranks, self.plan.rounds, strict=True):
            yield rank, tuple(tuple(map(self._placed, steps)) for steps in program)

    def _placed(self, step: Step) -> Step:
        assert not isinstance(step, Copy), "a copy has no place in a part of a plan"
        numbers = tuple(number for chunk in step.chunks for number in self.chunks[chunk])
        return step._replace(peer=self.ranks[step.peer], chunks=numbers)


def assembled(name: str, num_ranks: int, num_chunks: int, parts: Iterable[Part]) -> Plan:
    """Makes the plan in which every rank runs those parts that it is in, one after the other."""
    programs: list[Program] = [()] * num_ranks
    for part in parts:
        for rank, program in part.programs():
            programs[rank] += program
    return Plan(name, num_chunks, tuple(programs))
