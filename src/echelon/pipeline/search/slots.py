"""Slot scheduler: warm-up forwards, then in each slot one backward and one forward on every rank.

A rank with several stages takes the stage nearest to the end of the microbatch's way whose input is known: the last
stage for a forward, the first for a backward. That frees memory soonest. A rank without room for a forward skips the
slot. With `backward_first`, a rank also skips it if the next rank has enough forwards and a gradient would have to wait
for this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echelon.pipeline.plan.action import Kind
from echelon.pipeline.search.problem import Problem
from echelon.pipeline.search.weight_placement import Filled, Filler


def fill_slots(
    problem: Problem, warm_ups: Sequence[Sequence[int]], patience: int = 0, backward_first: bool = False
) -> Filled | None:
    """Returns a schedule that starts with the warm-ups. None if they do not fit the limits, or ranks deadlock.

    Args:
        problem: The problem to solve.
        warm_ups: For each rank, the stages of its first forwards.
        patience: See `Filler`.
        backward_first: Forwards give way to gradients. For one stage per rank.
    """
    slots = _Slots(problem, patience)
    if not slots.warm_up(warm_ups):
        return None
    left = 2 * problem.num_stages * problem.num_microbatches - sum(map(len, warm_ups))
    while left:
        done = slots.backwards()
        done += slots.giving_way() if backward_first else slots.forwards()
        # If every rank gives way nothing happens, so forwards run after all.
        if not done and not (done := slots.forwards()):
            return None
        left -= done
    return slots.filler.finish()


class _Slots:
    def __init__(self, problem: Problem, patience: int) -> None:
        self.filler = Filler(problem, patience)
        self._problem = problem
        self._num_ranks = problem.num_ranks
        self._num_microbatches = problem.num_microbatches
        self._stages = [problem.stages_of(rank) for rank in range(problem.num_ranks)]
        self._next: dict[Kind, list[int]] = {kind: [0] * problem.num_stages for kind in ("F", "I")}

    def warm_up(self, warm_ups: Sequence[Sequence[int]]) -> bool:
        """Places the warm-up forwards. False if they do not fit or wait for ever."""
        position, left = [0] * self._num_ranks, sum(map(len, warm_ups))
        while left:
            before = left
            for rank, stages in enumerate(warm_ups):
                while position[rank] < len(stages) and self._on_its_way("F", stages[position[rank]]):
                    if not self._put("F", stages[position[rank]]):
                        return False
                    position[rank] += 1
                    left -= 1
            if left == before:
                return False
        return True

    def forwards(self) -> int:
        """Places one forward on each rank that has one, from the first rank on. Returns their number."""
        return sum(self._put_first("F", reversed(stages)) for stages in self._stages)

    def giving_way(self) -> int:
        """Places forwards as `forwards` does, except on ranks that give way and on the ranks before them."""
        last = self._num_ranks - 1
        first = next((rank + 1 for rank in reversed(range(last)) if self._gives_way(rank)), 0)
        return sum(self._put_first("F", [stage]) for stage in range(first, last + 1))

    def _gives_way(self, rank: int) -> bool:
        """Whether the next rank has pending forwards, and an F here would end after the next gradient arrives."""
        problem, filler = self._problem, self.filler
        done = self._next["F"]
        if done[rank] >= self._num_microbatches or done[rank] < done[rank + 1] + 2:
            return False
        gradient = filler.free_at(rank + 1) + problem.forward[rank + 1] + problem.backward_input[rank + 1]
        gradient += problem.transfer[rank]
        start = filler.free_at(rank) + filler.time_to_room(rank, problem.activation[rank])
        return start + problem.forward[rank] > gradient and filler.may_wait(rank, gradient)

    def backwards(self) -> int:
        """Places one backward on each rank that has one, and returns their number.

        Ranks whose gradient was known when the slot began come first. The other ranks may use gradients of this slot.
        They do so only in their last unfinished stage of the model, which keeps the order of their stages.
        """
        put, rest = 0, []
        picks = [next((stage for stage in own if self._on_its_way("I", stage)), None) for own in self._stages]
        for rank, stage in enumerate(picks):
            if stage is None:
                rest.append(rank)
            else:
                put += self._put("I", stage)
        # Gradients travel both ways over the ranks of a V, so both directions are tried.
        for again in (rest, rest[::-1]):
            for rank in again:
                unfinished = [s for s in self._stages[rank] if self._next["I"][s] < self._num_microbatches]
                if picks[rank] is None and unfinished and self._on_its_way("I", unfinished[-1]):
                    picks[rank] = unfinished[-1]
                    put += self._put("I", unfinished[-1])
        return put

    def _put_first(self, kind: Kind, stages: Iterable[int]) -> bool:
        stage = next((stage for stage in stages if self._on_its_way(kind, stage)), None)
        return stage is not None and self._put(kind, stage)

    def _on_its_way(self, kind: Kind, stage: int) -> bool:
        microbatch = self._next[kind][stage]
        return microbatch < self._num_microbatches and self.filler.arrival(kind, stage, microbatch) is not None

    def _put(self, kind: Kind, stage: int) -> bool:
        microbatch = self._next[kind][stage]
        arrival = self.filler.arrival(kind, stage, microbatch)
        assert arrival is not None
        if not self.filler.put(kind, stage, microbatch, arrival):
            return False
        self._next[kind][stage] = microbatch + 1
        return True
