"""Figure of a timeline as SVG, PNG or PDF: a row per rank and lane, time from left to right. Needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from echelon.arguments import check_path, writing
from echelon.errors import EchelonError
from echelon.timeline.boxes import Box, TimelineLayout, boxes_of
from echelon.timeline.palette import KIND_NAMES, NUM_HUES, color, text_color
from echelon.timeline.timeline import Timeline, is_measured, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Metadata to leave out of each format: with it, two files of one picture would differ.
_FORMATS = {".svg": {"Date": None}, ".png": {"Software": None}, ".pdf": {"CreationDate": None}}

# Inches.
_LEFT, _RIGHT, _TITLE, _TIME_AXIS, _LEGEND_LINE = 0.75, 0.25, 0.4, 0.48, 0.24
_MIN_WIDTH, _MAX_WIDTH = 8.0, 18.0
_PADDING = 0.05
# Width of a character of DejaVu Sans Mono, in inches per point of its size. 1 inch is 72 points.
_CHARACTER = 0.602 / 72

_FONT = ["DejaVu Sans Mono", "monospace"]
_IDLE, _EDGE, _INK = "#f7f7f7", "#404040", "#202020"
# Two timelines whose work differs by at most this factor are assumed to be in the same unit.
_SAME_UNIT = 1.5
# Above this, boxes are rasterized even in SVG and PDF: viewers are slow to open as many polygons.
_MANY_BOXES = 50_000


def draw(timeline: Timeline, path: str | os.PathLike[str], against: Timeline | None = None) -> None:
    """Draws a timeline into a file; see `Timeline.draw`.

    Raises:
        EchelonError: matplotlib is not installed, or the suffix names no format.
    """
    save(lambda: figure_of(timeline, against), path)


def save(make: Callable[[], Figure], path: str | os.PathLike[str]) -> None:
    """Writes a figure into a file, the same bytes in every run. `make` is called with the default style.

    Raises:
        EchelonError: matplotlib is not installed, or the suffix names no format.
        FileError: the file cannot be written.
    """
    check_path(path)
    suffix = Path(path).suffix.lower()
    if suffix not in _FORMATS:
        raise EchelonError(f"cannot draw into {os.fspath(path)!r}: give a name that ends in .svg, .png or .pdf")
    try:
        from matplotlib import style
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise EchelonError("drawing needs matplotlib: pip install matplotlib") from None
    # Starts from the default style, so a style that the program has set for its own figures changes nothing here. Text
    # kept as text can be searched and keeps the file small. The salt makes the ids in an SVG the same in every run.
    own = {"svg.fonttype": "none", "svg.hashsalt": "echelon", "pdf.fonttype": 42}
    with style.context(["default", own]):
        figure = make()
        with writing(path):
            figure.savefig(path, format=suffix[1:], dpi=150, metadata=_FORMATS[suffix])


class _Panel(NamedTuple):
    """One timeline of the picture."""

    timeline: Timeline
    boxes: TimelineLayout
    length: float
    """Time that its axis shows."""
    row: float
    """Height of a row, in inches."""

    @property
    def height(self) -> float:
        return self.row * max(1, len(self.boxes.rows))

    @property
    def unlabelled(self) -> float:
        """Share of the boxes that may stay without a label."""
        # A measured timeline gets more: some of its boxes are narrow by chance.
        return 0.35 if is_measured(self.timeline) else 0.1


class _Font(NamedTuple):
    """Font of the labels: its size in points, and whether labels are written in full."""

    size: float
    in_full: bool

    def label(self, box: Box) -> str:
        return box.label if self.in_full else box.short

    def width(self, box: Box) -> float:
        return len(self.label(box)) * self.size * _CHARACTER + _PADDING


def figure_of(timeline: Timeline, against: Timeline | None = None) -> Figure:
    """Returns the picture as a matplotlib figure, such as for a notebook. See `Timeline.draw`."""
    # Not pyplot: it would choose a GUI backend and keep the figure alive in its global list.
    from matplotlib.figure import Figure

    panels = _panels([timeline] if against is None else _planned_first(against, timeline))
    legends = _legends(panels)
    width = max(map(_wanted_width, panels))
    heights = [_TITLE + panel.height + _TIME_AXIS for panel in panels]
    total = sum(heights) + _LEGEND_LINE * len(legends)
    figure = Figure(figsize=(width, total))
    top = total
    for panel, height in zip(panels, heights, strict=True):
        bottom = top - height + _TIME_AXIS
        box = (_LEFT / width, bottom / total, (width - _LEFT - _RIGHT) / width, panel.height / total)
        _paint(figure.add_axes(box), panel, width - _LEFT - _RIGHT)
        top -= height
    for line, handles in enumerate(reversed(legends)):
        _place_legend(figure, handles, (line * _LEGEND_LINE + 0.04) / total, _LEFT / width)
    return figure


def _planned_first(above: Timeline, below: Timeline) -> list[Timeline]:
    # A measured run is always below a planned one, whichever is drawn `against` the other.
    swapped = is_measured(above) and not is_measured(below)
    return [below, above] if swapped else [above, below]


def _panels(timelines: list[Timeline]) -> list[_Panel]:
    return [
        _panel(timeline, boxes_of(timeline), length)
        for timeline, length in zip(timelines, _lengths(timelines), strict=True)
    ]


def _panel(timeline: Timeline, boxes: TimelineLayout, length: float) -> _Panel:
    return _Panel(timeline, boxes, length, row=min(0.45, max(0.1, 0.08 + 3.4 / max(1, len(boxes.rows)))))


def _lengths(timelines: list[Timeline]) -> list[float]:
    """Returns the time that each axis shows.

    Both axes are equal if the work is about the same. Otherwise the units differ, such as a plan that counts forwards
    and a measured run in seconds. Then equal work is equally wide, and only idle time differs.
    """
    makespans = [float(timeline.makespan) for timeline in timelines]
    work = [float(max(timeline.busy, default=0)) for timeline in timelines]
    if not all(work):
        return [makespan or 1.0 for makespan in makespans]
    if max(work) <= _SAME_UNIT * min(work):
        return [max(makespans)] * len(makespans)
    stretch = max(makespan / busy for makespan, busy in zip(makespans, work, strict=True))
    return [busy * stretch for busy in work]


def _wanted_width(panel: _Panel) -> float:
    """Returns the width in inches at which most boxes have room for their full label, within limits."""
    boxes = sorted((box for row in panel.boxes.rows for box in row if box.width > 0), key=lambda box: box.width)
    if not boxes:
        return _MIN_WIDTH
    narrow = boxes[int(len(boxes) * panel.unlabelled)]
    needed = _Font(6.5, in_full=True).width(max(boxes, key=lambda box: len(box.label)))
    return min(_MAX_WIDTH, max(_MIN_WIDTH, needed * panel.length / narrow.width + _LEFT + _RIGHT))


def _paint(axes: Axes, panel: _Panel, width: float) -> None:
    """Paints a panel whose axes are `width` inches wide."""
    scale = width / panel.length
    rows = panel.boxes.rows
    _paint_rows(axes, panel)
    flat = [(number, box) for number, row in enumerate(rows) for box in row]
    wide = [item for item in flat if item[1].width * scale > _PADDING]
    # An edge would hide a narrow box. A box that took no time is visible by its edge alone, so it keeps one.
    _paint_boxes(axes, [item for item in flat if 0 < item[1].width * scale <= _PADDING], edge_width=0)
    _paint_boxes(axes, [item for item in flat if item[1].width <= 0] + wide, edge_width=0.4)
    _paint_labels(axes, wide, panel, scale)


def _paint_rows(axes: Axes, panel: _Panel) -> None:
    rows = list(range(len(panel.boxes.rows)))
    axes.set_xlim(0, panel.length)
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    if panel.boxes.makespan:
        axes.barh(rows, panel.boxes.makespan, height=0.88, color=_IDLE, edgecolor="#d8d8d8", linewidth=0.4)
    size = min(9.0, panel.row * 72 * 0.6)
    axes.set_yticks(rows, panel.boxes.titles, fontsize=size, color=_INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, color="#808080", labelcolor=_INK)
    axes.set_xlabel("time", fontsize=8, color=_INK, labelpad=1)
    for side in ("left", "top", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#808080")
    axes.set_title(summary(panel.timeline), loc="left", fontsize=10, color=_INK)


def _paint_boxes(axes: Axes, boxes: list[tuple[int, Box]], edge_width: float) -> None:
    from matplotlib.collections import PolyCollection

    corners = []
    for row, box in boxes:
        top, bottom = row + 0.44 - 0.88 * box.upper, row + 0.44 - 0.88 * box.lower
        corners.append([(box.start, top), (box.end, top), (box.end, bottom), (box.start, bottom)])
    axes.add_collection(
        PolyCollection(
            corners,
            facecolors=[color(box.color_index, box.kind) for _, box in boxes],
            edgecolors=_EDGE,
            linewidths=edge_width,
            zorder=2,
            rasterized=len(boxes) > _MANY_BOXES,
        ),
        autolim=False,
    )


def _paint_labels(axes: Axes, boxes: list[tuple[int, Box]], panel: _Panel, scale: float) -> None:
    # One font for all: labels of several sizes look like a meaning. Boxes that are too narrow stay without a label.
    font = _font([box for _, box in boxes], panel, scale)
    if font is None:
        return
    for row, box in boxes:
        if font.width(box) > box.width * scale:
            continue
        axes.text(
            (box.start + box.end) / 2,
            row + 0.44 - 0.44 * (box.lower + box.upper),
            font.label(box),
            ha="center",
            va="center_baseline",
            fontsize=font.size,
            family=_FONT,
            color=text_color(box.kind),
            parse_math=False,
            zorder=3,
        )


def _font(boxes: list[Box], panel: _Panel, scale: float) -> _Font | None:
    """Chooses the largest font that fits: full labels if nearly all boxes have room, else short ones if 40 % have.

    None if fewer have room: a label here and there would not help.
    """
    # In points. An overlapped step has half a row, and then all labels are as small.
    height = panel.row * 72 * 0.88 * min((box.upper - box.lower for box in boxes), default=1.0)
    sizes = [size for size in (8.0, 7.0, 6.0, 5.0) if size < 0.75 * height] or [0.75 * height]
    for in_full, part in ((True, 1 - panel.unlabelled), (False, 0.4)):
        fonts = [_Font(size, in_full) for size in sizes]
        fitting = [sum(font.width(box) <= box.width * scale for box in boxes) for font in fonts]
        # The smallest font fits the most boxes. A larger one is taken if it loses at most 5 % of these labels.
        if fitting[-1] >= part * len(boxes):
            return next(font for font, count in zip(fonts, fitting, strict=True) if count >= 0.95 * fitting[-1])
    return None


# A colour and its meaning.
_Swatch = tuple[str, str]


def _legends(panels: list[_Panel]) -> list[list[_Swatch]]:
    kinds = {kind for panel in panels for kind in panel.boxes.kinds}
    lines = [[(color(None, kind), name) for kind, name in KIND_NAMES.items() if kind in kinds] + [(_IDLE, "idle")]]
    count = max(panel.boxes.num_microbatches for panel in panels)
    if count:
        lines.append([(color(hue, "F"), _microbatches(hue, count)) for hue in range(min(count, NUM_HUES))])
    # A planned and a measured timeline usually have the same names, which then need one line only.
    for panel in panels:
        # Hues repeat here, too.
        sharing = [[name for name in panel.boxes.names[hue::NUM_HUES] if name] for hue in range(NUM_HUES)]
        names = [(color(hue, "F"), ", ".join(names)) for hue, names in enumerate(sharing) if names]
        if names and names not in lines:
            lines.append(names)
    return lines


def _microbatches(hue: int, count: int) -> str:
    # Hues repeat, so one swatch stands for several microbatches. Three numbers are enough to show the pattern.
    numbers = list(range(hue, count, NUM_HUES))
    text = ", ".join(map(str, numbers[:3])) + (" ..." if len(numbers) > 3 else "")
    return f"microbatch {text}" if hue == 0 else text


def _place_legend(figure: Figure, swatches: list[_Swatch], bottom: float, left: float) -> None:
    from matplotlib.patches import Patch

    legend = figure.legend(
        handles=[Patch(facecolor=fill, edgecolor=_EDGE, linewidth=0.4) for fill, _ in swatches],
        labels=["." for _ in swatches],
        loc="lower left",
        bbox_to_anchor=(left, bottom),
        ncols=len(swatches),
        fontsize=8,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.4,
        columnspacing=1.4,
    )
    # Not passed as labels: matplotlib hides labels with a leading underscore and reads $ as mathematics.
    for text, (_, name) in zip(legend.get_texts(), swatches, strict=True):
        text.set_parse_math(False)
        text.set_text(name)
