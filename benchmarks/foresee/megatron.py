"""GPT by Megatron-LM as a program: float16, float32 main weights, tensor parallelism by all-reduce, pipelines by torch.

As there: sequences before batches, so that queries, keys and values are views; the sum of residual, bias and dropout is
one kernel; the loss is computed on logits that are divided by their vocabulary; gradients are reduced at the end of a
step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

DROPOUT = 0.1


class Program(NamedTuple):
    """A training program, as far as its recording depends on it."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    tp: int
    pp: int
    stages_per_rank: int
    dp: int
    schedule: str
    microbatch: int
    recompute: bool
    microbatches: int

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def words(self) -> int:
        """Words on a rank: Megatron pads the vocabulary to a multiple of 128 on each."""
        return -(-self.vocabulary // (128 * self.tp)) * 128

    def layers_of(self, stage: int) -> int:
        """Number of layers of a stage. Where they are not a multiple, the first and the last stage have one fewer."""
        count = self.num_stages
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


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of float32 logits that are divided by their vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, words: Tensor, group: Any) -> Tensor:
        largest = logits.max(dim=-1)[0]
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits.sub_(largest.unsqueeze(-1))
        rows = torch.arange(words.numel(), device=words.device)
        of_words = logits[rows, words].clone()
        if group is not None:
            dist.all_reduce(of_words, group=group)
        shares = logits.exp_()
        total = shares.sum(dim=-1)
        if group is not None:
            dist.all_reduce(total, group=group)
        shares.div_(total.unsqueeze(-1))
        ctx.save_for_backward(shares, rows, words)
        return total.log() - of_words

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shares, rows, words = ctx.saved_tensors
        shares[rows, words] -= 1
        return shares.mul_(gradient.unsqueeze(-1)), None, None


def _dropped(x: Tensor) -> Tensor:
    return torch.native_dropout(x, DROPOUT, True)[0]


def _added(x: Tensor, residual: Tensor) -> Tensor:
    return residual + _dropped(x)


class Layer(nn.Module):
    def __init__(self, program: Program, group: Any) -> None:
        super().__init__()
        self.group = group if program.tp > 1 else None
        hidden, part = program.hidden, program.hidden // program.tp
        self.heads, self.size = program.heads // program.tp, hidden // program.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * part), nn.Linear(part, hidden, bias=self.group is None)
        self.up, self.down = nn.Linear(hidden, 4 * part), nn.Linear(4 * part, hidden, bias=self.group is None)
        self.added = torch.compile(_added)

    def _split(self, x: Tensor) -> Tensor:
        return x if self.group is None else _Backward.apply(x, self.group)

    def _sum(self, x: Tensor) -> Tensor:
        return x if self.group is None else _Forward.apply(x, self.group)

    def forward(self, x: Tensor) -> Tensor:
        sequence, batch, _ = x.shape
        mixed = self.qkv(self._split(self.norm1(x))).view(sequence, batch, self.heads, 3 * self.size)
        q, k, v = (
            each.view(sequence, batch * self.heads, self.size).transpose(0, 1) for each in mixed.split(self.size, 3)
        )
        scores = _dropped(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1))  # scale and mask in the same kernel
        y = torch.bmm(scores, v).view(batch, self.heads, sequence, self.size).permute(2, 0, 1, 3)
        x = self.added(self._sum(self.out(y.reshape(sequence, batch, -1))), x)
        y = functional.gelu(self.up(self._split(self.norm2(x))))
        return self.added(self._sum(self.down(y)), x)


class Stage(nn.Module):
    def __init__(self, program: Program, number: int, group: Any) -> None:
        super().__init__()
        last = program.num_stages - 1
        self.recompute, self.group = program.recompute, group if program.tp > 1 else None
        self.words = nn.Embedding(program.words, program.hidden) if number == 0 else None
        self.places = nn.Embedding(program.sequence, program.hidden) if number == 0 else None
        self.layers = nn.ModuleList(Layer(program, group) for _ in range(program.layers_of(number)))
        self.norm = nn.LayerNorm(program.hidden) if number == last else None
        self.head = nn.Linear(program.hidden, program.words, bias=False) if number == last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.words is not None and self.places is not None:
            y = self.words(x)
            if self.group is not None:
                y = _Forward.apply(y, self.group)
            y = y + self.places(torch.arange(x.shape[1], device=x.device))
            x = _dropped(y.transpose(0, 1).contiguous())
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        if self.head is not None and self.norm is not None:
            x = self.norm(x)
            x = self.head(x if self.group is None else _Backward.apply(x, self.group))
        return x


def train(program: Program) -> None:
    """One step, on one rank. Before it comes one without a model, so that the optimizer has its state."""
    dist.init_process_group("nccl")
    device = torch.device("cuda")
    mesh = init_device_mesh("cuda", (program.pp, program.dp, program.tp), mesh_dim_names=("pp", "dp", "tp"))
    count = program.num_stages
    numbers = list(range(mesh["pp"].get_local_rank(), count, program.pp))
    tp = mesh["tp"].get_group()
    parts = [Stage(program, number, tp).to(device, torch.float16) for number in numbers]
    weights = [weight for part in parts for weight in part.parameters()]
    main = [weight.detach().float().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(main, fused=True)
    for weight in main:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()

    def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
        words = tokens.transpose(0, 1).flatten() // program.tp
        group = tp if program.tp > 1 else None
        return _CrossEntropy.apply(logits.float().flatten(0, 1), words, group).mean()

    tokens = torch.zeros(program.microbatches * program.microbatch, program.sequence, dtype=torch.int64, device=device)
    if program.pp == 1:
        for part in tokens.chunk(program.microbatches):
            loss_of(parts[0](part), part).backward()
    else:
        kind: Any = get_schedule_class(program.schedule)
        stages = []
        for part, number in zip(parts, numbers, strict=True):
            shape = (program.sequence, program.microbatch, program.hidden)
            x = torch.empty(shape, dtype=torch.float16, device="meta", requires_grad=True)
            given = tokens[: program.microbatch].to("meta") if number == 0 else x
            made = torch.empty((*shape[:2], program.words), dtype=torch.float16, device="meta", requires_grad=True)
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
        multi = issubclass(kind, PipelineScheduleMulti)
        schedule = kind(stages if multi else stages[0], program.microbatches, loss_fn=loss_of)
        inputs = (tokens,) if 0 in numbers else ()
        target = {"target": tokens} if count - 1 in numbers else {}
        schedule.step(*inputs, return_outputs=False, **target)
    gradients = [weight.grad for weight in weights]
    if program.dp > 1:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=mesh["dp"].get_group())
    for weight, gradient in zip(main, gradients, strict=True):
        weight.grad = gradient.float()
    optimizer.step()
