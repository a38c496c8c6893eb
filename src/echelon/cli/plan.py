"""`echelon plan`: cost and picture of a pipeline schedule, without running it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import typer

from echelon.arguments import choices
from echelon.cli.options import Chrome, Html, Json, Png, Svg, amount, check_files, given, one_number, value
from echelon.cli.output import rich_console, to_json, working, write, write_files
from echelon.cli.plan_report import as_values, in_words, print_comparison, print_plan, values_compared, values_searched
from echelon.collectives.plans.algorithms import OPERATIONS, algorithms_of
from echelon.errors import ScheduleError
from echelon.garbage import collection_paused
from echelon.pipeline import schedules
from echelon.pipeline.plan.cost import Costs, amount_names
from echelon.pipeline.plan.schedule import MOST_FORWARDS, Schedule
from echelon.pipeline.schedules.recommendation import Option, held_microbatches, recommend, search_chunks
from echelon.timeline.timeline import Time
from echelon.wording import counted


@dataclass(frozen=True)
class PlanOptions:
    """Options of `echelon plan`, as they were given."""

    schedule: Annotated[str | None, typer.Argument(metavar="SCHEDULE", help="A name such as 1f1b, or a .csv file.")] = (
        None
    )
    # A number above the maximum is a slip of the keyboard.
    num_ranks: Annotated[
        int | None, typer.Option("-r", "-n", "--num-ranks", metavar="COUNT", min=1, max=4096, help="Number of ranks.")
    ] = None
    num_microbatches: Annotated[
        int | None,
        typer.Option(
            "-m", "--num-microbatches", metavar="COUNT", min=1, max=1_000_000, help="Number of microbatches per step."
        ),
    ] = None
    chunks: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            min=1,
            max=256,
            help="Virtual stages per rank.  [default: that of the schedule; --search: 1 and 2]",
        ),
    ] = None
    group_size: Annotated[
        int | None, typer.Option(metavar="COUNT", min=1, help="Microbatches per turn of a chunk (interleaved-1f1b).")
    ] = None
    forward: Annotated[str | None, value("TIME", "Duration of a forward (F).  [default: 1]")] = None
    backward_input: Annotated[str | None, value("TIME", "Duration of an input gradient (I).  [default: 1]")] = None
    backward_weight: Annotated[str | None, value("TIME", "Duration of a weight gradient (W).  [default: 1]")] = None
    transfer: Annotated[
        str | None, value("TIME", "Duration of a transfer between ranks; one, or one per boundary.  [default: 0]")
    ] = None
    overlapped: Annotated[
        str | None, value("TIME", "Duration of an overlapped forward and backward.  [default: their sum]")
    ] = None
    recompute: Annotated[str | None, value("TIME", "Duration of recomputation before a backward.  [default: 0]")] = None
    activation: Annotated[str | None, value("MEMORY", "Activations held from forward to backward.  [default: 1]")] = (
        None
    )
    weight_activation: Annotated[
        str | None, value("MEMORY", "Part of the activations kept until W.  [default: all]")
    ] = None
    recomputed_activation: Annotated[
        str | None, value("MEMORY", "Activations restored by recomputation.  [default: 0]")
    ] = None
    memory_limit: Annotated[str | None, value("N", "Most microbatches whose activations a rank may hold.")] = None
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare all schedules, and that of a .csv file if one is given.")
    ] = False
    search: Annotated[bool, typer.Option("--search", help="Search for the fastest schedule.")] = False
    parameters: Annotated[str | None, value("MEMORY", "With --compare: parameter memory per rank.  [default: 0]")] = (
        None
    )
    capacity: Annotated[str | None, value("MEMORY", "With --compare: total memory of a rank.")] = None
    svg: Svg = None
    png: Png = None
    html: Html = None
    chrome: Chrome = None
    csv: Annotated[str | None, value("FILE", "Write the orders as torch reads them.")] = None
    as_json: Json = False

    @property
    def is_file(self) -> bool:
        """Whether the schedule is read from a .csv file."""
        return self.schedule is not None and self.schedule.lower().endswith(".csv")

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of ranks and of microbatches.

        Raises:
            ScheduleError: one of them is missing.
        """
        if self.num_ranks is None or self.num_microbatches is None:
            missing = "-r" if self.num_ranks is None else "-m"
            raise ScheduleError(f"{missing} is missing: give the numbers of ranks and of microbatches, as -r 4 -m 16")
        return self.num_ranks, self.num_microbatches

    @property
    def limit(self) -> Time | None:
        """Most microbatches whose activations a rank may hold. None: no limit."""
        limit: Time | None = given(self, ("memory_limit",), one_number).get("memory_limit")
        return limit

    @property
    def costs(self) -> Costs:
        """Costs of the stages. Each field of `Costs` is an option of the same name.

        Raises:
            ScheduleError: a value is not a cost.
        """
        # By the fields of `Costs`, so that a new cost needs only its option.
        return Costs(**given(self, amount_names(), amount))

    def check(self) -> None:
        """Checks which options are given together, before anything is built.

        Raises:
            ScheduleError: an option is missing, or does not go with another.
            FileError: an output file cannot be written.
        """
        request = "--compare" if self.compare else "--search" if self.search else None
        # A file is put beside the named schedules.
        if self.schedule is not None and request is not None and not (self.is_file and self.compare):
            if not self.is_file and self.schedule not in schedules.names():
                raise ScheduleError(_unknown(self.schedule))
            raise ScheduleError(f"{self.schedule} and {request} cannot be combined: give one of them")
        if self.schedule is None and request is None:
            names = ", ".join(schedules.names())
            raise ScheduleError(f"no schedule was named: give one of {names}, a .csv file, --search or --compare")
        if self.is_file:
            self._refuse(f"{self.schedule} itself says that; leave it out", "chunks", "group_size")
        if self.compare:
            reason = "--compare takes all schedules, with one chunk and with two; leave it out"
            self._refuse(reason, "chunks", "group_size")
            self._refuse("--compare has many schedules; name the one to write", "svg", "png", "html", "chrome", "csv")
        elif self.search:
            self._refuse("--search is not for interleaved-1f1b; leave it out", "group_size")
        if not self.compare:
            self._refuse("only --compare counts parameters; give --memory-limit instead", "parameters", "capacity")
        # Before the schedule is made: a search may take minutes.
        check_files(self)
        if self.is_file:  # it has its own sizes
            return
        if self.schedule is not None and self.schedule not in schedules.names():
            raise ScheduleError(_unknown(self.schedule))
        num_ranks, num_microbatches = self.sizes
        product = num_ranks * num_microbatches * (self.chunks or 1)
        if product > MOST_FORWARDS:
            raise ScheduleError(
                f"-r {num_ranks} -m {num_microbatches} are {product} forwards, too many to look at: give "
                f"numbers whose product is at most {MOST_FORWARDS}"
            )

    def _refuse(self, reason: str, *names: str) -> None:
        for name in names:
            option = "-r" if name == "num_ranks" else "--" + name.replace("_", "-")
            if getattr(self, name) is not None:
                raise ScheduleError(f"{option} {getattr(self, name)}: {reason}")


@collection_paused()
def plan(options: PlanOptions) -> None:
    """Checks, times and draws a pipeline schedule. For a collective: echelon plan all-reduce --help.

    Times and memory are in any unit. Give one number for all stages, or one per stage, as --forward 1,1,2,1.
    4 ranks with 2 chunks have 8 stages.
    """
    options.check()
    if options.compare:
        _compare(options)
        return
    schedule, costs, searched = _make(options)
    with working("checking the schedule"):
        problems = schedule.problems
    if options.as_json and problems:
        # All of them, for programs. The error that follows has the first of each kind.
        print(to_json({"schedule": schedule.name, "problems": [problem.text for problem in problems]}))
        schedule.check()
    with working("simulating and drawing"):
        timeline = schedule.simulate(costs)
        held = held_microbatches(schedule, costs, timeline)
        _check_limit(schedule, held, options.limit)
        # Before anything is printed, so that a failure prints its error alone.
        written = write_files(
            (options.svg, timeline.draw),
            (options.png, timeline.draw),
            (options.html, timeline.draw),
            (options.chrome, timeline.to_chrome),
            (options.csv, schedule.to_csv),
        )
    values = as_values(schedule, timeline, held)
    if options.as_json:
        tried = {"searched": list(map(values_searched, searched))} if searched else {}
        print(to_json({**values, **tried, "files": written}))
        return
    console = rich_console()
    print_plan(console, schedule, timeline, values)
    if searched:
        write(console, f"\n{in_words(searched)}")
    for path in written:
        write(console, f"wrote {path}")


def _compare(options: PlanOptions) -> None:
    own = [_read(options)] if options.is_file else []
    for schedule in own:
        schedule.check()
    num_ranks, num_microbatches = (own[0].num_ranks, own[0].num_microbatches) if own else options.sizes
    with working("searching and comparing schedules" if options.search else "comparing schedules"):
        found = recommend(
            options.costs,
            num_ranks,
            num_microbatches,
            options.limit,
            search=options.search,
            own=own,
            **given(options, ("parameters",), amount),
            **given(options, ("capacity",), one_number),
        )
    compared = list(map(values_compared, found))
    if options.as_json:
        print(to_json({"num_ranks": num_ranks, "num_microbatches": num_microbatches, "schedules": compared}))
        return
    console = rich_console()
    write(console, f"{counted(num_ranks, 'rank')}, {counted(num_microbatches, 'microbatch')}\n", style="bold")
    print_comparison(console, compared)


class _Made(NamedTuple):
    """Schedule to plan, with the costs of its stages."""

    schedule: Schedule
    costs: Costs
    searched: tuple[Option, ...] = ()
    """Best schedule for each searched number of chunks, the best of all first. Empty without --search."""


def _make(options: PlanOptions) -> _Made:
    """Reads, searches or builds the schedule.

    Raises:
        ScheduleError: the schedule's file cannot be read, or there is no such schedule.
    """
    costs, limit = options.costs, options.limit
    if options.search:
        # With --chunks, or costs for another number of stages, only one number of chunks fits.
        if options.chunks is None and costs.num_stages in (None, options.num_ranks):
            with working("searching schedules with 1 and 2 chunks"):
                searched = search_chunks(costs, *options.sizes, limit)
            return _Made(searched[0].schedule, searched[0].costs, searched)
        with working("searching schedules"):
            return _Made(schedules.search(costs, *options.sizes, limit, options.chunks), costs)
    assert options.schedule is not None, "checked"
    if not options.is_file:
        return _Made(schedules.build(options.schedule, *options.sizes, options.chunks, options.group_size), costs)
    return _Made(_read(options), costs)


def _read(options: PlanOptions) -> Schedule:
    """Reads the schedule of a .csv file.

    Raises:
        ScheduleError: the file holds no schedule, or one of other numbers than were given.
        FileError: it cannot be read.
    """
    assert options.schedule is not None, "checked"
    found = Schedule.from_csv(options.schedule)
    for option, wanted, number, what in (
        ("-r", options.num_ranks, found.num_ranks, "rank"),
        ("-m", options.num_microbatches, found.num_microbatches, "microbatch"),
    ):
        if wanted not in (None, number):
            raise ScheduleError(f"{option} {wanted}: {options.schedule} has {counted(number, what)}; leave it out")
    return found


def _check_limit(schedule: Schedule, held: Sequence[float], limit: Time | None) -> None:
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
    # `plan ring` is the likely slip of a reader of docs/collectives.md.
    if any(name.replace("-", "_") == algorithm.name for each in OPERATIONS for algorithm in algorithms_of(each)):
        return f"{name} is an algorithm: name the collective first, as in `echelon plan all-reduce --algorithm ring`"
    collectives = [operation.replace("_", "-") for operation in OPERATIONS]
    known = choices(name, [*schedules.names(), *collectives], "choose from")
    return f"no schedule or collective is called {name!r}: {known}; or give a file that ends in .csv"
