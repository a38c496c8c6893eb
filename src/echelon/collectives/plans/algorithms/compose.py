"""Composition of plans: in sequence, reversed, and on a subset of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from echelon.collectives.plans.plan import Copy, Numbers, Plan, Program, Recv, Reduce, Send, Step


def joined(name: str, *plans: Plan) -> Plan:
    """Returns the plan that runs plans of equally many ranks one after the other."""
    num_chunks = max(plan.num_chunks for plan in plans)  # chunks keep their numbers from plan to plan
    programs = zip(*(plan.rounds for plan in plans), strict=True)
    return Plan(name, num_chunks, tuple(sum(parts, ()) for parts in programs))


def mirrored(name: str, plan: Plan, reduces: bool = False) -> Plan:
    """Returns the plan that sends every message back, the last first.

    A scatter becomes a gather, a reduce-scatter an all-gather. With `reduces`, the messages are combined, and a
    broadcast becomes a reduce.
    """
    rounds = (
        tuple(tuple(_returned(step, reduces) for step in reversed(steps)) for steps in reversed(program))
        for program in plan.rounds
    )
    return Plan(name, plan.num_chunks, tuple(rounds))


def _returned(step: Step, reduces: bool) -> Step:
    assert not isinstance(step, Copy), "a copy cannot be taken back"
    # The receiver of a message sends it back: a reduction of a reduce-scatter becomes a send of the all-gather.
    if not isinstance(step, Send):
        return Send(step.peer, step.chunks)
    return Reduce(step.peer, step.chunks) if reduces else Recv(step.peer, step.chunks)


class Part(NamedTuple):
    """Plan for some ranks of a larger plan. Each of its chunks is several chunks of the larger plan."""

    plan: Plan
    ranks: Numbers
    """For each rank of `plan`, its rank in the larger plan."""
    chunks: Sequence[Numbers]
    """For each chunk of `plan`, its chunks in the larger plan."""

    def programs(self) -> Iterator[tuple[int, Program]]:
        """Yields each rank of the larger plan that takes part, with its rounds."""
        for rank, program in zip(self.ranks, self.plan.rounds, strict=True):
            yield rank, tuple(tuple(map(self._placed, steps)) for steps in program)

    def _placed(self, step: Step) -> Step:
        assert not isinstance(step, Copy), "a copy has no place in a part of a plan"
        numbers = tuple(number for chunk in step.chunks for number in self.chunks[chunk])
        return step._replace(peer=self.ranks[step.peer], chunks=numbers)


def assembled(name: str, num_ranks: int, num_chunks: int, parts: Iterable[Part]) -> Plan:
    """Returns the plan in which every rank runs its parts one after the other."""
    programs: list[Program] = [()] * num_ranks
    # Parts of disjoint ranks run at the same time: only messages order ranks, not the numbers of rounds.
    for part in parts:
        for rank, program in part.programs():
            programs[rank] += program
    return Plan(name, num_chunks, tuple(programs))
