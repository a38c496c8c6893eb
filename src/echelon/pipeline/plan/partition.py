"""Partition of a chain of layers into contiguous stages, with the least cost of the slowest stage.

Strategy. A cap on a stage's cost is tested greedily: each stage takes as many layers as the cap and the memory limit
allow. This reaches the end in the fewest stages, so the cap can be met exactly if these are no more than `num_stages`.
Bisection finds the least such cap. All sums are exact (costs become whole numbers of a common unit), so the cap is the
optimum, not an approximation. Many cuts can meet it. Each cut is then placed where the remaining cost divides most
evenly: 3, 3, 2 and 2 layers are better than 3, 3, 3 and 1, although their slowest stages are equal.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from echelon.arguments import is_count, is_number
from echelon.errors import PartitionError
from echelon.timeline.timeline import Time


@dataclass(frozen=True)
class Partition:
    """Layers cut into contiguous stages.

    Args:
        stages: For each stage, the indices of its layers. No stage is empty.
        costs: For each stage, the sum of its layers' costs.
        memory: For each stage, the sum of its layers' memory. None if no memory was given.
    """

    stages: tuple[range, ...]
    costs: tuple[Time, ...]
    memory: tuple[Time, ...] | None = None

    @property
    def slowest(self) -> Time:
        """Cost of the slowest stage. No other cut has a lower one."""
        return max(self.costs)

    def __str__(self) -> str:
        return "\n".join(
            f"stage {stage}: layers {layers[0]} to {layers[-1]}, cost {float(cost):g}"
            for stage, (layers, cost) in enumerate(zip(self.stages, self.costs, strict=True))
        )


def partition(
    costs: Sequence[Time],
    num_stages: int,
    memory: Sequence[Time] | None = None,
    memory_limit: Time | None = None,
) -> Partition:
    """Returns the cut of layers into contiguous stages whose slowest stage is as fast as possible.

    10,000 layers into 64 stages take a few hundredths of a second.

    Args:
        costs: The time of each layer, in any unit.
        num_stages: Number of stages. Each gets at least one layer.
        memory: Memory of each layer, in any unit.
        memory_limit: Most memory of one stage's layers together, in the unit of `memory`.

    Raises:
        PartitionError: fewer layers than stages, a number below 0 or not finite, one of memory and memory_limit without
            the other, or layers that do not fit the limit in so many stages.
    """
    _validate(costs, num_stages, memory, memory_limit)
    times = _Sums(costs)
    room = _Sums(memory, memory_limit) if memory is not None and memory_limit is not None else None
    chain = _Chain(len(costs), num_stages, times, room)
    # No cap below the average stage or the largest layer can be met.
    least = max(times.total // num_stages, max(map(times.between, range(len(costs)), range(1, len(costs) + 1))))
    # A cap of the whole cost binds nothing, so only the memory limit can fail here.
    if chain.latest_cuts(times.total) is None:
        raise _too_tight(chain, room, memory, memory_limit)
    cap = _first(lambda cap: chain.latest_cuts(cap) is not None, least, times.total)
    stages = tuple(range(first, last) for first, last in pairwise(chain.even_cuts(cap)))
    return Partition(
        stages=stages,
        costs=tuple(_sum(costs, stage) for stage in stages),
        memory=None if memory is None else tuple(_sum(memory, stage) for stage in stages),
    )


class _Sums:
    """Exact prefix sums of numbers, and a limit, as whole numbers of a common unit."""

    def __init__(self, numbers: Sequence[Time], limit: Time = 0) -> None:
        exact = [Fraction(number) for number in (*numbers, limit)]
        unit = math.lcm(*(number.denominator for number in exact))
        *whole, self.limit = (number.numerator * (unit // number.denominator) for number in exact)
        self.prefix = [0, *accumulate(whole)]

    @property
    def total(self) -> int:
        return self.prefix[-1]

    def between(self, first: int, last: int) -> int:
        return self.prefix[last] - self.prefix[first]


@dataclass(frozen=True)
class _Chain:
    """Layers, and the number of stages to cut them into."""

    num_layers: int
    num_stages: int
    times: _Sums
    room: _Sums | None

    def end(self, first: int, cap: int) -> int:
        """Returns the furthest end of a stage that begins at layer `first`."""
        end = bisect_right(self.times.prefix, self.times.prefix[first] + cap) - 1
        if self.room is not None:
            end = min(end, bisect_right(self.room.prefix, self.room.prefix[first] + self.room.limit) - 1)
        return end

    def start(self, last: int, cap: int) -> int:
        """Returns the earliest start of a stage that ends at layer `last`."""
        start = bisect_left(self.times.prefix, self.times.prefix[last] - cap)
        if self.room is not None:
            start = max(start, bisect_left(self.room.prefix, self.room.prefix[last] - self.room.limit))
        return start

    def latest_cuts(self, cap: int) -> list[int] | None:
        """Returns the last possible end of each stage. None if the cap cannot be met."""
        cuts = [0]
        for stages_left in range(self.num_stages - 1, -1, -1):
            # Leaves one layer for each later stage: no stage may be empty.
            cut = min(self.end(cuts[-1], cap), self.num_layers - stages_left)
            if cut <= cuts[-1]:
                return None
            cuts.append(cut)
        return cuts if cuts[-1] == self.num_layers else None

    def earliest_cuts(self, cap: int) -> list[int]:
        """Returns the first possible end of each stage, for a cap that can be met."""
        cuts = [self.num_layers]
        for stages_left in range(self.num_stages - 1, -1, -1):
            cuts.append(max(self.start(cuts[-1], cap), stages_left))
        return cuts[::-1]

    def even_cuts(self, cap: int) -> list[int]:
        """Returns cuts that meet the cap, each as near as possible to an equal share of the remaining cost."""
        cuts, earliest = [0], self.earliest_cuts(cap)
        prefix = self.times.prefix
        for stage in range(1, self.num_stages):
            stages_left = self.num_stages - stage + 1
            share = prefix[cuts[-1]] + self.times.between(cuts[-1], self.num_layers) // stages_left
            above = bisect_left(prefix, share)
            nearest = above if above == 0 or prefix[above] - share < share - prefix[above - 1] else above - 1
            # Not before `earliest`, or the later stages could not meet the cap; not beyond the reach of this stage.
            first = max(earliest[stage], cuts[-1] + 1)
            last = min(self.end(cuts[-1], cap), self.num_layers - stages_left + 1)
            cuts.append(min(max(nearest, first), last))
        return [*cuts, self.num_layers]


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Returns the least number from low to high for which `holds` is true.

    It must be true for `high`, and for every number above the least one.
    """
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _sum(numbers: Sequence[Time], stage: range) -> Time:
    picked = [numbers[layer] for layer in stage]
    # fsum rounds once, so a sum of floats does not depend on the order of the layers. Ints and Fractions stay exact.
    return math.fsum(picked) if any(isinstance(number, float) for number in picked) else sum(picked)


def _validate(costs: Sequence[Time], num_stages: int, memory: Sequence[Time] | None, memory_limit: Time | None) -> None:
    if not is_count(num_stages, least=1):
        raise PartitionError(f"num_stages={num_stages!r}: give a whole number of at least 1")
    if len(costs) < num_stages:
        raise PartitionError(
            f"{len(costs)} layers cannot fill {num_stages} stages: use at most {len(costs)} stages, or split layers"
        )
    if (memory is None) != (memory_limit is None):
        given, missing = ("memory", "memory_limit") if memory_limit is None else ("memory_limit", "memory")
        raise PartitionError(f"{given} was given without {missing}: give both, or neither")
    if memory is not None and len(memory) != len(costs):
        raise PartitionError(f"memory has {len(memory)} values for {len(costs)} layers: give one per layer")
    for name, numbers in (("costs", costs), ("memory", memory or ())):
        for layer, number in enumerate(numbers):
            _validate_number(f"{name}[{layer}]", number)
    if memory_limit is not None:
        _validate_number("memory_limit", memory_limit)


def _validate_number(name: str, number: object) -> None:
    if not is_number(number):
        raise PartitionError(f"{name}={number!r} is not a number: give an int, a float or a Fraction")
    if number < 0 or not number < 10**100:  # also refuses nan; sums of larger floats could overflow
        raise PartitionError(f"{name}={str(number)[:40]} cannot be a cost: give a finite number of at least 0")


def _too_tight(
    chain: _Chain, room: _Sums | None, memory: Sequence[Time] | None, memory_limit: Time | None
) -> PartitionError:
    assert room is not None
    assert memory is not None
    for layer, need in enumerate(memory):
        if room.between(layer, layer + 1) > room.limit:
            return PartitionError(
                f"layer {layer} alone needs {need} of memory, over the limit of {memory_limit}: "
                f"raise the limit to at least {max(memory)}, or split the layer"
            )
    # The greedy cut with no cap on the cost gives the fewest stages that the memory limit allows.
    stages, first = 0, 0
    while first < chain.num_layers:
        first = chain.end(first, chain.times.total)
        stages += 1
    return PartitionError(
        f"the layers do not fit {chain.num_stages} stages with a memory limit of {memory_limit} each: "
        f"use at least {stages} stages, or raise the limit"
    )
