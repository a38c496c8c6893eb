"""Figure of one timeline, or of two above each other: sizes, scales and the legend. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from echelon.timeline.boxes import TimelineLayout, boxes_of, critical_lines, lengths, planned_first
from echelon.timeline.palette import COLORS, NAMES, THEMES, Theme, strokes, text_color
from echelon.timeline.panel import CHARACTER, SMALLEST, Panel, paint, sizes_of
from echelon.timeline.timeline import Cause, Timeline
from echelon.timeline.words import cause_words, chunk_words, figures, is_measured, memory_text, memory_words, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches. A page of documents shows about 9 inches, and there the smallest text has its full size.
_LEFT, _RIGHT, _TITLE, _TIME_AXIS = 0.75, 0.25, 0.52, 0.46
_MIN_WIDTH, _MAX_WIDTH = 9.0, 17.0


class _Size(NamedTuple):
    """Width and margins of the figure, in inches."""

    width: float
    left: float
    right: float

    @property
    def inner(self) -> float:
        return self.width - self.left - self.right


def figure_of(timeline: Timeline, against: Timeline | None = None, theme: Theme = THEMES["light"]) -> Figure:
    """Returns the picture as a matplotlib figure, such as for a notebook. See `Timeline.draw`."""
    # Not pyplot: it would choose a GUI backend and keep the figure alive in its global list.
    from matplotlib.figure import Figure

    timelines = planned_first(timeline, against)
    layouts = list(map(boxes_of, timelines))
    panels = list(map(_panel, timelines, layouts, lengths(timelines)))
    size = _size_of(panels)
    legend = place(_items(panels, theme), size.inner)
    heights = [_TITLE + panel.height + _TIME_AXIS for panel in panels]
    total = sum(heights) + legend.height
    figure = Figure(figsize=(size.width, total), facecolor=theme.page)
    top = total
    for panel, height in zip(panels, heights, strict=True):
        bottom = top - height + _TIME_AXIS
        axes = figure.add_axes((size.left / size.width, bottom / total, size.inner / size.width, panel.height / total))
        paint(axes, panel, size.inner, theme)
        for text, above, points, weight, color in (
            (title(panel.timeline), 0.24, 10.5, "bold", theme.ink),
            (figures(panel.timeline), 0.07, 8.5, "normal", theme.faint),
        ):
            x, y = size.left / size.width, (bottom + panel.height + above) / total
            figure.text(x, y, text, fontsize=points, weight=weight, color=color, parse_math=False)
        top -= height
    legend.draw(figure, size.left, theme)
    return figure


def _panel(timeline: Timeline, layout: TimelineLayout, length: float) -> Panel:
    ranks = sum(not row.is_lane for row in layout.rows)
    return Panel(timeline, layout, length, sizes_of(len(layout.rows), ranks, layout.most_memory > 0))


def _size_of(panels: list[Panel]) -> _Size:
    right = _RIGHT
    for panel in panels:
        if panel.sizes.strip:
            longest = max(len(_peak(panel, row.rank)) for row in panel.layout.rows if row.memory)
            right = max(right, 0.2 + longest * SMALLEST * CHARACTER)
    longest = max((len(row.title) for panel in panels for row in panel.layout.rows), default=0)
    left = max(_LEFT, 0.2 + longest * 8 * CHARACTER)
    return _Size(max(_wanted_width(panel) for panel in panels) + left + right, left, right)


def _peak(panel: Panel, rank: int) -> str:
    held = next(row.memory for row in panel.layout.rows if row.rank == rank and not row.is_lane)
    return memory_text(max(level.amount for level in held), panel.timeline.memory_unit) if held else ""


def _wanted_width(panel: Panel) -> float:
    """Returns the width in inches at which most boxes have room for their text, within limits."""
    least, most = _MIN_WIDTH - _LEFT - _RIGHT, _MAX_WIDTH - _LEFT - _RIGHT
    boxes = sorted((box for box in panel.layout.boxes if box.width > 0), key=lambda box: box.width)
    if not boxes:
        return least
    text = max(len(box.short if box.is_action else box.label) for box in boxes) * SMALLEST * CHARACTER + 0.04
    # A measured timeline may leave more boxes without text: some of them are narrow by chance. Where a tenth would be
    # too few, text in the longer half, such as backwards, still says which microbatch runs where.
    for share in (0.35 if is_measured(panel.timeline) else 0.1, 0.6):
        wanted = text * panel.length / boxes[int(len(boxes) * share)].width
        if wanted <= most:
            return max(least, wanted)
    # A figure that cannot hold the text at its full width stays as wide as a page.
    return least


def _items(panels: list[Panel], theme: Theme) -> list[Item]:
    # A planned and a measured timeline usually have the same entries, which then stand there once.
    causes = {gap.cause for panel in panels for row in panel.layout.rows for gap in row.gaps}
    found = dict.fromkeys(item for panel in panels for item in items_of(panel, causes, theme))
    return sorted(found, key=lambda item: SHAPES.index(item.shape))


_SIZE = 8.0
_LINE, _SWATCH, _HEIGHT, _SPACE, _BELOW = 0.22, 0.22, 0.11, 0.2, 0.1
# Mean width of a character of DejaVu Sans, in inches per point of its size.
_CHARACTER = 0.55 / 72


Shape: TypeAlias = Literal["box", "chunk", "idle", "line", "memory"]
SHAPES: tuple[Shape, ...] = ("box", "chunk", "idle", "line", "memory")
"""Kinds of entries, in their order."""


class Item(NamedTuple):
    """Entry of a legend."""

    shape: Shape
    name: str
    fill: str
    cause: Cause | None = None

    @property
    def width(self) -> float:
        """Inches of the swatch, its name and the space behind it."""
        return _SWATCH + 0.07 + len(self.name) * _SIZE * _CHARACTER + _SPACE


def items_of(panel: Panel, causes: Collection[Cause], theme: Theme) -> Iterator[Item]:
    """Yields entries for all that occurs in a panel.

    Args:
        panel: the panel.
        causes: causes of idle time in the whole figure: warm-up and drain share an entry, if both occur in some panel.
        theme: the theme of the figure.
    """
    for tone in panel.layout.tones:
        yield Item("box", NAMES[tone], COLORS[tone])
    if panel.layout.num_chunks > 1:
        yield Item("chunk", chunk_words(panel.layout.num_chunks), COLORS["F"])
    for cause, words in cause_words(causes):
        yield Item("idle", words, theme.idle[cause], cause)
    if critical_lines(panel.timeline):
        yield Item("line", "critical path", theme.ink)
    if panel.sizes.strip:
        yield Item("memory", memory_words(panel.timeline), theme.memory)


class Legend(NamedTuple):
    """Entries in lines."""

    lines: list[list[Item]]
    height: float
    """Inches of all lines, and the margin below them."""

    def draw(self, figure: Figure, left: float, theme: Theme) -> None:
        """Draws the legend at the bottom of a figure. `left` is its margin in inches."""
        width, total = figure.get_size_inches()
        axes = figure.add_axes((left / width, 0, 1 - left / width, self.height / total), label="legend")
        axes.set_axis_off()
        axes.set_xlim(0, width - left)
        axes.set_ylim(self.height, 0)
        for number, line in enumerate(self.lines):
            x, y = 0.0, (number + 0.5) * _LINE
            for item in line:
                _draw_swatch(axes, item, x, y, theme)
                axes.text(
                    x + _SWATCH + 0.07, y, item.name, fontsize=_SIZE, color=theme.ink, va="center", parse_math=False
                )
                x += item.width


def place(items: list[Item], width: float) -> Legend:
    """Breaks entries into lines of at most `width` inches."""
    lines: list[list[Item]] = [[]]
    used = 0.0
    for item in items:
        if lines[-1] and used + item.width - _SPACE > width:
            lines.append([])
            used = 0.0
        lines[-1].append(item)
        used += item.width
    return Legend(lines, len(lines) * _LINE + _BELOW)


def _draw_swatch(axes: Axes, item: Item, x: float, y: float, theme: Theme) -> None:
    from matplotlib.patches import Rectangle

    if item.shape == "line":
        axes.plot([x, x + _SWATCH], [y, y], color=item.fill, linewidth=1.6, solid_capstyle="round")
        return
    if item.shape == "memory":
        axes.fill_between(
            [x, x + 0.08, x + 0.08, x + _SWATCH], [y, y, y - 0.07, y - 0.07], y + 0.05, color=item.fill, lw=0
        )
        return
    edge = theme.hatch[item.cause] if item.cause else "none"
    corner = (x, y - _HEIGHT / 2)
    axes.add_patch(Rectangle(corner, _SWATCH, _HEIGHT, facecolor=item.fill, edgecolor=edge, linewidth=0.4))
    if item.cause:
        for stroke in strokes(item.cause, x, x + _SWATCH, y - _HEIGHT / 2, y + _HEIGHT / 2):
            axes.plot([stroke.left, stroke.right], [stroke.first, stroke.second], color=edge, linewidth=0.5)
    if item.shape == "chunk":
        axes.add_patch(Rectangle((x, corner[1] + 0.02), _SWATCH, 0.025, facecolor=text_color(item.fill), linewidth=0))
