"""Which schedule the arguments of `echelon plan` ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from echelon.errors import ScheduleError
from echelon.pipeline import schedules
from echelon.pipeline.cost import Costs
from echelon.pipeline.schedule import Schedule
from echelon.trace import Time


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
        option = "--compare" if self.compare else "--search" if self.search else None
        if self.schedule is not None and option is not None:
            raise ScheduleError(f"{self.schedule} and {option} are two requests: give one of them")
        if self.schedule is None and option is None:
            raise ScheduleError(f"no schedule was named: give one of {_names()}, a .csv file, --search or --compare")
        if self.is_file:
            self._refuse(f"{self.schedule} itself says that", "-r", "--chunks", "--group-size")
        elif self.compare:
            self._refuse("--compare takes all schedules, with one chunk and with two", "--chunks", "--group-size")
        elif self.search:
            self._refuse("--search is not for interleaved-1f1b", "--group-size")
        if not self.is_file:
            self._check_size("-r", self.num_ranks)
            self._check_size("-m", self.num_microbatches)

    def _refuse(self, reason: str, *options: str) -> None:
        values = {"-r": self.num_ranks, "--chunks": self.chunks, "--group-size": self.group_size}
        for option in options:
            if values[option] is not None:
                raise ScheduleError(f"{option} {values[option]}: {reason}; leave {option} out")

    def _check_size(self, option: str, value: int | None) -> None:
        if value is None or value < 1:
            given = "is missing" if value is None else f"{value} is too few"
            raise ScheduleError(f"{option} {given}: give the numbers of ranks and of microbatches, as -r 4 -m 16")

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
