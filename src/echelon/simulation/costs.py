"""Costs of computing in a simulation: none, fixed figures, or the CPU time measured here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from echelon.arguments import is_amount, is_factor
from echelon.errors import LaunchError
from echelon.pipeline.plan.action import Action, Handover, Overlapped, actions_of
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.plan.simulate import play

StepCost: TypeAlias = Callable[[int, object], float]
"""Function of rank and step that returns the step's seconds."""


@dataclass(frozen=True)
class Measured:
    """Measured costs: the CPU time of the rank's thread here, times `factor`.

    A rank has one core: its main thread and those of its asynchronous operations compute one at a time.
    `Simulation.measurements` has the figures; a simulation with them as costs repeats exactly.

    Args:
        factor: above 0; 2 takes twice as long as here.

    Raises:
        LaunchError: `factor` is not above 0.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        if not is_factor(self.factor):
            raise LaunchError(f"Measured(factor={self.factor!r}): give a factor above 0")


@dataclass(frozen=True)
class Measurements:
    """Measured costs of a simulation: for each (rank, thread), in order, the seconds between its calls."""

    seconds: Mapping[tuple[int, int], Sequence[float]]

    def total(self, rank: int) -> float:
        """Returns the seconds that a rank computed, summed over its threads."""
        return math.fsum(second for (whose, _), seconds in self.seconds.items() if whose == rank for second in seconds)


CostsLike: TypeAlias = Costs | Mapping[str, float] | StepCost | Measured | Measurements | str | None
"""Costs of computing: see `simulate`."""


class Meter:
    """Stopwatch for the computing of each rank's threads between two calls, or a replay of earlier measurements."""

    def __init__(self, source: Measured | Measurements) -> None:
        self._factor = source.factor if isinstance(source, Measured) else 1.0
        self._replay: dict[tuple[int, int], Iterator[float]] | None = None
        if isinstance(source, Measurements):
            self._replay = {key: iter(seconds) for key, seconds in source.seconds.items()}
        self._taken: dict[tuple[int, int], list[float]] = {}
        self._began: dict[tuple[int, int], float] = {}

    def start(self, thread: tuple[int, int]) -> None:
        """Starts the stopwatch of the calling thread, given as (rank, number of the thread)."""
        # CPU time, not wall time: the turns of other ranks do not count.
        self._began[thread] = time.thread_time()

    def stop(self, thread: tuple[int, int]) -> float:
        """Returns the seconds computed since `start`.

        Raises:
            LaunchError: a replay has fewer measurements than the program has calls.
        """
        now = time.thread_time()
        seconds = (now - self._began[thread]) * self._factor
        self._began[thread] = now
        if self._replay is not None:
            replayed = next(self._replay.get(thread, iter(())), None)
            if replayed is None:
                raise LaunchError(
                    f"rank {thread[0]} makes more calls than were measured: replay the program, the arguments, "
                    "the seed and the network of the measurements"
                )
            seconds = replayed
        self._taken.setdefault(thread, []).append(seconds)
        return seconds

    def measurements(self) -> Measurements:
        """Returns all measurements so far."""
        return Measurements({thread: tuple(seconds) for thread, seconds in sorted(self._taken.items())})


def step_cost(costs: CostsLike) -> StepCost | None:
    """Returns the function that prices a step. None if steps have no price of their own: no costs, or measured ones.

    Raises:
        LaunchError: `costs` has an unsupported type or value.
    """
    match costs:
        case None | "measured" | Measured() | Measurements():
            return None
        case Costs():
            return _of_actions(costs)
        case Mapping():
            return _of_names(costs)
    if callable(costs):
        return _checked(costs)
    raise LaunchError(
        f'costs={costs!r}: use Costs(forward=, ...) for pipelines, {{"name": seconds}}, a function of rank and step, '
        '"measured", or the measurements of a simulation'
    )


def meter_for(costs: CostsLike) -> Meter | None:
    """Returns the meter for measured or replayed costs. None for other costs."""
    if costs == "measured":
        return Meter(Measured())
    return Meter(costs) if isinstance(costs, Measured | Measurements) else None


def _checked(costs: StepCost) -> StepCost:
    """Wraps a user's function: raises LaunchError if it returns no seconds."""

    def cost(rank: int, step: object) -> float:
        seconds = costs(rank, step)
        if not is_amount(seconds):
            raise LaunchError(f"costs= gave {seconds!r} for rank {rank} and step {step}: return seconds, at least 0")
        return seconds

    return cost


def _of_names(costs: Mapping[str, float]) -> StepCost:
    wrong = {name: seconds for name, seconds in costs.items() if not isinstance(name, str) or not is_amount(seconds)}
    if wrong:
        raise LaunchError(f"costs={wrong}: give a name and its seconds, at least 0")
    fixed = dict(costs)
    return lambda _, step: fixed.get(str(step), 0.0)


def _of_actions(costs: Costs) -> StepCost:
    """Prices the actions of pipelines by playing them, exactly as `Schedule.simulate` does."""
    amounts = costs.transfer if isinstance(costs.transfer, Sequence) else [costs.transfer]
    if any(amounts):
        raise LaunchError(
            f"costs=Costs(transfer={costs.transfer}): the network has the cost of transfers: use transfer=0 and "
            "network=Network(latency=, bandwidth=)"
        )

    # Cached per action: the callers set its microbatch to 0, which does not change the price.
    @cache
    def price(step: Action | Overlapped) -> float:
        stages = [action.stage for action in actions_of(step)]
        placement = [0] * (costs.num_stages or max(stages) + 1)
        # All inputs are there at time 0, so that nothing but the action itself is priced.
        arrived = [Handover(stage, 0, backward) for backward in (False, True) for stage in stages]
        (ends,) = play([[step]], placement, 1, costs.per_stage(placement), arrived).ends
        return float(ends[0])

    def cost(_: int, step: object) -> float:
        if isinstance(step, Action):
            return price(step._replace(microbatch=0))
        if isinstance(step, Overlapped):
            return price(Overlapped(step.forward._replace(microbatch=0), step.backward._replace(microbatch=0)))
        return 0.0

    return cost
