"""Draws a timeline as SVG, PNG or PDF: a row per rank and lane, time from left to right. Needs matplotlib."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from echelon.errors import EchelonError
from echelon.files import check_path, writing
from echelon.timeline.boxes import Box, TimelineLayout, boxes_of
from echelon.timeline.palette import KIND_NAMES, NUM_HUES, color, text_color
from echelon.timeline.summary import is_measured, summary
from echelon.timeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = {".svg": {"Date": None}, ".png": {"Software": None}, ".pdf": {"CreationDate": None}}
"""For each format what else would make two files of one picture differ."""

# Inches.
_LEFT, _RIGHT, _TITLE, _TIME_AXIS, _LEGEND_LINE = 0.75, 0.25, 0.4, 0.48, 0.24
_MIN_WIDTH, _MAX_WIDTH = 8.0, 18.0
_PADDING = 0.05
_CHARACTER = 0.602 / 72
"""Width of a character of the font, per point of its size."""

_FONT = ["DejaVu Sans Mono", "monospace"]
_IDLE, _EDGE, _INK = "#f7f7f7", "#404040", "#202020"
_SAME_UNIT = 1.5
"""Two timelines whose work differs by no more than this factor are taken to be in the same unit."""
_MANY_BOXES = 50_000
"""Above this, boxes are pixels even in SVG and PDF, which would else be hard to open."""


def draw(timeline: Timeline, path: str | os.PathLike[str], against: Timeline | None = None) -> None:
    """Draws a timeline into a file; see `Timeline.draw`.

    Raises:
        EchelonError: matplotlib is not installed, or the suffix names no format.
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
    # Whatever style the program has set for its own figures. Text as text can be searched, and the file is small.
    own = {"svg.fonttype": "none", "svg.hashsalt": "echelon", "pdf.fonttype": 42}
    with style.context(["default", own]):
        figure = figure_of(timeline, against)
        with writing(path):
            figure.savefig(path, format=suffix[1:], dpi=150, metadata=_FORMATS[suffix])


class _Panel(NamedTuple):
    """One timeline of the picture."""

    timeline: Timeline
    boxes: TimelineLayout
    length: float
    """How much time its axis shows."""
    row: float
    """The height of a row, in inches."""

    @property
    def height(self) -> float:
        return self.row * max(1, len(self.boxes.rows))

    @property
    def unlabelled(self) -> float:
        """The part of the boxes that may stay without a label. Among measured ones some are narrow by chance."""
        return 0.35 if is_measured(self.timeline) else 0.1


class _Font(NamedTuple):
    """How boxes are labelled: the size in points, and whether in full."""

    size: float
    in_full: bool

    def label(self, box: Box) -> str:
        return box.label if self.in_full else box.short

    def width(self, box: Box) -> float:
        return len(self.label(box)) * self.size * _CHARACTER + _PADDING


def figure_of(timeline: Timeline, against: Timeline | None = None) -> Figure:
    """Returns the picture as a figure of matplotlib, for a notebook, say. See `Timeline.draw`."""
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
    """Puts a measured run below a planned one, whichever is drawn against which."""
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
    """How much time each axis shows.

    The same for both, if their work is about the same. Else they are in different units, such as a plan that counts
    forwards and a measured run in seconds: then equal work is equally wide, and idle time is what they differ in.
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
    """As wide as most boxes need to be labelled in full, within limits."""
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
    # An edge would hide a narrow box; of one that took no time it is all there is to see.
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
    """Labels the boxes, all in one way; those in which it does not fit stay without."""
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
    """In full if nearly all boxes have room for that, else in short if the wider kind of them has; as large as can be.

    None: a label here and there would not help.
    """
    height = panel.row * 72 * 0.88 * min((box.upper - box.lower for box in boxes), default=1.0)
    sizes = [size for size in (8.0, 7.0, 6.0, 5.0) if size < 0.75 * height] or [0.75 * height]
    for in_full, part in ((True, 1 - panel.unlabelled), (False, 0.4)):
        fonts = [_Font(size, in_full) for size in sizes]
        fitting = [sum(font.width(box) <= box.width * scale for box in boxes) for font in fonts]
        if fitting[-1] >= part * len(boxes):
            return next(font for font, count in zip(fonts, fitting, strict=True) if count >= 0.95 * fitting[-1])
    return None


_Swatch = tuple[str, str]
"""A colour and what it stands for."""


def _legends(panels: list[_Panel]) -> list[list[_Swatch]]:
    """The lines of the legend."""
    kinds = {kind for panel in panels for kind in panel.boxes.kinds}
    lines = [[(color(None, kind), name) for kind, name in KIND_NAMES.items() if kind in kinds] + [(_IDLE, "idle")]]
    count = max(panel.boxes.num_microbatches for panel in panels)
    if count:
        lines.append(
            [
                (color(color_index, "F"), _microbatches(color_index, count))
                for color_index in range(min(count, NUM_HUES))
            ]
        )
    for panel in panels:
        names = [
            (color(color_index, "F"), name) for color_index, name in enumerate(panel.boxes.names[:NUM_HUES]) if name
        ]
        if names and names not in lines:
            lines.append(names)
    return lines


def _microbatches(color_index: int, count: int) -> str:
    numbers = list(range(color_index, count, NUM_HUES))
    text = ", ".join(map(str, numbers[:3])) + (" ..." if len(numbers) > 3 else "")
    return f"microbatch {text}" if color_index == 0 else text


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
    # Not passed as labels: those with a leading underscore or a $ would have a meaning.
    for text, (_, name) in zip(legend.get_texts(), swatches, strict=True):
        text.set_parse_math(False)
        text.set_text(name)
