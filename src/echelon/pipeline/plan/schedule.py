"""Pipeline schedule: the steps of every rank, in order. Frozen data."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from echelon.arguments import is_count, named, no_attribute, reading, refuse_others, shown, writing
from echelon.errors import InvalidArgument, ScheduleError
from echelon.pipeline.plan.action import Action, Overlapped, Step, actions_of, parse
from echelon.pipeline.plan.check import Mistake, find_problems, over_limit, report
from echelon.pipeline.plan.cost import Amount, Costs, check_costs
from echelon.pipeline.plan.simulate import recorded, simulate
from echelon.timeline.timeline import Time, Timeline
from echelon.wording import counted, listed

_MEANT = {
    **dict.fromkeys(("draw", "plot", "show"), " draw its timeline: schedule.simulate().draw('plan.svg')"),
    **dict.fromkeys(("save", "to_file", "write"), "to_csv"),
    **dict.fromkeys(("timeline", "bubble_rate", "makespan"), " write schedule.simulate(), which is its timeline"),
    **dict.fromkeys(("run", "step"), " pass it to Pipeline(model, group, schedule), which has step()"),
}
"""Names by which users look for calls of a timeline or of a Pipeline."""
MOST_FORWARDS = 4_000_000
"""Most forwards of a schedule. More take minutes and tens of GB, and are a slip."""


def check_forwards(**sizes: int) -> None:
    """Raises ScheduleError if the product of sizes, the number of forwards, is too large for a schedule."""
    if (product := math.prod(sizes.values())) > MOST_FORWARDS:
        *some, last = (f"{name}={size}" for name, size in sizes.items())
        raise ScheduleError(
            f"{', '.join(some)} and {last} are {product} forwards, too many for one schedule: give numbers whose "
            f"product is at most {MOST_FORWARDS}"
        )


_PATHS = dict.fromkeys(("file", "filename", "fname"), "path")


@refuse_others()
@dataclass(frozen=True, repr=False)
class Schedule:
    """Steps of every rank of a pipeline, in order.

    `str(schedule)` is one line per rank, its steps separated by commas, as torch writes schedules. `Schedule.from_text`
    reads it back.

    Args:
        name: Name for error texts and tables.
        num_microbatches: Number of microbatches that each stage runs.
        placement: The rank of each stage, such as from `loop` or `vee`.
        orders: For each rank its steps, in order.
        forward_only: For inference: no backward, and no activation is held for one.

    Raises:
        ScheduleError: sizes that do not fit together. Mistakes in the orders are found by `check`.
    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Step, ...], ...]
    forward_only: bool = False

    def __post_init__(self) -> None:
        # Tuples make the schedule hashable, and a caller's list cannot change it later.
        example = "for each rank its steps, such as [[Action(0, 'F', 0), Action(0, 'B', 0)]]"
        placement = _as_tuple(self.placement, "placement", "the rank of each stage, such as (0, 1)")
        orders = _as_tuple(self.orders, "orders", example)
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "orders", tuple(_steps(order, rank) for rank, order in enumerate(orders)))
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Raises ScheduleError unless the numbers of microbatches, ranks and stages fit together."""
        if not is_count(self.num_microbatches, least=1):
            raise ScheduleError(f"num_microbatches={shown(self.num_microbatches)}: a schedule needs at least 1")
        if not self.orders or not self.placement:
            raise ScheduleError("a schedule needs an order for at least one rank and a placement of at least one stage")
        for stage, rank in enumerate(self.placement):
            if not isinstance(rank, int):
                raise ScheduleError(f"stage {stage} is placed on rank {rank!r}: give its number")
            if not 0 <= rank < self.num_ranks:
                raise ScheduleError(
                    f"stage {stage} is placed on rank {rank}, but there are orders for "
                    f"{counted(self.num_ranks, 'rank')}: place it on {listed(range(self.num_ranks))}"
                )
        check_forwards(num_stages=self.num_stages, num_microbatches=self.num_microbatches)

    def __repr__(self) -> str:
        sizes = (self.num_ranks, "rank"), (self.num_stages, "stage"), (self.num_microbatches, "microbatch")
        text = ", ".join(counted(number, what) for number, what in sizes)
        return f"<Schedule {self.name}: {text}{', forward only' if self.forward_only else ''}>"

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, order)) for order in self.orders)

    def _repr_html_(self) -> str | None:
        # Without costs a stage takes one unit of time. None makes a notebook show the text, which a mistake needs.
        return None if self.problems else self.simulate()._repr_html_()

    if not TYPE_CHECKING:  # type checkers report the name themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute("a Schedule", name, dir(type(self)), _MEANT)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """Number of stages that the model is cut into."""
        return len(self.placement)

    @property
    def num_chunks(self) -> int:
        """Number of stages per rank. The largest, if ranks differ."""
        return max(map(self.placement.count, range(self.num_ranks)))

    @cached_property
    def problems(self) -> tuple[Mistake, ...]:
        """Mistakes in the orders. Empty for a valid schedule."""
        # Cached: `simulate` and `check` are called many times on one schedule, and a schedule never changes.
        try:
            return find_problems(self)
        except TypeError:  # looked for only then: a schedule may have a million actions
            self._check_arguments()
            raise

    def _check_arguments(self) -> None:
        """Raises ScheduleError for an action whose arguments are of other types, as in another order."""
        for rank, order in enumerate(self.orders):
            for action in (action for step in order for action in actions_of(step)):
                if not isinstance(action, Action):
                    raise ScheduleError(
                        f"Overlapped holds {named(action)} on rank {rank}: give two actions, such as "
                        "Overlapped(Action(0, 'F', 1), Action(0, 'B', 0))"
                    )
                if tuple(map(type, action)) != (int, str, int):
                    raise ScheduleError(
                        f"Action({', '.join(map(repr, action))}) on rank {rank}: the order is Action(stage, kind, "
                        "microbatch), such as Action(0, 'F', 0)"
                    )

    @refuse_others()
    def check(self, memory_limit: Amount | None = None, costs: Costs | None = None) -> None:
        """Checks the schedule and raises one error that lists the mistakes, of many alike the first three.

        Args:
            memory_limit: Most memory that a rank may hold at once, in the units of `costs.activation` (by default 1 for
                one stage's activation of one microbatch). A number, or one per rank.
            costs: Give the memory of an activation.

        Raises:
            ScheduleError: an action is missing, doubled, on the wrong rank or before an action that it needs, ranks
                deadlock, or a rank holds more than the limit. The message marks the places of all mistakes in the
                orders.
        """
        problems = self.problems
        if memory_limit is not None:
            problems += over_limit(self, memory_limit, costs or Costs())
        if problems:
            raise ScheduleError(report(self, problems))

    @refuse_others(**dict.fromkeys(("forward", "backward", "transfer"), " give Costs: simulate(Costs(forward=1.0))"))
    def simulate(self, costs: Costs | None = None) -> Timeline:
        """Plays the schedule on a virtual clock. Returns its timeline, in the unit of the costs.

        Times are exact if the costs are: Timeline describes how Fractions are printed.

        Args:
            costs: time and memory of the stages. None: `Costs()`.

        Raises:
            InvalidArgument: `costs` is no Costs.
            ScheduleError: the schedule has problems (see `check`), or the costs are for another number of stages.
        """
        self.check()
        return simulate(self, check_costs(costs))

    def recorded(self, times: Sequence[Sequence[tuple[Time, Time]]], costs: Costs | None = None) -> Timeline:
        """Returns the timeline of a measured run of this schedule.

        Args:
            times: For each rank, the (start, end) of each of its steps, all by one clock.
            costs: Give the memory of an activation, for `Timeline.peak_activations`.

        Raises:
            InvalidArgument: `costs` is no Costs.
            ScheduleError: not one pair per step of each rank.
        """
        return recorded(self, times, check_costs(costs))

    @refuse_others(**_PATHS)
    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the orders as torch.distributed.pipelining reads them (its "compute_only" format), without the name.

        Args:
            path: the file, which is replaced.

        Raises:
            FileError: the file cannot be written.
        """
        with writing(path), open(path, "w", encoding="ascii", newline="") as file:
            file.write(f"{self}\n")

    @classmethod
    @refuse_others(**_PATHS)
    def from_csv(cls, path: str | os.PathLike[str], num_microbatches: int | None = None) -> Schedule:
        """Returns the schedule in a file of `to_csv` or torch.distributed.pipelining; see `from_text`.

        It has the name of the file, since the format has no room for one of its own.

        Args:
            path: the file.
            num_microbatches: number of microbatches. None: as many as appear.

        Raises:
            ScheduleError: the file does not hold a schedule.
            FileError: there is no such file, or it cannot be read.
        """
        try:
            # Spreadsheets begin a file with a mark.
            with reading(path), open(path, encoding="utf-8-sig", newline="") as file:
                text = file.read()
            return cls.from_text(text, num_microbatches, name=os.path.splitext(os.path.basename(path))[0])
        except ScheduleError as error:
            raise ScheduleError(f"{os.fspath(path)}: {error}") from None
        except UnicodeDecodeError:
            raise ScheduleError(f"cannot read {os.fspath(path)}: it is not text; give what --csv writes") from None

    @classmethod
    def from_text(cls, text: str, num_microbatches: int | None = None, name: str = "text") -> Schedule:
        """Returns the schedule in a text: one line per rank, its steps separated by commas.

        A stage is placed on the rank that runs most of its actions. Empty cells are skipped, and so are the cells that
        torch adds to run a schedule (SEND_F, RECV_B, UNSHARD, REDUCE_GRAD ...). A schedule without a backward is
        forward only.

        Args:
            text: The orders.
            num_microbatches: Number of microbatches. None: as many as appear.
            name: Name of the schedule.

        Raises:
            InvalidArgument: `text` is no text.
            ScheduleError: a cell is not a step, with its rank and column.
        """
        if not isinstance(text, str):
            raise InvalidArgument(f"text is {named(text)}: give the orders as text; Schedule.from_csv reads a file")
        found = _read(text)
        return cls(
            name=name,
            num_microbatches=found.num_microbatches if num_microbatches is None else num_microbatches,
            placement=found.placement,
            orders=found.orders,
            forward_only=found.forward_only,
        )


def _as_tuple(value: object, name: str, advice: str) -> tuple[Any, ...]:
    if not isinstance(value, Iterable):
        raise ScheduleError(f"{name} is {named(value)}: give {advice}")
    return tuple(value)


def _steps(order: object, rank: int) -> tuple[Step, ...]:
    """Returns the steps of a rank. Raises ScheduleError for values that are none."""
    if isinstance(order, str):
        raise ScheduleError(
            f"the order of rank {rank} is text: give a list of its steps, or read text by Schedule.from_text"
        )
    if not isinstance(order, Iterable):
        raise ScheduleError(f"the order of rank {rank} is {named(order)}: give a list of its steps")
    steps = tuple(order)
    if not set(map(type, steps)) <= {Action, Overlapped}:
        at, step = next(each for each in enumerate(steps) if type(each[1]) not in (Action, Overlapped))
        from_text = ", or read text by Schedule.from_text" if isinstance(step, str) else ""
        raise ScheduleError(f"step {at} of rank {rank} is {named(step)}: give Action and Overlapped values{from_text}")
    return steps


# Cells for communication and sharding, which torch adds to a schedule. torch 2.15 added the cells with WAIT_.
_ADDED_BY_TORCH = re.compile(r"\d+(?:(?:WAIT_)?SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)\d*")


class _Found(NamedTuple):
    """Parsed text of a schedule."""

    num_microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Step, ...], ...]
    forward_only: bool


def _read(text: str) -> _Found:
    """Parses text with a line per rank.

    Raises:
        ScheduleError: a cell that is no step, a stage that no rank runs, or a microbatch above the number of actions.
    """
    # An empty line within the text is a rank without steps, so only those after the last rank are removed.
    lines = text.rstrip("\r\n").splitlines()
    orders = tuple(tuple(_cells(rank, line)) for rank, line in enumerate(lines))
    ranks_of: dict[int, Counter[int]] = {}
    kinds, last_microbatch = set(), -1
    for rank, order in enumerate(orders):
        for step in order:
            for stage, kind, microbatch in actions_of(step):
                ranks_of.setdefault(stage, Counter())[rank] += 1
                kinds.add(kind)
                last_microbatch = max(last_microbatch, microbatch)
    if not ranks_of:
        raise ScheduleError('there is no action: write a line per rank with cells such as "2F0"')
    for stage in range(max(ranks_of)):
        if stage not in ranks_of:
            raise ScheduleError(
                f"no rank runs stage {stage} of {max(ranks_of) + 1}: number the stages from 0 without gaps"
            )
    # A typing error such as 2F1000000000 would else make the checker allocate an entry for each missing microbatch.
    num_actions = sum(counter.total() for counter in ranks_of.values())
    if last_microbatch >= num_actions:
        raise ScheduleError(
            f"microbatch {last_microbatch} among {num_actions} actions: number the microbatches from 0 without gaps"
        )
    # A stage is placed on the rank that runs most of its actions, so the checker can name a stray action.
    placement = tuple(ranks_of[stage].most_common(1)[0][0] for stage in range(len(ranks_of)))
    return _Found(last_microbatch + 1, placement, orders, forward_only=kinds == {"F"})


def _cells(rank: int, line: str) -> Iterable[Step]:
    for column, cell in enumerate(line.split(",")):
        # torch writes no quotes, spreadsheets may.
        cell = cell.strip().strip('"')
        if not cell or _ADDED_BY_TORCH.fullmatch(cell):
            continue
        try:
            yield parse(cell)
        except ScheduleError as error:
            raise ScheduleError(f"rank {rank}, cell {column}: {error}") from None
