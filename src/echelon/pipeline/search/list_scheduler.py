"""List scheduler that improves a skeleton: ready actions overtake actions whose input has not arrived.

Each rank runs the skeleton on a clock. If the input of its next action is in flight and one of the following actions is
ready, that action goes first, if it fits the memory limit. The V-shaped schedules lose little by this and gain
most of their warm-up and drain (Pipeline Parallelism with Controllable Memory, Qi et al., 2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from echelon.pipeline.search.problem import Problem
from echelon.pipeline.search.weight_placement import Key, Skeleton


def pull_forward(problem: Problem, skeleton: Skeleton, window: int) -> Skeleton | None:
    """Returns a skeleton in which no rank idles while one of its next `window` actions is ready.

    None if ranks wait for ever.
    """
    ranks = [_RankClock(problem, own) for own in skeleton]
    arrivals: dict[Key, int] = {("F", 0, microbatch): 0 for microbatch in range(problem.num_microbatches)}
    clock = [(0, rank) for rank in range(problem.num_ranks)]
    while clock:
        now, number = heappop(clock)
        rank = ranks[number]
        # An entry that a later one has replaced: the rank has started an action meanwhile.
        if rank.free > now:
            continue
        candidates = rank.candidates(window, arrivals)
        choice = rank.choose(now, candidates)
        if choice is None:
            later = rank.wait(now, candidates)
            # Without a time, the rank is woken by the rank that produces its input.
            if later is not None:
                heappush(clock, (later, number))
            continue
        key = rank.run(choice, now)
        heappush(clock, (rank.free, number))
        for made, arrival in _made(problem, key, rank.free):
            arrivals[made] = arrival
            other = problem.placement[made[1]]
            if other != number:
                heappush(clock, (max(arrival, ranks[other].free), other))
    return None if any(rank.left for rank in ranks) else [rank.order for rank in ranks]


class _RankClock:
    """Rank on the clock. It runs a W if it has no ready action, or no room for it."""

    def __init__(self, problem: Problem, skeleton: Sequence[Key]) -> None:
        self._problem = problem
        self.left = list(skeleton)
        self.order: list[Key] = []
        self.free = 0
        self._held = 0
        self._live = 0  # memory held once all pending W's have run
        self._undone: deque[int] = deque()

    def candidates(self, window: int, arrivals: dict[Key, int]) -> list[tuple[int, int]]:
        """Returns index and arrival of the actions that may go first. An F may if everything before it still fits."""
        problem, live = self._problem, self._live
        found, highest = [], live
        for index, key in enumerate(self.left[:window]):
            kind, stage, _ = key
            amount = problem.activation[stage]
            arrival = arrivals.get(key)
            # An F that overtakes adds its memory to the peak of all actions that it overtakes. An I only frees memory.
            if arrival is not None and (kind == "I" or highest + amount <= problem.limits[problem.placement[stage]]):
                found.append((index, arrival))
            live += amount if kind == "F" else -amount
            highest = max(highest, live)
        return found

    def choose(self, now: int, candidates: list[tuple[int, int]]) -> int | None:
        """Returns the index of the first action that can run now. None if there is none, or no room for it."""
        for index, arrival in candidates:
            if arrival <= now:
                return index if self._has_room(self.left[index]) else None
        return None

    def wait(self, now: int, candidates: list[tuple[int, int]]) -> int | None:
        """Runs a W if there is time for it, and returns when to try again. None if only an arrival can help."""
        later, blocked = None, False
        for _, arrival in candidates:
            if arrival <= now:  # it would run if it had room
                blocked = True
                break
            later = arrival if later is None else min(later, arrival)
        if self._undone:
            duration = self._problem.backward_weight[self._undone[0]]
            # A W that would end after the next arrival is put off, unless its memory is needed.
            if blocked or later is None or later >= now + duration:
                stage = self._undone.popleft()
                self._held -= self._problem.kept[stage]
                self.free = now + duration
                return self.free
        return later

    def run(self, index: int, now: int) -> Key:
        """Runs the action at an index of `left`, and returns it."""
        key = self.left.pop(index)
        kind, stage, _ = key
        problem = self._problem
        if kind == "F":
            self._held += problem.activation[stage]
            self._live += problem.activation[stage]
            self.free = now + problem.forward[stage]
        else:
            self._held += problem.kept[stage] - problem.activation[stage]
            self._live -= problem.activation[stage]
            self._undone.append(stage)
            self.free = now + problem.backward_input[stage]
        self.order.append(key)
        return key

    def _has_room(self, key: Key) -> bool:
        kind, stage, _ = key
        problem = self._problem
        need = problem.activation[stage] if kind == "F" else problem.recomputed[stage]
        return self._held + need <= problem.limits[problem.placement[stage]]


def _made(problem: Problem, key: Key, end: int) -> list[tuple[Key, int]]:
    """Returns the actions that need the result of an action, each with the time at which the result arrives."""
    kind, stage, microbatch = key
    last = problem.num_stages - 1
    if kind == "F" and stage == last:
        return [(("I", last, microbatch), end)]
    if kind == "F":
        return [(("F", stage + 1, microbatch), end + problem.transfer[stage])]
    if stage:
        return [(("I", stage - 1, microbatch), end + problem.transfer[stage - 1])]
    return []
