"""Reports of `echelon plan` about one schedule and about all of them: text for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from echelon.cli.output import exact, print_table, working, write
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules.recommendation import Option
from echelon.timeline.boxes import TimelineLayout, boxes_of
from echelon.timeline.palette import CAUSE_NAMES, COLORS, NAMES, text_color
from echelon.timeline.terminal import HALVES, IDLE_IN_COLOR, Line, legend, lines
from echelon.timeline.timeline import Timeline
from echelon.timeline.words import number, rate_text, summary
from echelon.wording import counted

_MOST_RANKS = 64  # more rows do not help on a terminal


def as_values(schedule: Schedule, timeline: Timeline, held: Sequence[float]) -> dict[str, Any]:
    """Returns all values of the report, ready for JSON. `held`: peak of each rank, in microbatches."""
    return {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "num_stages": schedule.num_stages,
        "makespan": exact(timeline.makespan),
        "span": exact(timeline.span),
        "bubble_rate": _rate(timeline),
        "ranks": [
            {
                "rank": rank,
                "stages": [stage for stage, holder in enumerate(schedule.placement) if holder == rank],
                "busy": exact(timeline.busy[rank]),
                "idle": {cause: exact(time) for cause, time in timeline.idle[rank]._asdict().items()},
                "peak_activations": exact(timeline.peak_activations[rank]),
                "peak_microbatches": exact(held[rank]),
            }
            for rank in range(schedule.num_ranks)
        ],
    }


def values_searched(option: Option) -> dict[str, Any]:
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
    # Without it a reader would wonder why only one number was tried.
    left_out = "" if len(searched) > 1 else "; --transfer per boundary fits only one placement of 2 chunks"
    return f"searched with {spans}{left_out}"


def print_plan(console: Console, schedule: Schedule, timeline: Timeline, values: dict[str, Any]) -> None:
    """Prints the sizes, the picture and a table of the ranks. `values`: from `as_values`."""
    counts = ((schedule.num_ranks, "rank"), (schedule.num_stages, "stage"), (schedule.num_microbatches, "microbatch"))
    sizes = ", ".join(starmap(counted, counts))
    in_color = _has_colors(console)
    with working("drawing"):
        layout = boxes_of(timeline, _MOST_RANKS)
        picture = lines(layout, console.width, in_color)
        about = summary(timeline)
    write(console, f"{schedule.name}: {sizes}", style="bold")
    write(console, about + "\n")
    for line in picture:
        write(console, _text(line))
    write(console, _legend(layout, picture, console.width, in_color))
    write(console)
    rows: list[Sequence[str]] = [
        ("rank", "stages", "busy", "warm-up", "waiting", "transfer", "drain", "peak", "microbatches")
    ]
    for rank in values["ranks"][:_MOST_RANKS]:
        idle = (rank["idle"][cause] for cause in ("warm_up", "other_ranks", "transfer", "drain"))
        numbers = (rank["busy"], *idle, rank["peak_activations"], rank["peak_microbatches"])
        rows.append((str(rank["rank"]), ",".join(map(str, rank["stages"])), *map(number, numbers)))
    print_table(console, rows)
    if schedule.num_ranks > _MOST_RANKS:
        left_out = schedule.num_ranks - _MOST_RANKS
        write(console, f"and {counted(left_out, 'more rank')}: --json lists them, --png FILE draws them")


def _text(line: Line) -> Text:
    text = Text()
    for piece in line:
        # rich takes None for the terminal's own colour.
        style = Style(color=piece.foreground or None, bgcolor=piece.background or None, underline=piece.is_underlined)
        text.append(piece.text, style)
    text.rstrip()
    return text


def _legend(layout: TimelineLayout, picture: list[Line], width: int, in_color: bool) -> Text:
    if not in_color:
        return Text("\n" + "\n".join(legend(layout, picture, width)))
    entries = Text("\n")
    for tone in layout.tones:
        entries.append(f" {NAMES[tone]} ", Style(color=text_color(COLORS[tone]), bgcolor=COLORS[tone])).append("   ")
    if layout.num_chunks > 1:
        entries.append("later chunk", Style(underline=True)).append("   ")
    # line[0] is the title, whose letters are no signs.
    shown = {character for line in picture for piece in line[1:] for character in piece.text}
    signs = {HALVES: "forward above, backward below"}
    signs |= {sign: CAUSE_NAMES[cause] for cause, sign in IDLE_IN_COLOR.items() if sign.strip()}
    for sign, meaning in signs.items():
        if sign in shown:
            entries.append(f"{sign} {meaning}   ")
    entries.rstrip()
    return entries


def _has_colors(console: Console) -> bool:
    # With 16 colours kinds look alike, and blocks need UTF-8.
    is_utf8 = console.encoding.lower().startswith("utf")
    return console.is_terminal and not console.no_color and is_utf8 and console.color_system in ("256", "truecolor")


def _rate(timeline: Timeline) -> int | float | None:
    # JSON has no NaN.
    return exact(timeline.bubble_rate) if timeline.span else None


def values_compared(option: Option) -> dict[str, Any]:
    """Returns the values of a compared schedule, ready for JSON."""
    return {
        "schedule": option.schedule.name,
        **values_searched(option),
        "bubble_rate": _rate(option.timeline),
        "peak_microbatches": list(map(exact, option.peak_microbatches)),
        "peak_memory": list(map(exact, option.peak_memory)),
        "fits": option.fits,
    }


def print_comparison(console: Console, compared: Sequence[dict[str, Any]]) -> None:
    """Prints time and memory of each schedule, from `values_compared`."""
    rows: list[Sequence[str]] = [
        ("schedule", "chunks", "makespan", "span", "bubble rate", "microbatches", "memory", "fits")
    ]
    for each in compared:
        times = (number(each["makespan"]), number(each["span"]), rate_text(each["bubble_rate"]))
        peaks = (number(max(each["peak_microbatches"])), number(max(each["peak_memory"])))
        rows.append((each["schedule"], str(each["num_chunks"]), *times, *peaks, "yes" if each["fits"] else "no"))
    print_table(console, rows)
