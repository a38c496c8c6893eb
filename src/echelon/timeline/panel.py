"""Panel of a figure: one timeline, painted with matplotlib. Its vertical axis counts inches from the top."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from echelon.timeline.boxes import Box, Row, TimelineLayout, critical_lines
from echelon.timeline.palette import COLORS, Theme, strokes, text_color
from echelon.timeline.timeline import Cause, Timeline
from echelon.timeline.words import axis_words, memory_text, time_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import Collection

SMALLEST = 7.0
"""Points of the smallest text."""
CHARACTER = 0.602 / 72
"""Width of a character of DejaVu Sans Mono, in inches per point of its size. 1 inch is 72 points."""

_FONT = ["DejaVu Sans Mono", "monospace"]
_SIZES = (8.5, 8.0, 7.5, SMALLEST)
_PADDING = 0.03
_MARK, _THIN_MARK, _MOST_MARKS = 0.03, 0.018, 3
# Above this, boxes are rasterized even in SVG and PDF: viewers are slow to open as many polygons.
_MANY_BOXES = 50_000
_SEPARATED = 0.05
"""Inches from which on a box has a thin line around it, which would hide a narrower one."""
# Share of the actions with room for a text below which none has one: a text here and there would look like a meaning.
_WORTHWHILE = 0.15

Corners = list[tuple[float, float]]


class Sizes(NamedTuple):
    """Heights in inches: of a rank's boxes, of a lane's boxes, of the strip of memory, and of the space below a row."""

    box: float
    lane: float
    strip: float
    space: float


def sizes_of(num_rows: int, num_ranks: int, has_memory: bool) -> Sizes:
    """Returns heights that keep a picture of up to 64 rows on a screen."""
    box = next((height for rows, height in ((8, 0.34), (16, 0.24), (32, 0.17)) if num_rows <= rows), 0.0)
    box = box or max(0.03, min(0.12, 8 / num_rows))
    strip = 0.4 * box if has_memory and num_ranks <= 32 else 0.0
    return Sizes(box, 0.55 * box, strip, 0.06 if num_rows <= 16 else 0.2 * box)


class Panel(NamedTuple):
    """Timeline of a figure."""

    timeline: Timeline
    layout: TimelineLayout
    length: float
    """Time that its axis shows."""
    sizes: Sizes

    def height_of(self, row: Row) -> float:
        """Inches from the top of a row to that of the next one."""
        sizes = self.sizes
        return sizes.lane + sizes.space if row.is_lane else sizes.box + sizes.strip + sizes.space

    @property
    def height(self) -> float:
        """Inches of all rows."""
        return max(0.3, sum(map(self.height_of, self.layout.rows)))

    @property
    def tops(self) -> list[float]:
        """Inches from the top of the panel to each row."""
        tops, top = [], 0.0
        for row in self.layout.rows:
            tops.append(top)
            top += self.height_of(row)
        return tops


def paint(axes: Axes, panel: Panel, width: float, theme: Theme) -> None:
    """Paints a panel whose axes are `width` inches wide."""
    scale = width / panel.length
    _paint_axes(axes, panel, theme)
    _paint_gaps(axes, panel, scale, theme)
    boxes = [(top, box, row) for row, top in zip(panel.layout.rows, panel.tops, strict=True) for box in row.boxes]
    wide = [item for item in boxes if item[1].width * scale > _SEPARATED]
    narrow = [item for item in boxes if item[1].width * scale <= _SEPARATED]
    # A box that took no time is visible by its edge alone.
    _paint_boxes(axes, panel, narrow, edge=None)
    _paint_boxes(axes, panel, wide, edge=theme.page)
    _paint_marks(axes, panel, boxes)
    _paint_memory(axes, panel, theme)
    _paint_critical_path(axes, panel, theme)
    _paint_labels(axes, wide, panel, scale)


_Placed = tuple[float, Box, Row]


def _paint_axes(axes: Axes, panel: Panel, theme: Theme) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_facecolor(theme.page)
    axes.set_xlim(0, panel.length)
    axes.set_ylim(panel.height, 0)
    scale = time_scale(panel.length, panel.timeline.unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time * scale.factor:g}"))
    axes.set_xlabel(axis_words(panel.timeline, scale), fontsize=8, color=theme.faint, labelpad=1)
    axes.tick_params(axis="x", labelsize=8, color=theme.faint, labelcolor=theme.ink)
    _paint_titles(axes, panel, theme)
    axes.tick_params(axis="y", length=0)
    for side in ("left", "top", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.faint)


def _paint_titles(axes: Axes, panel: Panel, theme: Theme) -> None:
    """Writes the titles of the rows, and leaves some out where rows are lower than a text."""
    room, places, titles = -1.0, [], []
    for row, top in zip(panel.layout.rows, panel.tops, strict=True):
        middle = top + (panel.sizes.lane if row.is_lane else panel.sizes.box) / 2
        if middle - room >= 1.3 * SMALLEST / 72:
            places.append(middle)
            titles.append(row.title)
            room = middle
    size = 8.5 if len(titles) <= 16 else SMALLEST
    axes.set_yticks(places, titles, fontsize=size, color=theme.ink)
    for label, title in zip(axes.get_yticklabels(), titles, strict=True):
        if not title.startswith("rank"):
            label.set_color(theme.faint)
            label.set_fontsize(SMALLEST)


def _rectangle(left: float, right: float, top: float, bottom: float) -> Corners:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _edges(panel: Panel, top: float, box: Box, row: Row) -> tuple[float, float]:
    """Returns the upper and the lower edge of a box, in inches from the top of the panel."""
    height = panel.sizes.lane if row.is_lane else panel.sizes.box
    return top + height * (1 - box.upper), top + height * (1 - box.lower)


def _paint_gaps(axes: Axes, panel: Panel, scale: float, theme: Theme) -> None:
    from matplotlib.collections import LineCollection

    by_cause: dict[Cause, list[Corners]] = {}
    lines: dict[Cause, list[Corners]] = {}
    for row, top in zip(panel.layout.rows, panel.tops, strict=True):
        for start, end, cause in row.gaps:
            left, right, bottom = float(start), float(end), top + panel.sizes.box
            by_cause.setdefault(cause, []).append(_rectangle(left, right, top, bottom))
            for stroke in strokes(cause, left * scale, right * scale, top, bottom):
                ends = [(stroke.left / scale, stroke.first), (stroke.right / scale, stroke.second)]
                lines.setdefault(cause, []).append(ends)
    hatch = [line for each in lines.values() for line in each]
    colors = [theme.hatch[cause] for cause, each in lines.items() for _ in each]
    _add(axes, LineCollection(hatch, colors=colors, linewidths=0.5, zorder=1.5, gid="hatch"))
    for cause, corners in sorted(by_cause.items()):
        # gid: also the id of the element in an SVG.
        _add(axes, _areas(corners, theme.idle[cause], zorder=1, gid=f"idle {cause}"))


def _areas(corners: Sequence[Corners], fills: str | Sequence[str], zorder: float, gid: str) -> Collection:
    from matplotlib.collections import PolyCollection

    return PolyCollection(corners, facecolors=fills, edgecolors="none", linewidths=0, zorder=zorder, gid=gid)


def _add(axes: Axes, collection: Collection) -> None:
    # Nothing lies outside of the axes. A reference to their edges at every shape would be a third of an SVG.
    collection.set_clip_on(False)
    # autolim: the limits are set, and matplotlib would go through all corners to find them.
    axes.add_collection(collection, autolim=False)


def _paint_boxes(axes: Axes, panel: Panel, boxes: Sequence[_Placed], edge: str | None) -> None:
    from matplotlib.collections import PolyCollection

    # In an SVG, neighbours of one color are one path.
    boxes = sorted(boxes, key=lambda placed: COLORS[placed[1].tone])
    corners = [_rectangle(box.start, box.end, *_edges(panel, top, box, row)) for top, box, row in boxes]
    fills = [COLORS[box.tone] for _, box, _ in boxes]
    collection = PolyCollection(
        corners,
        facecolors=fills,
        edgecolors=fills if edge is None else edge,
        linewidths=0.3 if edge is None else 0.6,
        zorder=2,
        rasterized=len(boxes) > _MANY_BOXES,
        gid="boxes",
    )
    _add(axes, collection)


def _paint_marks(axes: Axes, panel: Panel, boxes: Iterable[_Placed]) -> None:
    """Paints lines at the top of the boxes of later chunks: one for the second chunk, two for the third, and so on."""
    corners, fills = [], []
    # In an SVG, neighbours of one color are one path.
    for top, box, row in sorted(boxes, key=lambda placed: text_color(COLORS[placed[1].tone])):
        upper, lower = _edges(panel, top, box, row)
        step = min(_MARK if panel.layout.num_chunks == 2 else _THIN_MARK, (lower - upper) / 10)
        # Halves have no room above their text, so their marks begin at the edge.
        first = upper + step * (box.upper - box.lower == 1)
        for mark in range(min(box.chunk, _MOST_MARKS)):
            start = first + 2 * mark * step
            corners.append(_rectangle(box.start, box.end, start, start + step))
            fills.append(text_color(COLORS[box.tone]))
    if corners:
        _add(axes, _areas(corners, fills, zorder=2.5, gid="chunks"))


def _paint_memory(axes: Axes, panel: Panel, theme: Theme) -> None:
    if not panel.sizes.strip:
        return
    areas = []
    for row, top in zip(panel.layout.rows, panel.tops, strict=True):
        if not row.memory:
            continue
        bottom = top + panel.sizes.box + panel.sizes.strip
        unit = 0.92 * panel.sizes.strip / panel.layout.most_memory
        points: Corners = []
        for level, following in pairwise((*row.memory, row.memory[-1]._replace(time=panel.layout.makespan))):
            height = bottom - unit * float(level.amount)
            points += [(float(level.time), height), (float(following.time), height)]
        areas.append([(points[0][0], bottom), *points, (points[-1][0], bottom)])
        peak = max(level.amount for level in row.memory)
        axes.text(
            panel.length * 1.006,
            bottom - panel.sizes.strip / 2,
            memory_text(peak, panel.timeline.memory_unit),
            fontsize=SMALLEST,
            family=_FONT,
            color=theme.faint,
            va="center_baseline",
            gid="peak",
        )
    _add(axes, _areas(areas, theme.memory, zorder=2, gid="memory"))


def _paint_critical_path(axes: Axes, panel: Panel, theme: Theme) -> None:
    from matplotlib.collections import LineCollection

    lines = list(_critical_path(panel))
    if lines:
        width = min(1.6, 10 * panel.sizes.box)
        path = LineCollection(
            lines,
            colors=theme.ink,
            linewidths=width,
            capstyle="round",
            joinstyle="round",
            zorder=3,
            gid="critical path",
        )
        _add(axes, path)


def _critical_path(panel: Panel) -> Iterator[Corners]:
    """Yields the lines of the critical path: along the lower edges of boxes, and from rank to rank."""
    tops = [top for row, top in zip(panel.layout.rows, panel.tops, strict=True) if not row.is_lane]
    box = panel.sizes.box
    for start, rank, end, other in critical_lines(panel.timeline):
        first, last = (start, tops[rank] + box), (end, tops[other] + box)
        # Upright at the edges of boxes, and oblique in the space between rows: there are no labels.
        if other < rank:
            yield [first, (start, tops[rank]), last]
        elif other > rank:
            yield [first, (end, tops[other]), last]
        else:
            yield [first, last]


def _paint_labels(axes: Axes, boxes: Sequence[_Placed], panel: Panel, scale: float) -> None:
    from matplotlib.path import Path
    from matplotlib.transforms import Bbox

    longest = max((len(box.short) for box in panel.layout.boxes if box.is_action), default=0)
    size = _size([item[1] for item in boxes], panel, scale, longest)
    if size is None:
        return
    path = [Path(line) for line in _critical_path(panel)]
    halos, fills = [], []
    for top, box, row in boxes:
        text = _text(box, size, scale, longest)
        upper, lower = _edges(panel, top, box, row)
        if not text or size / 72 > lower - upper:
            continue
        x, y = (box.start + box.end) / 2, (upper + lower) / 2
        # The path between distant ranks runs through rows. It passes below a label.
        width = len(text) * size * CHARACTER / scale
        halo = _rectangle(x - width / 2, x + width / 2, y - size / 144, y + size / 144)
        if any(line.intersects_bbox(Bbox((halo[0], halo[2])), filled=False) for line in path):
            halos.append(halo)
            fills.append(COLORS[box.tone])
        axes.text(
            x,
            y,
            text,
            ha="center",
            va="center_baseline",
            fontsize=size,
            family=_FONT,
            color=text_color(COLORS[box.tone]),
            parse_math=False,  # names with "$" are no formulas
            zorder=4,
            gid="label",
        )
    if halos:
        _add(axes, _areas(halos, fills, zorder=3.5, gid="halo"))


def _text(box: Box, size: float, scale: float, longest: int) -> str:
    """Returns the longest text of a box that fits. Empty if none does.

    Args:
        box: The box.
        size: Points of the text.
        scale: Inches per unit of time.
        longest: Most digits of a microbatch. A box needs room for as many, so that equal boxes look equal.
    """
    names = (box.short,) if box.is_action else (box.label, box.short, box.short.split(" ")[0])
    least = longest if box.is_action else 0
    room = box.width * scale - _PADDING
    return next((text for text in names if max(len(text), least) * size * CHARACTER <= room), "")


def _size(boxes: Sequence[Box], panel: Panel, scale: float, longest: int) -> float | None:
    """Returns one size of text for all boxes: the largest that loses few texts. None if too few have room for one."""
    height = panel.sizes.box * min((box.upper - box.lower for box in boxes), default=1.0)
    sizes = [size for size in _SIZES if 1.15 * size / 72 <= height]
    if not sizes:
        return None
    # A shortened text counts half: a smaller size that shows more in full is the better one.
    fitting = [
        sum((1.0 if text in (box.label, box.short if box.is_action else "") else 0.5) for box, text in texts if text)
        for texts in ([(box, _text(box, size, scale, longest)) for box in boxes] for size in sizes)
    ]
    if fitting[-1] < _WORTHWHILE * sum(box.is_action for box in panel.layout.boxes):
        return None
    return next(size for size, count in zip(sizes, fitting, strict=True) if count >= 0.97 * fitting[-1])
