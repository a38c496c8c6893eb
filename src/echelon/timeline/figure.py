"""Figure of one timeline, or of two above each other: sizes, scales and the legend. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from echelon.timeline.arrangement import lengths, planned_first
from echelon.timeline.boxes import TimelineLayout, boxes_of
from echelon.timeline.legend import SHAPES, Item, items_of, place
from echelon.timeline.palette import THEMES, Theme
from echelon.timeline.panel import CHARACTER, SMALLEST, Panel, paint, sizes_of
from echelon.timeline.timeline import Timeline
from echelon.timeline.words import figures, is_measured, memory_text, title

if TYPE_CHECKING:
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
