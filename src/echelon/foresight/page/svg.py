"""Drawing of memory over a step as SVG. Its width is that of the page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from echelon.foresight.memory import Curve, highest

_WIDTH, _HEIGHT = 10_000, 1_000
"""Units of a drawing. It is stretched to the width of the page, so it has no text."""


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
