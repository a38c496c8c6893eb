"""`echelon plan --compare`: table of all schedules for one model."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from echelon.cli.amounts import amount, one_number
from echelon.cli.plan_report import exact, print_table, to_json, write
from echelon.cli.plan_request import Request
from echelon.errors import ScheduleError
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.schedules.recommendation import Option, recommend
from echelon.timeline.timeline import Time, number
from echelon.wording import counted


class Memory(NamedTuple):
    """Memory limits of a rank, as texts of the command line."""

    memory_limit: str | None
    parameters: str | None
    capacity: str | None

    def check(self, compare: bool) -> None:
        """Checks that options of --compare stand with it.

        Raises:
            ScheduleError: --parameters or --capacity without --compare.
        """
        for option, text in (("--parameters", self.parameters), ("--capacity", self.capacity)):
            if text is not None and not compare:
                raise ScheduleError(f"{option} {text}: only --compare counts parameters; give --memory-limit instead")

    @property
    def limit(self) -> Time | None:
        """Most microbatches whose activations a rank may hold. None: no limit."""
        return None if self.memory_limit is None else one_number("--memory-limit", self.memory_limit)


def compare_schedules(console: Console, request: Request, costs: Costs, memory: Memory, as_json: bool) -> None:
    """Prints time and memory of each schedule, the fastest that fits first.

    Raises:
        ScheduleError: impossible sizes, costs or limits.
    """
    assert request.num_ranks is not None, "checked"
    assert request.num_microbatches is not None, "checked"
    options = recommend(
        costs,
        request.num_ranks,
        request.num_microbatches,
        memory.limit,
        parameters=0 if memory.parameters is None else amount("--parameters", memory.parameters),
        capacity=None if memory.capacity is None else one_number("--capacity", memory.capacity),
        search=request.search,
    )
    if as_json:
        sizes = {"num_ranks": request.num_ranks, "num_microbatches": request.num_microbatches}
        print(to_json({**sizes, "schedules": [_values(option) for option in options]}))
        return
    title = f"{counted(request.num_ranks, 'rank')}, {counted(request.num_microbatches, 'microbatch')}"
    write(console, Text(title, style="bold"))
    write(console, Text())
    print_table(console, [_TITLES, *map(_row, options)])


_TITLES = ("schedule", "chunks", "makespan", "span", "bubble rate", "microbatches", "memory", "fits")


def _row(option: Option) -> tuple[str, ...]:
    return (
        option.schedule.name,
        str(option.schedule.num_chunks),
        number(option.timeline.makespan),
        number(option.timeline.span),
        f"{100 * float(option.timeline.bubble_rate):.1f} %",
        number(max(option.peak_microbatches)),
        number(max(option.peak_memory)),
        "yes" if option.fits else "no",
    )


def _values(option: Option) -> dict[str, Any]:
    return {
        "schedule": option.schedule.name,
        "num_chunks": option.schedule.num_chunks,
        "makespan": exact(option.timeline.makespan),
        "span": exact(option.timeline.span),
        "bubble_rate": exact(option.timeline.bubble_rate),
        "peak_microbatches": [exact(peak) for peak in option.peak_microbatches],
        "peak_memory": [exact(peak) for peak in option.peak_memory],
        "fits": option.fits,
    }
