"""Reports of `echelon plan` about a schedule: text for people, JSON for programs, and the files that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, NamedTuple

from rich.console import Console
from rich.style import Style
from rich.text import Text

from echelon.errors import ScheduleError
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules.recommendation import Option
from echelon.timeline.boxes import boxes_of
from echelon.timeline.palette import KIND_NAMES, color, text_color
from echelon.timeline.terminal import BOTH_AT_ONCE, HALVES, IDLE, SEVERAL, Line, lines
from echelon.timeline.timeline import Time, Timeline, number, summary
from echelon.wording import counted


class Files(NamedTuple):
    """Paths of the files to write; None for a file that is not wanted."""

    svg: str | None
    png: str | None
    chrome: str | None
    csv: str | None

    def check(self, compare: bool) -> None:
        """Checks the file names, before any work is done.

        Raises:
            ScheduleError: a picture with a wrong suffix, or a file together with --compare.
        """
        for option, path in self._asdict().items():
            if compare and path is not None:
                raise ScheduleError(f"--{option} {path}: --compare has many schedules; name the one to write")
        for path, suffix in ((self.svg, ".svg"), (self.png, ".png")):
            if path is not None and not path.lower().endswith(suffix):
                raise ScheduleError(f"--{suffix[1:]} {path}: give a name that ends in {suffix}, such as plan{suffix}")

    def write(self, schedule: Schedule, timeline: Timeline) -> list[str]:
        """Writes the wanted files and returns their names.

        Raises:
            FileError: a file cannot be written.
            EchelonError: a picture is wanted, and matplotlib is not installed.
        """
        wanted: list[tuple[str | None, Callable[[str], None]]] = [
            (self.svg, timeline.draw),
            (self.png, timeline.draw),
            (self.chrome, timeline.to_chrome),
            (self.csv, schedule.to_csv),
        ]
        written = []
        for path, write in wanted:
            if path is not None:
                write(path)
                written.append(path)
        return written


_MOST_RANKS = 64
"""Most rows printed; more do not help on a terminal."""


def as_values(schedule: Schedule, timeline: Timeline, held: Sequence[float]) -> dict[str, Any]:
    """Returns all values of the report, ready for JSON. `held`: peak of each rank, in microbatches."""
    return {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "num_stages": schedule.num_stages,
        "makespan": exact(timeline.makespan),
        "span": exact(timeline.span),
        "bubble_rate": exact(timeline.bubble_rate),
        "ranks": [
            {
                "rank": rank,
                "stages": _stages(schedule, rank),
                "busy": exact(timeline.busy[rank]),
                "idle": {cause: exact(time) for cause, time in timeline.idle[rank]._asdict().items()},
                "peak_activations": exact(timeline.peak_activations[rank]),
                "peak_microbatches": exact(held[rank]),
            }
            for rank in range(schedule.num_ranks)
        ],
    }


def as_tried(option: Option) -> dict[str, Any]:
    """Returns the best schedule found for one number of chunks, ready for JSON."""
    return {
        "num_chunks": option.schedule.num_chunks,
        "makespan": exact(option.timeline.makespan),
        "span": exact(option.timeline.span),
    }


def in_words(searched: Sequence[Option]) -> str:
    """Returns a sentence on the searched numbers of chunks, each with the span of its best schedule."""
    spans = " and with ".join(
        f"{counted(option.schedule.num_chunks, 'chunk')} per rank (span {number(option.timeline.span)})"
        for option in sorted(searched, key=lambda option: option.schedule.num_chunks)
    )
    left_out = "" if len(searched) > 1 else "; --transfer per boundary fits only one placement of 2 chunks"
    return f"searched with {spans}{left_out}"


def to_json(values: dict[str, Any]) -> str:
    """Returns JSON with one value a line, and one object a line in lists of objects."""
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {_inner_json(value)}" for key, value in values.items()) + "\n}"


def _inner_json(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
    return json.dumps(value)


def exact(value: Time) -> int | float:
    """Returns a number for JSON. Floats have 12 significant digits, since later ones are rounding noise."""
    return value if isinstance(value, int) else float(f"{float(value):.12g}")


def print_plan(console: Console, schedule: Schedule, timeline: Timeline, held: Sequence[float]) -> None:
    """Prints the sizes, the picture and a table of the ranks. `held`: peak of each rank, in microbatches."""
    counts = ((schedule.num_ranks, "rank"), (schedule.num_stages, "stage"), (schedule.num_microbatches, "microbatch"))
    sizes = ", ".join(starmap(counted, counts))
    in_color = console.is_terminal and not console.no_color and console.color_system in ("256", "truecolor")
    write(console, Text(f"{schedule.name}: {sizes}", style="bold"))
    write(console, Text(summary(timeline)))
    write(console, Text())
    picture = lines(timeline, console.width, in_color)
    for line in picture[:_MOST_RANKS]:
        write(console, _text(line))
    write(console, _legend(timeline, picture, in_color))
    write(console, Text())
    print_table(console, _table(schedule, timeline, held))
    if schedule.num_ranks > _MOST_RANKS:
        left_out = schedule.num_ranks - _MOST_RANKS
        write(console, Text(f"and {counted(left_out, 'more rank')}: --json lists them, --png FILE draws them"))


def write(console: Console, text: Text) -> None:
    """Prints a line verbatim: rich neither wraps nor crops it."""
    console.print(text, no_wrap=True, overflow="ignore", crop=False)


def print_table(console: Console, rows: Sequence[Sequence[str]]) -> None:
    """Prints a table. The first row has the titles; all columns but the first are right-aligned."""
    first, *others = ([len(cell) for cell in column] for column in zip(*rows, strict=True))
    for index, (name, *cells) in enumerate(rows):
        aligned = (cell.rjust(max(lengths)) for cell, lengths in zip(cells, others, strict=True))
        write(console, Text("  ".join([name.ljust(max(first)), *aligned]), style="bold" if index == 0 else ""))


def _text(line: Line) -> Text:
    text = Text()
    for piece in line:
        text.append(piece.text, Style(color=piece.foreground or None, bgcolor=piece.background or None))
    text.rstrip()
    return text


def _legend(timeline: Timeline, picture: list[Line], in_color: bool) -> Text:
    legend = Text("\n")
    kinds = boxes_of(timeline).kinds
    for kind, name in KIND_NAMES.items():
        if kind not in kinds:
            continue
        if in_color:
            legend.append(f" {name} ", Style(color=text_color(kind), bgcolor=color(None, kind))).append("   ")
        else:
            legend.append(f"{kind} {name}   ")
    shown = {character for line in picture for piece in line[1:] for character in piece.text}
    for character, meaning in _CHARACTERS.items():
        if character in shown:
            legend.append(f"{character} {meaning}   ")
    legend.rstrip()
    return legend


_CHARACTERS = {
    BOTH_AT_ONCE: "both at once",
    HALVES: "forward above and backward below at once",
    SEVERAL: "several kinds",
    IDLE: "idle",
}


_TITLES = ("rank", "stages", "busy", "warm-up", "waiting", "transfer", "drain", "peak", "microbatches")


def _table(schedule: Schedule, timeline: Timeline, held: Sequence[float]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [_TITLES]
    for rank in range(min(schedule.num_ranks, _MOST_RANKS)):
        idle = timeline.idle[rank]
        times = (timeline.busy[rank], idle.warm_up, idle.other_ranks, idle.transfer, idle.drain)
        stages = ",".join(map(str, _stages(schedule, rank)))
        peak = (timeline.peak_activations[rank], held[rank])
        rows.append([str(rank), stages, *map(number, times), *map(number, peak)])
    return rows


def _stages(schedule: Schedule, rank: int) -> list[int]:
    return [stage for stage, holder in enumerate(schedule.placement) if holder == rank]
