"""Published steps of GPT with tensor parallelism and pipelines on A100, beside their forecast.

The program is Megatron's: float16 with float32 main weights, tensor parallelism by all-reduce, gradients reduced at the
end of a step, pipelines by torch. Only the stages of one pipeline are recorded, since others do the same. The time of
a step grows linearly with the microbatches, so two smaller numbers of microbatches are recorded.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from harness import print_environment, print_head, print_row
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from echelon.foresight.networks import cluster_of
from echelon.foresight.play.devices import device_named
from echelon.foresight.play.player import play
from echelon.foresight.record.run import record

VOCABULARY = 51200
DROPOUT = 0.1
PER_HOST = 8


class Layout(NamedTuple):
    """A published step."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    tp: int
    pp: int
    stages_per_rank: int
    dp: int
    schedule: str
    microbatch: int
    global_batch: int
    recompute: bool
    step_seconds: float
    source: str

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.microbatch * self.dp)

    def layers_of(self, stage: int) -> int:
        """Number of layers of a stage. Where they are not a multiple, the first and the last stage have one fewer."""
        count = self.pp * self.stages_per_rank
        if self.layers % count == 0:
            return self.layers // count
        return (self.layers + 2) // count - (stage in (0, count - 1))


class _Forward(torch.autograd.Function):
    """Sum over the ranks of tensor parallelism in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # noqa: ARG004
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return gradient, None


class _Backward(torch.autograd.Function):
    """Sum over the ranks of tensor parallelism in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _dropped(x: Tensor) -> Tensor:
    return torch.native_dropout(x, DROPOUT, True)[0]


class Layer(nn.Module):
    def __init__(self, layout: Layout, group: Any) -> None:
        super().__init__()
        self.group = group if layout.tp > 1 else None
        hidden, part = layout.hidden, layout.hidden // layout.tp
        self.heads, self.size = layout.heads // layout.tp, hidden // layout.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * part), nn.Linear(part, hidden, bias=self.group is None)
        self.up, self.down = nn.Linear(hidden, 4 * part), nn.Linear(4 * part, hidden, bias=self.group is None)

    def _split(self, x: Tensor) -> Tensor:
        return x if self.group is None else _Backward.apply(x, self.group)

    def _sum(self, x: Tensor) -> Tensor:
        return x if self.group is None else _Forward.apply(x, self.group)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        qkv = self.qkv(self._split(self.norm1(x))).view(batch, sequence, self.heads, 3, self.size)
        q, k, v = (each.transpose(1, 2).reshape(batch * self.heads, sequence, self.size) for each in qkv.unbind(3))
        scores = _dropped(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1))  # scale and mask in the same kernel
        y = torch.bmm(scores, v).view(batch, self.heads, sequence, self.size).transpose(1, 2)
        x = x + _dropped(self._sum(self.out(y.reshape(batch, sequence, -1))))
        y = functional.gelu(self.up(self._split(self.norm2(x))))
        return x + _dropped(self._sum(self.down(y)))


class Stage(nn.Module):
    def __init__(self, layout: Layout, number: int, group: Any) -> None:
        super().__init__()
        last = layout.pp * layout.stages_per_rank - 1
        hidden, vocabulary = layout.hidden, VOCABULARY // layout.tp
        self.recompute, self.group = layout.recompute, group if layout.tp > 1 else None
        self.words = nn.Embedding(vocabulary, hidden) if number == 0 else None
        self.places = nn.Embedding(layout.sequence, hidden) if number == 0 else None
        self.layers = nn.ModuleList(Layer(layout, group) for _ in range(layout.layers_of(number)))
        self.norm = nn.LayerNorm(hidden) if number == last else None
        self.head = nn.Linear(hidden, vocabulary, bias=False) if number == last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.words is not None and self.places is not None:
            y = self.words(x)
            if self.group is not None:
                y = _Forward.apply(y, self.group)
            x = _dropped(y + self.places(torch.arange(x.shape[1], device=x.device)))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        if self.head is not None and self.norm is not None:
            x = self.norm(x)
            x = self.head(x if self.group is None else _Backward.apply(x, self.group))
        return x


def step(layout: Layout, microbatches: int) -> None:
    """One step of the program, on one rank."""
    dist.init_process_group("nccl")
    device = torch.device("cuda")
    mesh = init_device_mesh("cuda", (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))
    rank, count = mesh["pp"].get_local_rank(), layout.pp * layout.stages_per_rank
    numbers = list(range(rank, count, layout.pp))
    tp = mesh["tp"].get_group()
    parts = [Stage(layout, number, tp).to(device, torch.float16) for number in numbers]
    weights = [weight for part in parts for weight in part.parameters()]
    main = [weight.detach().float().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(main, fused=True)

    def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten() // layout.tp, reduction="none")
        if layout.tp > 1:
            for _ in range(2):  # largest logits, and sums of exponentials
                dist.all_reduce(loss.detach().clone(), group=tp)
        return loss.mean()

    tokens = torch.zeros(microbatches * layout.microbatch, layout.sequence, dtype=torch.int64, device=device)
    if layout.pp == 1:
        for part in tokens.chunk(microbatches):
            loss_of(parts[0](part), part).backward()
    else:
        kind: Any = get_schedule_class(layout.schedule)
        stages = []
        for part, number in zip(parts, numbers, strict=True):
            shape = (layout.microbatch, layout.sequence, layout.hidden)
            x = torch.empty(shape, dtype=torch.float16, device="meta", requires_grad=True)
            ends = (*shape[:2], VOCABULARY // layout.tp)
            given = tokens[: layout.microbatch].to("meta") if number == 0 else x
            made = torch.empty(ends, dtype=torch.float16, device="meta", requires_grad=True)
            stages.append(
                PipelineStage(
                    part,
                    number,
                    count,
                    device,
                    input_args=(given,),
                    output_args=(made if number == count - 1 else x,),
                    group=mesh["pp"].get_group(),
                )
            )
        schedule = kind(stages if issubclass(kind, PipelineScheduleMulti) else stages[0], microbatches, loss_fn=loss_of)
        inputs = (tokens,) if 0 in numbers else ()
        target = {"target": tokens} if count - 1 in numbers else {}
        schedule.step(*inputs, return_outputs=False, **target)
    gradients = [weight.grad for weight in weights]
    if layout.dp > 1:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=mesh["dp"].get_group())
    for weight, gradient in zip(main, gradients, strict=True):
        weight.grad = gradient.float()
    optimizer.step()


def seconds_of(layout: Layout) -> tuple[float, float]:
    """Returns the time of a step and its bubble."""
    world_size = layout.pp * layout.dp * layout.tp
    first = layout.pp if layout.schedule == "1F1B" else 2 * layout.pp
    if layout.microbatches <= first + layout.pp:
        first, second = layout.microbatches, layout.microbatches
    else:
        second = first + layout.pp
    stride = world_size // layout.pp
    firsts = [rank * stride for rank in range(layout.pp)]
    classes = [rank // stride * stride for rank in range(world_size)]
    device = device_named("a100")
    cluster = cluster_of("infiniband-200g", device, world_size, max(1, world_size // PER_HOST))
    found = []
    for microbatches in sorted({first, second}):
        traces = record(partial(step, layout, microbatches), world_size, firsts, steps=1)
        played = play({rank: traces[rank] for rank in firsts}, classes, device, cluster)
        found.append((played.seconds, played.bubble * played.seconds))
    if first == second:
        return found[0][0], found[0][1] / found[0][0]
    more = (layout.microbatches - first) / (second - first)
    seconds, bubble = (a + more * (b - a) for a, b in zip(*found, strict=True))
    return seconds, bubble / seconds


def layouts() -> list[Layout]:
    """Returns the published rows."""
    with Path(__file__).with_name("layouts.csv").open() as file:
        return [
            Layout(
                row["name"],
                *(int(row[name]) for name in Layout._fields[1:9]),
                row["schedule"],
                int(row["microbatch"]),
                int(row["global_batch"]),
                row["recompute"] == "1",
                float(row["step_seconds"]),
                row["source"],
            )
            for row in csv.DictReader(file)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="rows: all if none is given")
    parser.add_argument("--most", type=int, default=16, help="most ranks of a pipeline")
    args = parser.parse_args()
    print_environment()
    print_head("row | tp x pp x dp | schedule | measured s | foreseen s | error | bubble | recorded in s")
    errors = []
    for layout in layouts():
        if layout.pp > args.most or (args.names and layout.name not in args.names):
            continue
        begin = time.perf_counter()
        seconds, bubble = seconds_of(layout)
        errors.append(seconds / layout.step_seconds - 1)
        size = f"{layout.tp} x {layout.pp} x {layout.dp}"
        schedule = f"{layout.schedule} v{layout.stages_per_rank}" if layout.pp > 1 else "-"
        took = f"{time.perf_counter() - begin:.0f}"
        shown = f"{layout.step_seconds:.2f}", f"{seconds:.2f}", f"{errors[-1]:+.1%}", f"{bubble:.1%}", took
        print_row(layout.name, size, schedule, *shown)
        sys.stdout.flush()
    print(f"\nmedian error {statistics.median(map(abs, errors)):.1%} on {len(errors)} rows")


if __name__ == "__main__":
    main()
