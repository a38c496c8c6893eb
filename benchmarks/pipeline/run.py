"""What does a pipeline's step take, beside torch.distributed.pipelining on Gloo, and beside its own plan?

    python benchmarks/pipeline/run.py                 # 2 ranks, 16 x (Linear 512 + ReLU), 8 microbatches of 16
    python benchmarks/pipeline/run.py --width 8       # a tiny model: what remains is overhead

In every round each rank takes one step of Echelon's pipeline, one of torch's, one without messages (its actions in
their order, timed one by one, for the ideal) and one of 1F1B (what messages take, for the prediction), in turns of
changing order, both ranks together, so all meet the same noise. The tables show medians over rounds of the slowest
rank's time and of each round's ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import pipelining

import echelon
from echelon.pipeline import Costs, Pipeline, Schedule, schedules
from echelon.pipeline.plan.action import Action, actions_of, loop, vee
from echelon.pipeline.plan.simulate import Timeline
from echelon.pipeline.stage.stage import Forward, Made, Stage

sys.path.append(str(Path(__file__).parents[1]))
from harness import difference, gloo, in_turns, ms, print_environment, print_head, print_row, ratio

RANKS = 2
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
    """Model and batch to train."""

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
    parameters = list(pipe.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        pipe.step(inputs if pipe.is_first else None, target=target if pipe.is_last else None)

    return step


def torch_step(work: Work, rank: int, name: str) -> Step:
    pipe, mine = torch_pipeline(work, rank, name)
    inputs, target = work.batch()
    last = len(TORCH[name][1]) - 1
    stages = pipe._stages if hasattr(pipe, "_stages") else [pipe._stage]
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        given = (inputs,) if 0 in mine else ()
        if last in mine:
            pipe.step(*given, target=target, losses=[])
        else:
            pipe.step(*given)

    return step


def one_process(work: Work) -> Step:
    """The same step in one process, one microbatch after another."""
    model, (inputs, target) = work.model(), work.batch()

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        for x, y in zip(inputs.split(work.samples), target.split(work.samples), strict=True):
            (loss_of(model(x), y) / work.microbatches).backward()

    return step


class Alone:
    """The actions of one rank in their order, timed, without messages: inputs and gradients are made up."""

    def __init__(self, pipe: Pipeline, work: Work, rank: int) -> None:
        schedule = pipe.schedule
        self._stages = {stage.index: stage for stage in pipe.stages}
        self.order = [action for step in schedule.orders[rank] for action in actions_of(step)]
        """What is run."""
        self._splits = "I" in str(schedule)
        self._last = schedule.num_stages - 1
        inputs, target = work.batch()
        self._inputs, self._targets = inputs.split(work.samples), target.split(work.samples)
        self._gradient = torch.randn(work.samples, work.width) / target.numel()
        self.rounds: list[list[list[float]]] = []
        """Of each round, a row for each stage: its number, then the mean seconds of F, I, W and B."""
        self.latest: list[float] = []
        """The seconds of each action of the last round."""

    def step(self) -> None:
        for stage in self._stages.values():
            for parameter in stage.module.parameters():
                parameter.grad = None
        seconds: dict[tuple[int, str], list[float]] = {}
        self.latest = []
        for action in self.order:
            act = self._prepared(action)
            began = time.perf_counter()
            act()
            self.latest.append(time.perf_counter() - began)
            seconds.setdefault((action.stage, action.kind), []).append(self.latest[-1])
        means = {key: statistics.fmean(times) for key, times in seconds.items()}
        self.rounds.append([[index, *(means.get((index, kind), 0.0) for kind in "FIWB")] for index in self._stages])

    def _prepared(self, action: Action) -> Callable[[], object]:
        index, kind, microbatch = action
        stage, is_last = self._stages[index], index == self._last
        if kind == "F":
            x = self._inputs[microbatch].detach().requires_grad_(index > 0)
            target = self._targets[microbatch] if is_last else None
            forward = Forward((x,) if index == 0 else x, {}, target, partial(self._make, stage))
            return lambda: stage.forward(microbatch, forward, splits=self._splits)
        gradients = [torch.ones(()) if is_last else self._gradient]
        if kind == "W":
            return lambda: stage.backward_weight(microbatch)
        return lambda: (stage.backward if kind == "B" else stage.backward_input)(microbatch, gradients)

    def _make(self, stage: Stage, x: object, _: object, target: torch.Tensor | None) -> Made:
        output = stage.call(x, {})
        return Made(output, [output if target is None else loss_of(output, target)])


class Link:
    """Costs of a step beside computing, measured in steps of 1F1B."""

    def __init__(self, group: echelon.ProcessGroup, work: Work) -> None:
        self._pipe = our_pipeline(group, work, "1f1b")
        self._step = our_step(self._pipe, work)
        self._step()
        self._alone = Alone(self._pipe, work, group.rank)
        self._rank = group.rank
        self.rounds: list[list[float]] = []
        """Of each round the seconds of: transfer, gap, forward, backward, around; see `step`."""

    def step(self) -> None:
        """Makes a step and adds to `rounds`.

        transfer: from the end of an action to the start of one on the other rank that waited for it. gap: between two
        actions of a rank of which the second waits for nothing. Both are means. forward, backward: what an F and a B of
        this rank take more than without messages; medians. around: of a call of `step`, before the first action and
        after the last.
        """
        began = time.perf_counter()
        self._step()
        seconds = time.perf_counter() - began
        timeline = self._pipe.timeline
        arrivals = {(one.target_rank, one.target): float(one.start) for one in timeline.transfers}
        waits, gaps = [], []
        for rank, (starts, ends) in enumerate(zip(timeline.starts, timeline.ends, strict=True)):
            for index in range(1, len(starts)):
                sent = arrivals.get((rank, index), 0.0)
                if sent < starts[index - 1]:
                    gaps.append(float(starts[index] - ends[index - 1]))
                elif sent > ends[index - 1]:
                    waits.append(float(starts[index]) - sent)
        self._alone.step()
        more = self._more(timeline)
        self.rounds.append([statistics.fmean(waits), statistics.fmean(gaps), *more, seconds - float(timeline.makespan)])

    def _more(self, timeline: Timeline) -> list[float]:
        """Returns the additional seconds of this rank's F and B in a step, compared with alone."""
        began, ended = timeline.starts[self._rank], timeline.ends[self._rank]
        more: dict[str, list[float]] = {"F": [], "B": []}
        for action, start, end, alone in zip(self._alone.order, began, ended, self._alone.latest, strict=True):
            more[action.kind].append(float(end - start) - alone)
        return [statistics.median(seconds) for seconds in more.values()]


def costs_of(rows: Sequence[Sequence[float]], schedule: Schedule, link: Sequence[float] = (0.0,) * 4) -> Costs:
    """Makes costs of all ranks' rows, and of a link's transfer, gap, forward and backward.

    Where the schedule has whole backwards, all of B stands for I; where it has halves, each takes as much more as a B.
    """
    transfer, gap, forward, backward = link
    by_stage = {int(row[0]): row[1:] for row in rows}
    table = [by_stage[stage] for stage in range(schedule.num_stages)]
    splits = "I" in str(schedule)
    return Costs(
        forward=[row[0] + gap + forward for row in table],
        backward_input=[(row[1] if splits else row[3]) + gap + backward for row in table],
        backward_weight=[row[2] + gap + backward if splits else 0.0 for row in table],
        transfer=transfer,
    )


def run(group: echelon.ProcessGroup, work: Work, rounds: int, names: Sequence[str], store: str) -> dict[str, Any]:
    """Measures everything. The result of rank 0 is for the table."""
    with gloo(group, store):
        group.barrier()
        alone = measure_alone(one_process(work)) if group.rank == 0 else 0.0
        group.barrier()
        link = Link(group, work)
        found = [compare(group, work, rounds, name, link) for name in names]
    return {"alone": alone, "link": [statistics.median(kind) for kind in zip(*link.rounds, strict=True)], "rows": found}


def our_pipeline(group: echelon.ProcessGroup, work: Work, name: str) -> Pipeline:
    schedule = schedule_of(work, group.rank, name)
    return Pipeline(list(equal_parts(work.model(), schedule.num_stages)), group, schedule, loss_fn=loss_of)


def every_rank(group: echelon.ProcessGroup, rounds: Sequence[Sequence[Sequence[float]]]) -> list[list[list[float]]]:
    """Gathers the rows of all stages by round, from the rows of this rank's stages (see `Alone.rounds`)."""
    rows = torch.tensor(rounds, dtype=torch.float64).transpose(0, 1).contiguous()
    return group.all_gather(rows).transpose(0, 1).tolist()


def compare(group: echelon.ProcessGroup, work: Work, rounds: int, name: str, link: Link) -> dict[str, Any]:
    """Measures one schedule: in each round our step, torch's, one without messages, and one of 1F1B for its link."""
    pipe = our_pipeline(group, work, name)
    schedule, ours = pipe.schedule, our_step(pipe, work)
    ours()
    alone = Alone(pipe, work, group.rank)
    steps = {"ours": ours, "alone": alone.step, "link": link.step}
    if name in TORCH:
        steps["torch"] = torch_step(work, group.rank, name)
    slowest = in_turns(group, steps, rounds).seconds
    every_row = every_rank(group, alone.rounds[-rounds:])
    links = group.all_reduce(torch.tensor(link.rounds[-rounds:], dtype=torch.float64), "mean").tolist()
    ideals, plans = [], []
    more = [max(0.0, statistics.median(kind)) for kind in list(zip(*links, strict=True))[2:4]]  # less is chance
    for one, (transfer, gap, _, _, around) in zip(every_row, links, strict=True):
        ideals.append(float(schedule.simulate(costs_of(one, schedule)).makespan))
        plans.append(float(schedule.simulate(costs_of(one, schedule, (transfer, gap, *more))).makespan) + around)
    return {
        "name": name,
        "ours": slowest["ours"],
        "torch": slowest.get("torch"),
        "ideal": ideals,
        "planned": plans,
        "actions": max(map(len, schedule.orders)),
    }


def measure_alone(step: Step) -> float:
    seconds = []
    for _ in range(12):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def report(result: dict[str, Any], work: Work) -> None:
    transfer, gap, forward, backward, around = (f"{seconds * 1e6:.0f} us" for seconds in result["link"])
    print(
        f"{work.depth} x (Linear {work.width} + ReLU), {work.microbatches} microbatches of {work.samples}, "
        f"{RANKS} processes x 1 thread; one process alone: {result['alone'] * 1e3:.2f} ms"
    )
    print(
        f"1f1b: from rank to rank {transfer}; from action to action {gap}; an F takes {forward} more, a B {backward}; "
        f"around a step {around}\n"
    )
    print_head(
        "schedule | Echelon (ms) | torch (ms) | ratio | ideal (ms) | ratio | predicted (ms) | ratio "
        "| us per action | torch's | ratio"
    )
    for row in result["rows"]:
        ours, theirs, ideal, planned = row["ours"], row["torch"], row["ideal"], row["planned"]
        # What a step takes more than its ideal, in microseconds per action of the rank that has the most.
        own, others = (difference(each, ideal) / row["actions"] * 1e6 if each else 0.0 for each in (ours, theirs))
        beside = (ms(theirs), f"{ratio(ours, theirs):.2f}") if theirs else ("-", "-")
        plans = (ms(ideal), f"{ratio(ours, ideal):.2f}", ms(planned), f"{ratio(ours, planned):.2f}")
        per_action = (f"{others:.0f}", f"{own / others:.2f}") if theirs else ("-", "-")
        print_row(row["name"], ms(ours), *beside, *plans, f"{own:.0f}", *per_action)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16, help="per microbatch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--schedules", nargs="+", default=list(dict.fromkeys([*TORCH, *PREDICTED])))
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    work = Work(options.width, options.depth, options.samples, options.microbatches)
    print_environment(f"backend {options.backend}")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (work, options.rounds, options.schedules, f"{folder}/store")
        report(echelon.spawn(run, RANKS, arguments, options.backend)[0], work)


if __name__ == "__main__":
    main()
