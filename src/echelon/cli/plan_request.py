"""Which schedule the arguments of `echelon plan` ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from echelon.errors import ScheduleError
from echelon.pipeline import schedules
from echelon.pipeline.cost import Costs
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.search.problem import rank_limits
from echelon.trace import Time, Timeline


class Request(NamedTuple):
    """The arguments that say what to plan, as they were given."""

    schedule: str | None
    num_ranks: int | None
    num_microbatches: int | None
    chunks: int | None
    group_size: int | None
    search: bool
    compare: bool

    @property
    def is_file(self) -> bool:
        """Whether the schedule is to be read."""
        return self.schedule is not None and self.schedule.lower().endswith(".csv")

    def check(self) -> None:
        """Finds arguments that are missing or do not go together.

        Raises:
            ScheduleError: there are such.
        """
        choices = {self.schedule: self.schedule is not None, "--search": self.search, "--compare": self.compare}
        chosen = [choice for choice, given in choices.items() if given]
        if len(chosen) > 1:
            raise ScheduleError(f"{chosen[0]} and {chosen[1]} are two requests: give one of them")
        if not chosen:
            raise ScheduleError(f"no schedule was named: give one of {_names()}, a .csv file, --search or --compare")
        if self.is_file:
            self._refuse("-r", self.num_ranks)
            self._refuse("--chunks", self.chunks)
            self._refuse("--group-size", self.group_size)
            return
        for option, value in (("-r", self.num_ranks), ("-m", self.num_microbatches)):
            if value is None or value < 1:
                given = "is missing" if value is None else f"{value} is too few"
                raise ScheduleError(f"{option} {given}: give the numbers of ranks and of microbatches, as -r 4 -m 16")

    def _refuse(self, option: str, value: int | None) -> None:
        if value is not None:
            raise ScheduleError(f"{option} {value}: {self.schedule} itself says that; leave {option} out")

    def make(self, costs: Costs, limit: Time | None) -> Schedule:
        """Reads, searches or builds the schedule.

        Raises:
            ScheduleError: there is no such schedule.
        """
        if self.is_file:
            return self._read()
        assert self.num_ranks is not None, "checked"
        assert self.num_microbatches is not None, "checked"
        if self.search:
            return schedules.search(costs, self.num_ranks, self.num_microbatches, limit, self.chunks)
        assert self.schedule is not None, "checked"
        return schedules.build(self.schedule, self.num_ranks, self.num_microbatches, self.chunks, self.group_size)

    def _read(self) -> Schedule:
        assert self.schedule is not None, "checked"
        try:
            return Schedule.from_csv(self.schedule, self.num_microbatches)
        except OSError as error:
            raise ScheduleError(f"cannot read {self.schedule}: {error.strerror}; give a file that exists") from None
        except UnicodeDecodeError:
            raise ScheduleError(f"cannot read {self.schedule}: it is not text; give what --csv writes") from None


def held_microbatches(schedule: Schedule, costs: Costs, timeline: Timeline) -> tuple[float, ...]:
    """Returns for each rank its peak in microbatches: one is what all of its stages hold for one."""
    units = rank_limits(costs, schedule.placement, schedule.num_microbatches, 1)
    return tuple(
        float(peak / unit) if unit else 0.0 for peak, unit in zip(timeline.peak_activations, units, strict=True)
    )


def check_limit(schedule: Schedule, held: Sequence[float], limit: Time | None) -> None:
    """Compares what a schedule holds with what it may, both in microbatches.

    Raises:
        ScheduleError: a rank holds more than `limit`.
    """
    if limit is None or max(held) <= limit * (1 + 1e-9):
        return
    enough = math.ceil(max(held) * 1000 - 1e-6) / 1000
    raise ScheduleError(
        f"{schedule.name} does not fit: rank {held.index(max(held))} holds {enough:g} microbatches, over the limit of "
        f"{limit:g}; give --memory-limit {enough:g}, or let --search find a schedule that fits"
    )


def _names() -> str:
    return ", ".join(schedules.names())
