"""Plans made of plans: one after the other, backwards in time, and on some of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.collectives.plan import Copy, Numbers, Plan, Recv, Reduce, Round, Send, Step


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


def embedded(plan: Plan, ranks: Sequence[int], chunks: Sequence[Numbers]) -> dict[int, tuple[Round, ...]]:
    """Returns the programs of a plan as those of `ranks`, each of its chunks as several of a larger plan."""

    def placed(step: Step) -> Step:
        assert not isinstance(step, Copy), "a copy has no place in a part of a plan"
        numbers = tuple(number for chunk in step.chunks for number in chunks[chunk])
        return step._replace(peer=ranks[step.peer], chunks=numbers)

    return {
        rank: tuple(tuple(map(placed, steps)) for steps in program)
        for rank, program in zip(ranks, plan.rounds, strict=True)
    }
