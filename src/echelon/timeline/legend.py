"""Legend of a figure: swatches with names, in lines as wide as the figure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from echelon.timeline.critical import critical_lines
from echelon.timeline.hatch import strokes
from echelon.timeline.palette import COLORS, NAMES, Theme, text_color
from echelon.timeline.panel import Panel
from echelon.timeline.timeline import Cause
from echelon.timeline.words import cause_words, chunk_words, memory_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
