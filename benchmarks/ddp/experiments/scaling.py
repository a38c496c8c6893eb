"""How does a data-parallel step scale from 1 to 64 ranks on 25GbE? Simulated: Echelon's own code on a virtual clock.

    python benchmarks/ddp/experiments/scaling.py  # draws docs/images/ddp-scaling.png
    python benchmarks/ddp/experiments/scaling.py --most 16 --image /tmp/scaling.png

Each rank is a host of its own with one link of 25 Gbit/s and 20 us. The model has 10 layers of 1024 x 1024 parameters;
computing is no part of the simulation, so a layer's forward takes 2 ms and its backward 4 ms by agreement, about what
the MLP of run.py takes. The gradients are real and are really added up.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import echelon
from echelon.timeline.palette import COLORS, THEMES

sys.path.append(str(Path(__file__).parents[2]))
from harness import options_of, print_head, print_row

LAYERS, WIDTH = 10, 1024
SECONDS = {"forward": 2e-3, "backward": 4e-3}
NETWORK = echelon.Network(latency=20e-6, bandwidth=25e9 / 8)
IMAGE = Path(__file__).parents[3] / "docs" / "images" / "ddp-scaling.png"


class Timed(torch.autograd.Function):
    """x times the mean of a weight: little to compute, but gradients of full size; virtual time passes both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: echelon.ProcessGroup) -> Tensor:
        ctx.group, ctx.shape = group, weight.shape
        with group.backend.compute("forward"):
            return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        with ctx.group.backend.compute("backward"):
            return gradient, gradient.mean().expand(ctx.shape), None


class Model(nn.Module):
    """Layers of `width` x `width` parameters."""

    def __init__(self, group: echelon.ProcessGroup, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(width, width) for _ in range(layers)])
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = Timed.apply(x, weight, self.group)
        return x


def steps(group: echelon.ProcessGroup, overlaps: bool) -> float:
    """Returns the virtual seconds of a step, the second: the first learns the order of the gradients."""
    ddp = echelon.DDP(Model(group), group, bucket_mb=4)
    seconds = 0.0
    for _ in range(2):
        ddp.zero_grad()
        group.barrier()
        start = group.backend.now()
        if overlaps:
            ddp(torch.ones(1)).sum().backward()
        else:
            with ddp.no_sync():
                ddp(torch.ones(1)).sum().backward()
            ddp.sync_gradients()
        seconds = group.backend.now() - start
    return seconds


def measure(most: int) -> list[tuple[int, float, float]]:
    """Returns the number of ranks, and the seconds of a step with and without overlap."""
    rows = []
    ranks = 1
    while ranks <= most:
        results = [
            max(echelon.simulate(steps, ranks, (overlaps,), network=NETWORK, costs=SECONDS).results)
            for overlaps in (True, False)
        ]
        rows.append((ranks, *results))
        ranks *= 2
    return rows


def draw(rows: list[tuple[int, float, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    theme = THEMES["light"]
    figure = Figure(figsize=(7.5, 4.2), layout="constrained", facecolor=theme.page)
    axes = figure.add_subplot()
    ranks = [row[0] for row in rows]
    alone = rows[0][1]
    axes.plot(ranks, ranks, color=theme.faint, linestyle=(0, (2, 2)), linewidth=1.2)
    # Named at its end instead of in a legend, with a mark of its own: colours alone are lost in print.
    for column, name, color, marker, above in (
        (1, "overlapped with backward", COLORS["receive"], "o", -5),
        (2, "after backward", COLORS["B"], "s", -5),
    ):
        speedup = [row[0] * alone / row[column] for row in rows]
        axes.plot(ranks, speedup, marker=marker, markersize=5, color=color, linewidth=1.8)
        text = f"{name}: {speedup[-1]:.0f} times"
        axes.annotate(text, (ranks[-1], speedup[-1]), (9, above), textcoords="offset points", fontsize=9)
    axes.annotate("perfect", (ranks[-1], ranks[-1]), (9, 8), textcoords="offset points", fontsize=9, color=theme.faint)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set_yticks(ranks, [str(rank) for rank in ranks])
    axes.set_xlim(0.9, ranks[-1] * 1.1)
    axes.set_xlabel("ranks, each a host on 25GbE (simulated)", fontsize=9, color=theme.ink)
    axes.set_ylabel("samples per second, in those of one rank", fontsize=9, color=theme.ink)
    axes.tick_params(labelsize=9, color=theme.faint, labelcolor=theme.ink)
    axes.grid(color=theme.line, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(theme.faint)
    figure.savefig(path, dpi=144, metadata={"Software": None})


if __name__ == "__main__":
    parser = options_of(__doc__)
    parser.add_argument("--most", type=int, default=64, help="ranks")
    parser.add_argument("--image", type=Path, default=IMAGE)
    options = parser.parse_args()
    table = measure(options.most)
    print_head("ranks | step, ms | scaling efficiency | without overlap, ms | scaling efficiency")
    for ranks, *steps_of_ranks in table:
        print_row(
            ranks, *(cell for step in steps_of_ranks for cell in (f"{step * 1e3:.1f}", f"{table[0][1] / step:.0%}"))
        )
    draw(table, options.image)
