"""Figure of a rank's memory over a step: kinds of tensors stacked, and the device's limit. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.foresight.memory import NAMES, TONES, Curve, highest, limit_text
from echelon.foresight.play.allocator import Memory
from echelon.timeline.palette import COLORS, THEMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LIGHT = THEMES["light"]
_INK, _FAINT, _LIMIT = _LIGHT.ink, _LIGHT.faint, COLORS["exposed"]
_GIB = 1 << 30


def figure_of(curve: Curve, memory: Memory, limit: int, title: str) -> Figure:
    """Returns the picture as a matplotlib figure.

    Args:
        curve: memory over the step.
        memory: figures of the same rank.
        limit: bytes of the device.
        title: name of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    times = [1e3 * time for time in curve.seconds]
    stack = [[size / _GIB for size in sizes] for sizes in curve.kinds.values()]
    axes.stackplot(
        times,
        stack,
        labels=[NAMES.get(kind, kind) for kind in curve.kinds],
        colors=[COLORS[TONES[kind]] for kind in curve.kinds],
        linewidth=0,
        step="post",
    )
    reserved = [size / _GIB for size in curve.reserved]
    axes.plot(
        times, reserved, color=_INK, linewidth=1.0, linestyle=(0, (1, 1.5)), drawstyle="steps-post", label="reserved"
    )
    axes.axhline(limit / _GIB, color=_LIMIT, linewidth=1.2, label=limit_text(curve, limit))
    _mark_peak(axes, times, stack, memory)
    axes.set_xlim(0, times[-1] or 1)
    axes.set_ylim(0, highest(curve, limit) / _GIB)
    axes.set_xlabel("ms", fontsize=9, color=_INK)
    axes.set_ylabel("GiB", fontsize=9, color=_INK)
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.tick_params(labelsize=8, color=_FAINT, labelcolor=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    # The legend's order is that of the stack, the top first.
    handles, labels = axes.get_legend_handles_labels()
    lines, kinds = slice(len(stack), None), slice(len(stack) - 1, None, -1)
    figure.legend(
        handles[lines] + handles[kinds],
        labels[lines] + labels[kinds],
        loc="outside right upper",
        fontsize=8,
        frameon=False,
    )
    return figure


def _mark_peak(axes: Axes, times: list[float], stack: list[list[float]], memory: Memory) -> None:
    totals = list(map(sum, zip(*stack, strict=True)))
    if not totals:
        return
    peak = max(range(len(totals)), key=totals.__getitem__)
    is_late = times[peak] > 0.6 * times[-1]
    axes.plot(times[peak], totals[peak], marker="o", markersize=3.5, color=_INK)
    axes.annotate(
        f"{memory.live_peak / _GIB:.2f} GiB",
        (times[peak], totals[peak]),
        xytext=(-5 if is_late else 5, 5),
        textcoords="offset points",
        ha="right" if is_late else "left",
        fontsize=8,
        color=_INK,
    )
