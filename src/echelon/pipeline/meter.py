"""Measures what one rank holds between forwards and backwards, as the plan counts it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from echelon.pipeline.action import Action
from echelon.pipeline.cost import Costs
from echelon.pipeline.memory import peaks
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.stage import Stage


class Memory(NamedTuple):
    """The most bytes that this rank held of activations: saved for backward, and gradients that wait for a W."""

    planned: int
    """What the schedule's peak comes to, with what the activations of this rank's stages were measured to be."""
    measured: int
    """What was counted after each action."""


@dataclass
class Activations:
    """The bytes of one stage's activations for one microbatch; of the largest, where they differ."""

    activation: int = 0
    """From forward to the end of the backward, or to the end of I."""
    weight_activation: int = 0
    """From the end of I to the end of W."""
    recomputed_activation: int = 0
    """What running the forward again adds."""


@dataclass
class Meter:
    """Counts bytes, action by action, in one run.

    Args:
        stages: this rank's, by their index; they are metered.
        but: addresses of memory that does not count: parameters, buffers, and what belongs to the user.
    """

    stages: Mapping[int, Stage]
    but: Collection[int]
    peak: int = 0
    of_stage: dict[int, Activations] = field(default_factory=dict)
    _held: dict[tuple[int, int], int] = field(default_factory=dict)

    def ran(self, action: Action) -> None:
        """Looks at what an action left."""
        stage, kind, microbatch = action
        found = self.of_stage.setdefault(stage, Activations())
        size = self._look(stage, microbatch)
        if kind == "F":
            found.activation = max(found.activation, size)
        elif kind == "I":
            found.weight_activation = max(found.weight_activation, size)

    def recomputed(self, stage: int, microbatch: int) -> None:
        """Looks at what a forward that was run again left."""
        before = self._held[stage, microbatch]
        found = self.of_stage[stage]
        found.recomputed_activation = max(found.recomputed_activation, self._look(stage, microbatch) - before)

    def memory(self, schedule: Schedule, rank: int) -> Memory:
        """Returns the peak, and what the schedule says it should be."""
        sizes = [self.of_stage.get(stage, Activations()) for stage in range(schedule.num_stages)]
        costs = Costs(
            activation=[size.activation for size in sizes],
            weight_activation=[size.weight_activation for size in sizes],
            recomputed_activation=[max(0, size.recomputed_activation) for size in sizes],
        )
        planned = peaks(schedule, costs.per_stage(schedule.placement))[rank]
        return Memory(int(planned), self.peak)

    def _look(self, stage: int, microbatch: int) -> int:
        self._held[stage, microbatch] = size = self.stages[stage].num_bytes(microbatch, self.but)
        self.peak = max(self.peak, sum(self._held.values()))
        return size
