"""Page of a foreseen step: one HTML file that needs no network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import accumulate, chain, repeat
from string import Template
from typing import TYPE_CHECKING

from rich.table import Table

from echelon.foresight.memory_curves import NAMES, TONES, Curve, highest, limit_text
from echelon.foresight.page.lanes import lanes_of
from echelon.foresight.play.played import Played
from echelon.foresight.report import Report, accuracy_of, accuracy_text, not_modelled, seconds_text, size_text
from echelon.foresight.trace import GIB
from echelon.timeline.palette import COLORS
from echelon.timeline.widget.data import Data, Panel
from echelon.timeline.widget.markup import script, style, widget
from echelon.timeline.words import time_scale
from echelon.wording import counted

if TYPE_CHECKING:
    from echelon.foresight.run import Foreseen

_BLOCKS, _PARTS = 24_000, 2_500
"""Most blocks of all lanes, and most parts with a text, so that the file stays below 1 MB."""
_ROLES = 16
"""Roles whose lanes are shown."""
_LINES = 40
"""Lines of exposed communication that are listed."""
_TENSORS = 12
"""Lines of tensors that are listed."""
_INTERVALS = 400
"""Intervals of the memory curve."""
_WIDTH, _HEIGHT = 10_000, 1_000
"""Units of the drawing of memory. It is stretched to the width of the page, so it has no text."""


def page(seen: Foreseen, report: Report) -> str:
    """Returns a foreseen step as HTML. Text of the program is escaped.

    Args:
        seen: the step.
        report: its figures.
    """
    played, memory = seen.played, seen.memory
    limit = played.device.memory_bytes
    curve = memory.curve(points=_INTERVALS)
    figures, peak = report.figures_table(), report.memory_table()
    values = {
        "title": escape(report.title or "A foreseen step"),
        "sentence": escape(_sentence(seen, report)),
        "verdict": _badge(report),
        "narrow": f"<p>{escape(_sentence_of(report.narrow_text))}</p>" if report.fits_narrowly else "",
        "cards": _cards(seen, report),
        "problems": _list("Problems", report.problems, "problems"),
        "style": style() + _kind_style(),
        "script": script(),
        "timeline": _timeline(seen) + _others(seen),
        "fullest": str(memory.fullest),
        "levels": _levels(highest(curve, limit)),
        "memory": _areas(curve, limit),
        "moments": _ticks(curve.seconds[-1]),
        "kinds": _legend(curve, limit),
        "figures": _rich_table(figures),
        "peak": _rich_table(peak),
        "exposed": _exposed(played),
        "largest": _largest(seen),
        "notes": _list("What if", report.what_ifs)
        + _list("Assumed", seen.assumptions)
        + _list("Skipped", seen.skipped),
        "accuracy": escape(_sentence_of(accuracy_text(played))),
        "unmodelled": escape(_unmodelled(report)),
    }
    template = files("echelon.foresight.page").joinpath("page.html").read_text("utf-8")
    # Not str.format, to which the braces of the style would be fields.
    return Template(template).substitute(values)


# Head


def _sentence(seen: Foreseen, report: Report) -> str:
    hosts, roles = counted(len(seen.cluster.hosts), "host"), counted(len(seen.played.roles), "recorded role")
    return (
        f"A step on {seen.world_size} x {seen.device.name}, {hosts}, {report.network}: foreseen from {roles}, without "
        "a GPU."
    )


def _unmodelled(report: Report) -> str:
    counted = f"Not counted: {report.uncounted_text}. " if report.uncounted_text else ""
    return f"{counted}Not modelled: {', '.join(not_modelled(report.played))}."


def _sentence_of(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _badge(report: Report) -> str:
    name = "narrow" if report.fits_narrowly else "good" if report.fits else "bad"
    return f'<span class="badge {name}">{report.verdict}</span>'


def _cards(seen: Foreseen, report: Report) -> str:
    limit = seen.device.memory_bytes
    # A full device reserves no more than it has, but the program needs more.
    name, peak = "memory reserved", max(seen.peak_memory)
    if not seen.fits:
        name, peak = "memory needed", max(peak, *seen.live_memory)
    exposed = seen.played.slowest.shares.exposed
    beside = "unlike the published steps" if accuracy_of(seen.played) else "not compared with real runs"
    cards = [_card("step", seconds_text(seen.step_seconds), report.band or beside)]
    if report.tokens:
        cards.append(_card("tokens per second", f"{seen.tokens_per_second(report.tokens):,.0f}", "of the whole job"))
    cards += [
        _card("MFU", f"{seen.mfu:.1%}", "of the dense bfloat16 peak", seen.mfu),
        _card("exposed communication", f"{exposed:.1%}", "of the step", exposed),
        _card(name, size_text(peak), f"of {size_text(limit)}", peak / limit),
    ]
    return "".join(cards)


def _card(name: str, value: str, note: str, share: float | None = None) -> str:
    meter = ""
    if share is not None:
        hue = ' class="ex"' if share >= 1 else ""
        # A program that does not fit needs more than the whole device.
        meter = f'<div class="meter"><i{hue} style="width:{100 * min(1.0, share):.1f}%"></i></div>'
    return (
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b>{meter}<span>{escape(note)}</span></div>'
    )


# Timeline


def _timeline(seen: Foreseen) -> str:
    shown = list(seen.played.roles.items())[:_ROLES]
    # A role has about four lanes.
    most, most_parts = (max(16, whole // len(shown) // 4) for whole in (_BLOCKS, _PARTS))
    rows = []
    for rank, role in shown:
        count = seen.classes.count(rank)
        of = f"represents {count} ranks, " if count > 1 else ""
        heads = chain([f"rank {rank}: {of}{seconds_text(role.seconds)}"], repeat(""))
        lanes = lanes_of(role, most, most_parts)
        rows += [lane.for_browsers(seen.step_seconds, head) for lane, head in zip(lanes, heads, strict=False)]
    scale = time_scale(seen.step_seconds, "s")
    panel = Panel("", "", rows, seen.step_seconds, 1.0, scale, f"time ({scale.name})")
    return widget(Data([panel]))


def _others(seen: Foreseen) -> str:
    left = len(seen.played.roles) - _ROLES
    return f'<p class="faint">{left} other roles are not shown.</p>' if left > 0 else ""


def _ticks(seconds: float) -> str:
    return "".join(
        f'<span style="left:{100 * time / seconds:.2f}%">{1e3 * time:g}{"" if time else " ms"}</span>'
        for time in _round(seconds, 6)
        if time <= 0.92 * seconds  # a later one has no room for its text
    )


def _round(most: float, count: int) -> list[float]:
    """Returns about `count` round numbers from 0 to `most`."""
    if most <= 0:
        return []
    unit = 10.0 ** math.floor(math.log10(most / count))
    step = next(unit * factor for factor in (1, 2, 5, 10) if most / (unit * factor) <= count)
    return [float(f"{index * step:.6g}") for index in range(int(most / step) + 1)]


# Memory


def _levels(top: float) -> str:
    return "".join(
        f'<span style="top:{100 * (1 - level * GIB / top):.2f}%">{level:g}{" GiB" if not level else ""}</span>'
        for level in _round(top / GIB, 5)
    )


def _areas(curve: Curve, limit: int) -> str:
    """Returns kinds of tensors stacked, the reserved memory, and the device's limit. Its height is `highest`."""
    top = highest(curve, limit)
    stack = list(accumulate(curve.kinds.values(), lambda below, sizes: tuple(map(sum, zip(below, sizes, strict=True)))))
    # From the back to the front: each area begins at the ground and is hidden by those in front of it.
    areas = [
        f'<path class="m-{kind}" d="{_steps(curve, sizes, top)}V{_HEIGHT}H0z"/>'
        for kind, sizes in reversed(list(zip(curve.kinds, stack, strict=True)))
    ]
    lines = [f'<path class=reserved d="{_steps(curve, curve.reserved, top)}"/>']
    if limit < top:
        lines.append(f'<path class=limit d="M0 {round(_HEIGHT * (1 - limit / top))}H{_WIDTH}"/>')
    content = "".join(areas + lines)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{content}</svg>'


def _steps(curve: Curve, sizes: Sequence[int], top: float) -> str:
    seconds = curve.seconds[-1] or 1.0
    path, before = [], -1
    for time, size in zip(curve.seconds, sizes, strict=True):
        height = round(_HEIGHT * (1 - size / top))
        if before < 0:
            path.append(f"M0 {height}")
        elif height != before:
            path.append(f"H{round(_WIDTH * time / seconds)}V{height}")
        before = height
    return "".join(path) + f"H{_WIDTH}"


def _legend(curve: Curve, limit: int) -> str:
    kinds = "".join(_swatch(f"m-{kind}", NAMES.get(kind, kind)) for kind in curve.kinds)
    rules = '<span><i class="rule" style="border-top-style:dotted"></i>reserved</span>'
    return f'{kinds}{rules}<span><i class="rule" style="color:var(--bad)"></i>{limit_text(curve, limit)}</span>'


def _kind_style() -> str:
    return "".join(
        f".m-{kind} {{ fill: {COLORS[tone]}; background: {COLORS[tone]}; }}\n" for kind, tone in TONES.items()
    )


def _swatch(name: str, text: str) -> str:
    return f'<span><i class="{name}"></i>{escape(text)}</span>'


def _largest(seen: Foreseen) -> str:
    rows = [(where, f"{size / GIB:.3f}") for where, size in seen.largest_at_peak(seen.memory.fullest)[:_TENSORS]]
    return _table(("kind, line and module", "GiB"), rows)


# Tables and lists


def _exposed(played: Played) -> str:
    rows = [
        (
            name.place or "unknown line",
            ", ".join(played.exposed_modules.get(name, ())),
            name.group,
            seconds_text(time),
            f"{time / played.seconds:.1%}",
        )
        for name, time in list(played.exposed.items())[:_LINES]
    ]
    return _table(("line", "modules", "group", "time", "share"), rows, num_texts=3) if rows else "<p>None.</p>"


def _rich_table(table: Table) -> str:
    titles = [str(column.header) for column in table.columns]
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return _table(titles if any(titles) else (), list(zip(*columns, strict=True)))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], num_texts: int = 1) -> str:
    """Returns a table whose first columns are texts, which wrap, and whose last ones are numbers."""

    def line(tag: str, texts: Sequence[str]) -> str:
        return f"<tr>{''.join(_cell(tag, text, index >= num_texts) for index, text in enumerate(texts))}</tr>"

    head = line("th", titles) if titles else ""
    return f'<div class="scroll"><table>{head}{"".join(line("td", row) for row in rows)}</table></div>'


def _cell(tag: str, text: str, is_number: bool) -> str:
    shown = escape(text)
    if is_number:
        return f'<{tag} class="number">{shown}</{tag}>'
    return f"<{tag}>{f'<code>{shown}</code>' if ':' in text else shown}</{tag}>"


def _list(title: str, texts: Sequence[str], name: str = "") -> str:
    if not texts:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<section class="{name}"><h2>{title}</h2><ul>{items}</ul></section>'
