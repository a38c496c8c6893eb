"""Makes the pictures in docs/images, from real schedules and from a real run: `python docs/make_images.py`."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from statistics import median

import torch
from torch import nn

import echelon
from echelon.group.group import ProcessGroup
from echelon.pipeline import Costs, Pipeline, schedules
from echelon.timeline.timeline import Timeline

IMAGES = Path(__file__).parent / "images"


def draw_plans() -> None:
    """Draws the schedules that docs/plan.md compares."""
    costs = Costs(transfer=0.1)
    one_f_one_b = schedules.build("1f1b", 4, 8).simulate(costs)
    one_f_one_b.draw(IMAGES / "1f1b.svg")
    schedules.build("zb-h1", 4, 8).simulate(costs).draw(IMAGES / "zb-h1-and-1f1b.svg", against=one_f_one_b)
    schedules.build("dualpipe-v", 4, 10).simulate(costs).draw(IMAGES / "dualpipe-v.svg")
    schedules.build("zb-v", 4, 8).simulate(costs).draw(IMAGES / "zb-v-dark.svg", theme="dark")
    schedules.build("1f1b", 16, 48).simulate(costs).draw(IMAGES / "1f1b-16-by-48.png")


def draw_own() -> None:
    """Draws the schedule that docs/tutorials/write_a_schedule.md writes, by the blocks of this page."""
    page = (IMAGES.parent / "tutorials" / "write_a_schedule.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page.partition("../images/")[0], re.MULTILINE | re.DOTALL)
    variables: dict[str, object] = {}
    with contextlib.chdir(IMAGES):
        for block in blocks:
            exec(block, variables)


def measure(group: ProcessGroup) -> tuple[Timeline, int]:
    """Runs a pipeline of two stages on this rank. Returns the fastest of its warm steps, and the rank's peak in bytes.

    Memory is that of activations, as the schedule plans it.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())]
    pipe = Pipeline(nn.Sequential(*layers), group, "1f1b", 8, nn.functional.mse_loss)
    data = torch.randn(8 * 256, 512)
    steps = []
    for _ in range(30):
        pipe.step(data, target=data)
        steps.append(pipe.timeline)
    return min(steps[5:], key=lambda step: step.makespan), pipe.memory().planned


def draw_run() -> None:
    """Draws a measured run below its plan, which has the median times of the run."""
    (measured, *_), bytes_held = zip(*echelon.spawn(measure, 2), strict=True)
    activation = [held / number for held, number in zip(bytes_held, measured.peak_activations, strict=True)]
    times: dict[tuple[int, str], list[float]] = {}
    for span in (span for spans in measured.spans for span in spans):
        times.setdefault((span.step.stage, span.step.kind), []).append(span.duration)
    forward, backward = ([median(times[stage, kind]) for stage in range(2)] for kind in "FB")
    costs = Costs(forward, backward, backward_weight=0, activation=activation, unit="s", memory_unit="B")
    planned = schedules.build("1f1b", 2, 8).simulate(costs)
    measured.draw(IMAGES / "planned-and-measured.svg", against=planned)


if __name__ == "__main__":
    draw_plans()
    draw_own()
    draw_run()
