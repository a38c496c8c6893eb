"""What does a pipeline's step take, beside torch.distributed.pipelining on Gloo, and beside its own plan?

    python benchmarks/pipeline/run.py                 # 2 ranks, 16 x (Linear 512 + ReLU), 8 microbatches of 16
    python benchmarks/pipeline/run.py --width 8       # a tiny model: what remains is overhead

In every round each rank takes one step of Echelon's pipeline and one of torch's, in turns of changing order, both ranks
together, so both meet the same noise. The tables show medians over rounds of the slowest rank's time.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import pipelining

import echelon
from echelon.pipeline import Costs, Pipeline, Schedule, schedules
from echelon.pipeline.placement import loop, vee
from echelon.pipeline.stage import Forward, Made, Stage

RANKS, WARMUP = 2, 3
TIMED_ALONE = 15
TORCH = {
    "gpipe": (pipelining.ScheduleGPipe, loop(RANKS)),
    "1f1b": (pipelining.Schedule1F1B, loop(RANKS)),
    "interleaved-1f1b": (pipelining.ScheduleInterleaved1F1B, loop(RANKS, 2)),
    "looped-bfs": (pipelining.ScheduleLoopedBFS, loop(RANKS, 2)),
    "interleaved-zb": (pipelining.ScheduleInterleavedZeroBubble, loop(RANKS, 2)),
    "zb-v": (pipelining.ScheduleZBVZeroBubble, vee(RANKS)),
    "dualpipe-v": (pipelining.ScheduleDualPipeV, vee(RANKS)),
}
"""torch's schedules, and where each has its stages."""
PREDICTED = ("gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b")

Step = Callable[[], None]


class Work(NamedTuple):
    """What is trained."""

    width: int
    depth: int
    samples: int
    microbatches: int

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        layers = [layer for _ in range(self.depth) for layer in (nn.Linear(self.width, self.width), nn.ReLU())]
        return nn.Sequential(*layers)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        shape = (self.samples * self.microbatches, self.width)
        return torch.randn(shape), torch.randn(shape)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def equal_parts(model: nn.Sequential, count: int) -> list[nn.Sequential]:
    """Cuts a model as both pipelines are to run it."""
    per_stage = len(model) // count
    return [model[start : start + per_stage] for start in range(0, len(model), per_stage)]


def torch_pipeline(work: Work, rank: int, name: str) -> tuple[Any, list[int]]:
    make, placement = TORCH[name]
    parts = equal_parts(work.model(), len(placement))
    mine = [stage for stage, where in enumerate(placement) if where == rank]
    stages = [
        pipelining.PipelineStage(parts[stage], stage, len(placement), torch.device("cpu"), group=None) for stage in mine
    ]
    single = issubclass(make, pipelining.schedules.PipelineScheduleSingle)
    return make(stages[0] if single else stages, n_microbatches=work.microbatches, loss_fn=loss_of), mine


def schedule_of(work: Work, rank: int, name: str) -> Schedule:
    """Returns ours of the same name; where we have none, the order that torch runs."""
    if name in schedules.names():
        chunks = 2 if name in ("interleaved-1f1b", "looped-bfs") else None
        return schedules.build(name, num_ranks=RANKS, num_microbatches=work.microbatches, num_chunks=chunks)
    order = torch_pipeline(work, rank, name)[0].pipeline_order
    lines = [",".join("" if action is None else str(action) for action in order[which]) for which in sorted(order)]
    return Schedule.from_text("\n".join(lines), work.microbatches, name)


def our_step(pipe: Pipeline, work: Work) -> Step:
    inputs, target = work.batch()

    def step() -> None:
        for parameter in pipe.parameters():
            parameter.grad = None
        pipe.step(inputs if pipe.is_first else None, target=target if pipe.is_last else None)

    return step


def torch_step(work: Work, rank: int, name: str) -> Step:
    pipe, mine = torch_pipeline(work, rank, name)
    inputs, target = work.batch()
    last = len(TORCH[name][1]) - 1
    stages = pipe._stages if hasattr(pipe, "_stages") else [pipe._stage]

    def step() -> None:
        for stage in stages:
            for parameter in stage.submod.parameters():
                parameter.grad = None
        given = (inputs,) if 0 in mine else ()
        if last in mine:
            pipe.step(*given, target=target, losses=[])
        else:
            pipe.step(*given)

    return step


def measure(group: echelon.ProcessGroup, steps: Sequence[Step], rounds: int) -> list[list[float]]:
    """Returns for each step the seconds of every round."""
    found: list[list[float]] = [[] for _ in steps]
    for number in range(WARMUP + rounds):
        order = list(range(len(steps)))
        for which in order if number % 2 else reversed(order):
            group.barrier()
            began = time.perf_counter()
            steps[which]()
            seconds = time.perf_counter() - began
            if number >= WARMUP:
                found[which].append(seconds)
    return found


def one_process(work: Work) -> Step:
    """The same step in one process, one microbatch after another."""
    model, (inputs, target) = work.model(), work.batch()

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        for x, y in zip(inputs.split(work.samples), target.split(work.samples), strict=True):
            (loss_of(model(x), y) / work.microbatches).backward()

    return step


def costs_alone(group: echelon.ProcessGroup, work: Work, schedule: Schedule) -> list[list[float]]:
    """Times F, I, W and B of this rank's stages, both ranks at once and without messages.

    All stages in turns, as a step runs them: one stage over and over would stay in the cache.
    """
    parts = equal_parts(work.model(), schedule.num_stages)
    alone = [
        Alone(Stage(index, module), work, index == schedule.num_stages - 1)
        for index, module in enumerate(parts)
        if schedule.placement[index] == group.rank
    ]
    group.barrier()
    for _ in range(TIMED_ALONE * work.microbatches):
        for splits in (True, False):
            for stage in alone:
                stage.run_forward(splits)
            for stage in reversed(alone):
                stage.run_backward(splits)
    return [[float(one.stage.index), *map(statistics.median, one.times)] for one in alone]


class Alone:
    """One stage, timed."""

    def __init__(self, stage: Stage, work: Work, is_last: bool) -> None:
        inputs, target = work.batch()
        self.stage = stage
        self.times: list[list[float]] = [[], [], [], []]
        self._x = inputs[: work.samples].requires_grad_(stage.index > 0)
        self._target = target[: work.samples] if is_last else None

    def run_forward(self, splits: bool) -> None:
        forward = Forward(self._x, {}, self._target, self._make)
        made = self._timed(0, lambda: self.stage.forward(0, forward, splits=splits))
        self._gradient = torch.ones_like(made.roots[0])

    def run_backward(self, splits: bool) -> None:
        if splits:
            self._timed(1, lambda: self.stage.backward_input(0, [self._gradient]))
            self._timed(2, lambda: self.stage.backward_weight(0))
        else:
            self._timed(3, lambda: self.stage.backward(0, [self._gradient]))

    def _make(self, x: object, _: object, target: torch.Tensor | None) -> Made:
        output = self.stage.call((x,) if self.stage.index == 0 else x, {})
        return Made(output, [output if target is None else loss_of(output, target)])

    def _timed(self, kind: int, act: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = act()
        self.times[kind].append(time.perf_counter() - began)
        return result


class Link(NamedTuple):
    """What a step takes beside computing, measured in steps of 1F1B."""

    transfer: float
    """From the end of a step to the start of one on the other rank that waited for it."""
    around: float
    """Of a call of `step`, before the first action and after the last."""


def measure_link(group: echelon.ProcessGroup, work: Work) -> Link:
    """Times transfers and what is around the actions."""
    schedule = schedule_of(work, group.rank, "1f1b")
    pipe = Pipeline(list(equal_parts(work.model(), RANKS)), group, schedule, loss_fn=loss_of)
    step = our_step(pipe, work)
    waits, around = [], []
    for number in range(WARMUP + TIMED_ALONE):
        group.barrier()
        began = time.perf_counter()
        step()
        seconds = time.perf_counter() - began
        if number < WARMUP:
            continue
        timeline = pipe.timeline
        around.append(seconds - float(timeline.makespan))
        for transfer in timeline.transfers:
            starts, ends = timeline.starts[transfer.target_rank], timeline.ends[transfer.target_rank]
            free = ends[transfer.target - 1] if transfer.target else 0
            if free < transfer.start:
                waits.append(float(starts[transfer.target] - transfer.start))
    return Link(statistics.median(waits), statistics.median(around))


def costs_of(rows: Sequence[Sequence[float]], schedule: Schedule, transfer: float) -> Costs:
    """Makes costs of all ranks' rows. Where the schedule has whole backwards, all of B stands for I."""
    by_stage = {int(row[0]): row[1:] for row in rows}
    table = [by_stage[stage] for stage in range(schedule.num_stages)]
    splits = "I" in str(schedule)
    return Costs(
        forward=[row[0] for row in table],
        backward_input=[row[1] if splits else row[3] for row in table],
        backward_weight=[row[2] if splits else 0.0 for row in table],
        transfer=transfer,
    )


def run(group: echelon.ProcessGroup, work: Work, rounds: int, store: str) -> list[dict[str, Any]]:
    """Measures everything; the result of rank 0 is for the table."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=group.rank, world_size=RANKS)
    found = []
    link = measure_link(group, work)
    for name in dict.fromkeys([*TORCH, *PREDICTED]):
        schedule = schedule_of(work, group.rank, name)
        rows = group.all_gather(torch.tensor(costs_alone(group, work, schedule), dtype=torch.float64)).tolist()
        parts = equal_parts(work.model(), schedule.num_stages)
        pipe = Pipeline(list(parts), group, schedule, loss_fn=loss_of)
        steps = [our_step(pipe, work)]
        if name in TORCH:
            steps.append(torch_step(work, group.rank, name))
        if group.rank == 0 and name == "gpipe":
            alone = measure_alone(one_process(work))
        group.barrier()
        times = measure(group, steps, rounds)
        slowest = group.all_reduce(torch.tensor(times, dtype=torch.float64), "max").tolist()
        ideal = schedule.simulate(costs_of(rows, schedule, 0.0)).makespan
        planned = schedule.simulate(costs_of(rows, schedule, link.transfer)).makespan + link.around
        found.append(
            {
                "name": name,
                "times": slowest,
                "ideal": float(ideal),
                "planned": float(planned),
                "actions": max(map(len, schedule.orders)),
            }
        )
    torch.distributed.destroy_process_group()
    return [{"alone": alone if group.rank == 0 else 0.0, "link": list(link), "rows": found}]


def measure_alone(step: Step) -> float:
    seconds = []
    for _ in range(12):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def report(result: dict[str, Any], work: Work) -> None:
    transfer, around = result["link"]
    print(
        f"{work.depth} x (Linear {work.width} + ReLU), {work.microbatches} microbatches of {work.samples}, "
        f"{RANKS} processes x 1 thread; one process alone: {result['alone'] * 1e3:.2f} ms"
    )
    print(f"from step to step of another rank: {transfer * 1e6:.0f} us; around a step: {around * 1e6:.0f} us\n")
    print(
        "| schedule | Echelon (ms) | torch (ms) | ratio | ideal (ms) | ratio | predicted (ms) | ratio "
        "| us per action | torch's | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in result["rows"]:
        ours, *theirs = map(statistics.median, row["times"])
        ideal, planned, actions = row["ideal"], row["planned"], row["actions"]
        ratios = [one / other for one, other in zip(*row["times"], strict=True)] if theirs else []
        own = (ours - ideal) / actions * 1e6
        cells = [
            row["name"],
            f"{ours * 1e3:.2f}",
            *([f"{theirs[0] * 1e3:.2f}", f"{statistics.median(ratios):.2f}"] if theirs else ["-", "-"]),
            f"{ideal * 1e3:.2f}",
            f"{ours / ideal:.2f}",
            f"{planned * 1e3:.2f}",
            f"{ours / planned:.2f}",
            f"{own:.0f}",
        ]
        if theirs:
            torchs = (theirs[0] - ideal) / actions * 1e6
            cells += [f"{torchs:.0f}", f"{own / torchs:.2f}"]
        else:
            cells += ["-", "-"]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16, help="per microbatch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    work = Work(options.width, options.depth, options.samples, options.microbatches)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, backend {options.backend}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        results = echelon.spawn(run, RANKS, (work, options.rounds, f"{folder}/store"), options.backend)
    report(results[0][0], work)


if __name__ == "__main__":
    main()
