"""Arguments of `echelon plan`, checked and turned into a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from echelon.arguments import choices
from echelon.collectives.plans.algorithms import OPERATIONS, algorithms_of
from echelon.errors import ScheduleError
from echelon.pipeline import schedules
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules.recommendation import Option, search_chunks
from echelon.timeline.timeline import Time

_MOST_RANKS = 4096
_MOST_MICROBATCHES = 1_000_000
_MOST_CHUNKS = 256
_MOST_FORWARDS = 4_000_000
"""Larger numbers are a slip of the keyboard, or take longer than anybody waits."""


class Found(NamedTuple):
    """Schedule to plan, with its costs and the alternatives that were searched."""

    schedule: Schedule
    costs: Costs
    """Costs of the schedule's stages."""
    searched: tuple[Option, ...] = ()
    """Best schedule for each searched number of chunks, the best of all first. Empty without --search."""


class Request(NamedTuple):
    """Arguments that choose the schedule, as they were given."""

    schedule: str | None
    num_ranks: int | None
    num_microbatches: int | None
    chunks: int | None
    group_size: int | None
    search: bool
    compare: bool

    @property
    def is_file(self) -> bool:
        """Whether the schedule is read from a .csv file."""
        return self.schedule is not None and self.schedule.lower().endswith(".csv")

    def check(self) -> None:
        """Checks the arguments, before anything is built.

        Raises:
            ScheduleError: an argument is missing, too large, or does not go with another.
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
        if self.is_file:
            return
        if self.schedule is not None and self.schedule not in schedules.names():
            raise ScheduleError(_unknown(self.schedule))
        self._check_size("-r", self.num_ranks, _MOST_RANKS)
        self._check_size("-m", self.num_microbatches, _MOST_MICROBATCHES)
        if self.chunks is not None and self.chunks > _MOST_CHUNKS:
            raise ScheduleError(f"--chunks {self.chunks} is too many: give at most {_MOST_CHUNKS}")
        assert self.num_ranks is not None, "checked"
        assert self.num_microbatches is not None, "checked"
        product = self.num_ranks * self.num_microbatches * (self.chunks or 1)
        if product > _MOST_FORWARDS:
            raise ScheduleError(
                f"-r {self.num_ranks} -m {self.num_microbatches} are {product} forwards, too many to look at: give "
                f"numbers whose product is at most {_MOST_FORWARDS}"
            )

    def _refuse(self, reason: str, *options: str) -> None:
        values = {"-r": self.num_ranks, "--chunks": self.chunks, "--group-size": self.group_size}
        for option in options:
            if values[option] is not None:
                raise ScheduleError(f"{option} {values[option]}: {reason}; leave {option} out")

    def _check_size(self, option: str, value: int | None, most: int) -> None:
        if value is None or value < 1:
            given = "is missing" if value is None else f"{value} is too few"
            raise ScheduleError(f"{option} {given}: give the numbers of ranks and of microbatches, as -r 4 -m 16")
        if value > most:
            raise ScheduleError(f"{option} {value} is too many: give at most {most}")

    def make(self, costs: Costs, limit: Time | None) -> Found:
        """Reads, searches or builds the schedule.

        Raises:
            ScheduleError: the schedule is unknown, or its file cannot be read.
        """
        if self.is_file:
            return Found(self._read(), costs)
        assert self.num_ranks is not None, "checked"
        assert self.num_microbatches is not None, "checked"
        sizes = self.num_ranks, self.num_microbatches
        if not self.search:
            assert self.schedule is not None, "checked"
            return Found(schedules.build(self.schedule, *sizes, self.chunks, self.group_size), costs)
        # With --chunks, or costs for another number of stages, only one number of chunks fits.
        if self.chunks is None and costs.num_stages in (None, self.num_ranks):
            searched = search_chunks(costs, *sizes, limit)
            return Found(searched[0].schedule, searched[0].costs, searched)
        return Found(schedules.search(costs, *sizes, limit, self.chunks), costs)

    def _read(self) -> Schedule:
        assert self.schedule is not None, "checked"
        try:
            return Schedule.from_csv(self.schedule, self.num_microbatches)
        except UnicodeDecodeError:
            raise ScheduleError(f"cannot read {self.schedule}: it is not text; give what --csv writes") from None


def check_limit(schedule: Schedule, held: Sequence[float], limit: Time | None) -> None:
    """Checks the peak of each rank against the memory limit, both in microbatches.

    Raises:
        ScheduleError: a rank holds more than `limit`.
    """
    if limit is None or max(held) <= limit * (1 + 1e-9):  # sums of floats may exceed it by rounding
        return
    # Rounded up to 3 digits, so that the advice passes the check.
    enough = math.ceil(max(held) * 1000 - 1e-6) / 1000
    raise ScheduleError(
        f"{schedule.name} does not fit: rank {held.index(max(held))} holds {enough:g} microbatches, over the limit of "
        f"{limit:g}; give --memory-limit {enough:g}, or let --search find a schedule that fits"
    )


def _unknown(name: str) -> str:
    """Returns an error text for an unknown schedule, with the known ones."""
    if any(name.replace("-", "_") == algorithm.name for each in OPERATIONS for algorithm in algorithms_of(each)):
        return f"{name} is an algorithm: name the collective first, as in `echelon plan all-reduce --algorithm ring`"
    collectives = [operation.replace("_", "-") for operation in OPERATIONS]
    known = choices(name, [*schedules.names(), *collectives], "choose from")
    return f"no schedule or collective is called {name!r}: {known}; or give a file that ends in .csv"


def _names() -> str:
    return ", ".join(schedules.names())
