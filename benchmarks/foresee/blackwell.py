"""Published steps of Llama with tensor and sequence parallelism on eight B200, beside their forecast.

python benchmarks/foresee/blackwell.py      takes some minutes

The program is that of Megatron-LM with Transformer Engine. Products for the gradients of weights are added to float32
gradients in the kernel. Collectives of tensor parallelism in backward are under way during a product. The time of a
step grows linearly with the microbatches, so two and four of them are recorded.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from models import FusedCrossEntropy, rms_norm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F  # noqa: N812

import echelon

SOURCE = (
    "MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md, simu_tools/megatron_scripts (8 B200 of one host, "
    "Megatron-LM 23e00ed0, Transformer Engine 2.11, PyTorch 2.10)"
)
GIB = 1 << 30
RANKS, LENGTH, HEAD_DIM, WORDS = 8, 4096, 128, 128256


class Size(NamedTuple):
    layers: int
    hidden: int
    heads: int
    key_heads: int
    inner: int


SIZES = {"70B": Size(12, 8192, 64, 8, 28672), "405B": Size(4, 16384, 128, 16, 53248)}
"""Shapes of Llama 3 with fewer layers."""


class Row(NamedTuple):
    """A published step: milliseconds with 4, 8 and 32 microbatches, and the allocated memory of the fullest rank."""

    model: str
    tp: int
    milliseconds: tuple[float, float, float]
    gib: float


MICROBATCHES = 4, 8, 32
ROWS = (
    Row("70B", 2, (725.5, 1387.0, 5376.5), 60.68),
    Row("70B", 8, (280.9, 556.7, 2073.7), 28.29),
    Row("405B", 2, (907.3, 1716.8, 6604.1), 81.59),
    Row("405B", 8, (258.8, 488.1, 1901.8), 38.57),
)
FITTED = ("70B", 2, 8), ("405B", 2, 8)
"""Model, tensor parallelism and microbatches of the steps that the share of matrix products was fitted on."""


def gathered(x: Tensor, group: Any) -> tuple[Tensor, Any]:
    """Begins to gather a sequence of which each rank has a part."""
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=True)


def scattered(x: Tensor, group: Any) -> tuple[Tensor, Any]:
    """Begins to sum over the ranks, of which each gets a part of the sequence."""
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    return part, dist.reduce_scatter_tensor(part, x.contiguous(), group=group, async_op=True)


def add_weight_gradient(weight: Tensor, gradient: Tensor, x: Tensor) -> None:
    """Adds a product of bfloat16 matrices to a float32 gradient."""
    whole, rows = gradient.flatten(0, -2).T, x.flatten(0, -2)
    torch.addmm(weight.main_grad, whole, rows, out_dtype=torch.float32, out=weight.main_grad)


class ColumnParallel(torch.autograd.Function):
    """Product of the whole sequence with a part of the columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        whole, work = gathered(x, group)
        work.wait()
        return F.linear(whole, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        whole, gathering = gathered(x, ctx.group)
        of_whole = gradient @ weight
        gathering.wait()
        of_x, scattering = scattered(of_whole, ctx.group)
        add_weight_gradient(weight, gradient, whole)
        scattering.wait()
        return of_x, None, None


class RowParallel(torch.autograd.Function):
    """Product with a part of the rows, summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        part, work = scattered(F.linear(x, weight), group)
        work.wait()
        return part

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        whole, work = gathered(gradient, ctx.group)
        work.wait()
        of_x = whole @ weight
        add_weight_gradient(weight, whole, x)
        return of_x, None, None


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cosines + torch.cat((-right, left), -1) * sines


class Layer(nn.Module):
    def __init__(self, size: Size, group: Any) -> None:
        super().__init__()
        tp = group.size()
        self.group, self.heads, self.key_heads = group, size.heads // tp, size.key_heads // tp
        columns = (self.heads + 2 * self.key_heads) * HEAD_DIM
        self.norm1, self.norm2 = (nn.Parameter(torch.empty(size.hidden)) for _ in range(2))
        self.qkv = nn.Parameter(torch.empty(columns, size.hidden))
        self.out = nn.Parameter(torch.empty(size.hidden, self.heads * HEAD_DIM))
        self.up = nn.Parameter(torch.empty(2 * size.inner // tp, size.hidden))
        self.down = nn.Parameter(torch.empty(size.hidden, size.inner // tp))
        self.swiglu, self.rotated = torch.compile(swiglu), torch.compile(rotated)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        mixed = ColumnParallel.apply(rms_norm(x, self.norm1)[0], self.qkv, self.group)
        mixed = mixed.view(*mixed.shape[:2], self.heads + 2 * self.key_heads, HEAD_DIM)
        q, k, v = mixed.split((self.heads, self.key_heads, self.key_heads), 2)
        q, k = self.rotated(q, cosines, sines), self.rotated(k, cosines, sines)
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + RowParallel.apply(y.permute(2, 0, 1, 3).flatten(2), self.out, self.group)
        y = self.swiglu(ColumnParallel.apply(rms_norm(x, self.norm2)[0], self.up, self.group))
        return x + RowParallel.apply(y, self.down, self.group)


class Model(nn.Module):
    def __init__(self, size: Size, group: Any) -> None:
        super().__init__()
        self.group = group
        words = WORDS // group.size()
        self.words, self.head = (nn.Parameter(torch.empty(words, size.hidden)) for _ in range(2))
        self.layers = nn.ModuleList(Layer(size, group) for _ in range(size.layers))
        self.norm = nn.Parameter(torch.empty(size.hidden))

    def forward(self, tokens: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x, work = scattered(F.embedding(tokens.T // self.group.size(), self.words), self.group)
        work.wait()
        for layer in self.layers:
            x = layer(x, cosines, sines)
        logits = ColumnParallel.apply(rms_norm(x, self.norm)[0], self.head, self.group).flatten(0, 1)
        return FusedCrossEntropy.apply(logits, tokens.T.flatten() // self.group.size()).mean()


def train(model_name: str, tp: int, microbatches: int) -> None:
    """Trains for three steps, with optimizer states and float32 weights divided among the replicas."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh("cuda", (RANKS // tp, tp), mesh_dim_names=("dp", "tp"))
    dp = RANKS // tp
    with torch.device("cuda"):
        model = Model(SIZES[model_name], mesh["tp"].get_group())
    weights = list(model.parameters())
    sizes = [-(-weight.numel() // dp) * dp for weight in weights]
    flat, gradients = (torch.zeros(sum(sizes), device="cuda", dtype=kind) for kind in (torch.bfloat16, torch.float32))
    for weight, values, gradient in zip(weights, flat.split(sizes), gradients.split(sizes), strict=True):
        weight.data = values[: weight.numel()].view_as(weight)
        weight.main_grad = gradient[: weight.numel()].view_as(weight)
        weight.register_post_accumulate_grad_hook(moved_to_main)
    mine = gradients.chunk(dp)[mesh["dp"].get_local_rank()]
    main = torch.zeros_like(mine).requires_grad_()
    optimizer = torch.optim.AdamW([main], fused=True)
    angles = torch.empty(LENGTH, 1, 1, HEAD_DIM, device="cuda")
    # Transformer Engine returns the gradient of a weight as zeros of its shape, of which it keeps one for each shape.
    shapes = {weight.shape for weight in model.layers.parameters()}
    dummies = [torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    for _ in range(3):
        gradients.zero_()
        for _ in range(microbatches):
            tokens = torch.zeros(1, LENGTH, dtype=torch.int64, device="cuda")
            model(tokens, angles.cos().bfloat16(), angles.sin().bfloat16()).backward()
        group = mesh["dp"].get_group()
        if dp > 1:
            gradients.mul_(1 / dp)
            dist.reduce_scatter_tensor(mine, gradients, group=group)
        main.grad = mine
        nn.utils.clip_grad_norm_([main], 1.0)
        optimizer.step()
        part = flat.chunk(dp)[mesh["dp"].get_local_rank()]
        part.copy_(main.detach())
        if dp > 1:
            dist.all_gather_into_tensor(flat, part, group=group)
    del dummies


def moved_to_main(weight: Tensor) -> None:
    """Adds a gradient that no product has added."""
    if weight.grad is not None:
        weight.main_grad.add_(weight.grad)
        weight.grad = None


def main() -> None:
    """Prints the table."""
    print(f"torch {torch.__version__}, echelon {echelon.__version__}. Source: {SOURCE}\n")
    print("| model | tp x dp | microbatches | measured, ms | foreseen, ms | error |")
    print("|---|---|---|---|---|---|")
    errors, memory = [], []
    for row in ROWS:
        few, more = (
            echelon.foresee(partial(train, row.model, row.tp, count), RANKS, gpu="b200", hosts=1, steps=2)
            for count in (2, 4)
        )
        each = (more.step_seconds - few.step_seconds) / 2
        for count, measured in zip(MICROBATCHES, row.milliseconds, strict=True):
            foreseen = 1e3 * (few.step_seconds + (count - 2) * each)
            errors.append(foreseen / measured - 1)
            mark = " (fitted)" if (row.model, row.tp, count) in FITTED else ""
            print(
                f"| {row.model} | {row.tp} x {RANKS // row.tp} | {count} | {measured:,.1f} | {foreseen:,.1f} | "
                f"{errors[-1]:+.1%}{mark} |",
                flush=True,
            )
        foreseen = more.live_memory[0] / GIB
        memory.append((row, foreseen))
    print(f"\nmedian error {statistics.median(map(abs, errors)):.1%}\n")
    print("| model | tp x dp | allocated, GiB | foreseen, GiB | error |")
    print("|---|---|---|---|---|")
    for row, foreseen in memory:
        error = foreseen / row.gib - 1
        print(f"| {row.model} | {row.tp} x {RANKS // row.tp} | {row.gib} | {foreseen:.2f} | {error:+.1%} |")


if __name__ == "__main__":
    main()
