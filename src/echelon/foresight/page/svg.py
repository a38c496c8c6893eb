"""Drawings of a page as SVG: lanes of blocks, and memory over the step. Their width is that of the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import accumulate

from echelon.foresight.memory import Curve, highest
from echelon.foresight.page.lanes import Block, Lane

_WIDTH, _HEIGHT = 10_000, 1_000
"""Units of a drawing. It is stretched to the width of the page, so it has no text."""

HUES = {
    "forward": "fw",
    "backward": "bw",
    "recompute": "re",
    "optimizer": "op",
    "all_gather": "ag",
    "reduce_scatter": "rs",
    "all_reduce": "ar",
    "send": "se",
    "receive": "se",
    "exposed": "ex",
}
"""Class of a block's colour in the page's style. Others have "ot"."""


def lane(row: Lane, seconds: float) -> str:
    """Returns a row of blocks. Each part of it says its text when it is pointed at."""
    scale = _WIDTH / seconds if seconds else 0.0
    lines: dict[str, list[str]] = {}
    for block in row.blocks:
        start, width = _extent(block, scale)
        lines.setdefault(HUES.get(block.hue, "ot"), []).append(f"M{start:g} 5h{width:g}")
    # Blocks of one hue are thick dashes of one path, which takes a tenth of the bytes of rectangles.
    paths = "".join(f'<path class={hue} d="{"".join(dashes)}"/>' for hue, dashes in lines.items())
    return _svg(paths + "".join(_part(part, scale) for part in row.parts), 10)


def _extent(block: Block, scale: float) -> tuple[float, float]:
    start = round(block.start * scale, 1)
    # At least a unit, so that a short one is seen and can be pointed at when the page is enlarged.
    return start, max(1.0, round(block.end * scale - start, 1))


def _part(part: Block, scale: float) -> str:
    start, width = _extent(part, scale)
    return f"<rect x={start:g} width={width:g} height=10><title>{escape(part.text)}</title></rect>"


def hues_of(lanes: Iterable[Lane]) -> list[str]:
    """Returns the hues that lanes have, in the order of `HUES`."""
    used = {block.hue for lane in lanes for block in lane.blocks}
    return [hue for hue in HUES if hue in used] + sorted(used - set(HUES))


def memory(curve: Curve, limit: int) -> str:
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
    return _svg("".join(areas + lines), _HEIGHT)


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


def _svg(content: str, height: int) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none" aria-hidden="true">{content}</svg>'
