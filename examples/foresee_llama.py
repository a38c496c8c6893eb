"""Llama under FSDP2 x TP x PP, in torch alone: run it, simulate it, or foresee it on GPUs that you do not have.

torchrun --nproc-per-node 2 examples/foresee_llama.py --model tiny --tp 2
torchrun --nproc-per-node 2 examples/foresee_llama.py --model tiny --pp 2
echelon simulate -n 8 examples/foresee_llama.py --model tiny --tp 2
echelon foresee -n 64 --gpu h100 --hosts 8 --network infiniband-400g examples/foresee_llama.py --model 8b
echelon foresee -n 1024 --hosts 128 examples/foresee_llama.py --model 70b --tp 8 --pp 8 --microbatches 32
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

# width, layers, heads, heads of keys and values, hidden width, vocabulary
MODELS = {
    "tiny": (64, 4, 4, 2, 128, 512),
    "8b": (4096, 32, 32, 8, 14336, 128256),
    "70b": (8192, 80, 64, 8, 28672, 128256),
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.size, self.groups = width // heads, heads // kv_heads
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (w(x).view(batch, sequence, -1, self.size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, angles), rotate(k, angles)
        k, v = (y.repeat_interleave(self.groups, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, sequence, -1))


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    even, odd = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), -1).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.ffn = Attention(width, heads, kv_heads), FeedForward(width, hidden)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """A stage of the model, or all of it."""

    def __init__(self, name: str, sequence: int, recompute: bool, stage: int = 0, num_stages: int = 1):
        super().__init__()
        width, layers, heads, kv_heads, hidden, vocabulary = MODELS[name]
        own = range(layers * stage // num_stages, layers * (stage + 1) // num_stages)
        self.embedding = nn.Embedding(vocabulary, width) if stage == 0 else None
        self.layers = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in own)
        is_last = stage == num_stages - 1
        self.norm = nn.RMSNorm(width) if is_last else None
        self.output = nn.Linear(width, vocabulary, bias=False) if is_last else None
        self.recompute = recompute
        size = width // heads
        steps = torch.arange(sequence)[:, None] / 500_000 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("angles", steps, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = checkpoint(layer, x, self.angles, use_reentrant=False) if self.recompute else layer(x, self.angles)
        return x if self.output is None else self.output(self.norm(x))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(0, 1))


def split(model: Llama, mesh) -> None:
    """Tensor and sequence parallel."""
    if model.embedding is not None:
        plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
        parallelize_module(model, mesh, plan)
    if model.output is not None:
        output = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, {"norm": SequenceParallel(), "output": output})
    plan = {
        "attention_norm": SequenceParallel(),
        "ffn_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "ffn.w1": ColwiseParallel(),
        "ffn.w3": ColwiseParallel(),
        "ffn.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def clip(parameters, norm: float, mesh) -> None:
    """Clips gradients by their norm over all stages."""
    total = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    total = total.full_tensor() if isinstance(total, DTensor) else total
    if mesh["pp"].size() > 1:
        total = total**2
        dist.all_reduce(total, group=mesh["pp"].get_group())
        total = total**0.5
    torch.nn.utils.clip_grads_with_norm_(parameters, norm, total)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism")
    parser.add_argument("--pp", type=int, default=1, help="ranks of a pipeline")
    parser.add_argument("--schedule", default="1F1B", help="schedule of the pipeline, as torch names it")
    parser.add_argument("--microbatches", type=int, default=None, help="default: 2 for each rank of a pipeline, else 1")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a data-parallel rank in a microbatch")
    parser.add_argument("--sequence", type=int, default=None, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    args = parser.parse_args()
    sequence = args.sequence or (64 if args.model == "tiny" else 8192)
    microbatches = args.microbatches or (2 * args.pp if args.pp > 1 else 1)

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    shape = (args.pp, dist.get_world_size() // (args.tp * args.pp), args.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    rank = mesh["pp"].get_local_rank()

    # Schedules with several stages on a rank deal them out in a loop, or there and back again.
    kind = get_schedule_class(args.schedule)
    is_multi = args.pp > 1 and issubclass(kind, PipelineScheduleMulti)
    num_stages = args.pp * (2 if is_multi else 1)
    if num_stages > MODELS[args.model][1]:
        parser.error(f"{num_stages} stages: model {args.model} has {MODELS[args.model][1]} layers")
    second = num_stages - 1 - rank if args.schedule in ("ZBVZeroBubble", "DualPipeV") else rank + args.pp
    own = [rank, second] if is_multi else [rank]

    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    parts = [Llama(args.model, sequence, args.recompute, each, num_stages).to(device) for each in own]
    for part in parts:
        if args.tp > 1:
            split(part, mesh["tp"])
        for layer in part.layers:
            fully_shard(layer, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=args.pp == 1)
        fully_shard(part, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=args.pp == 1)
    parameters = [each for part in parts for each in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4)
    if args.pp > 1:
        group = mesh["pp"].get_group()
        numbered = zip(parts, own, strict=True)
        stages = [PipelineStage(part, each, num_stages, device, group=group) for part, each in numbered]
        schedule = kind(stages if is_multi else stages[0], microbatches, loss_fn=loss_of)

    vocabulary = MODELS[args.model][-1]
    generator = torch.Generator(device).manual_seed(mesh["dp"].get_local_rank())  # a batch for each dp rank
    for step in range(args.steps):
        size = (args.batch * microbatches, sequence)
        tokens = torch.randint(0, vocabulary, size, device=device, generator=generator)
        losses = []
        if args.pp > 1:
            inputs = (tokens,) if 0 in own else ()
            targets = {"target": tokens, "losses": losses} if num_stages - 1 in own else {}
            schedule.step(*inputs, return_outputs=False, **targets)
        else:
            for part in tokens.chunk(microbatches):
                losses.append(loss_of(parts[0](part), part))
                (losses[-1] / microbatches).backward()
        clip(parameters, 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()
        if losses and mesh["dp"].get_local_rank() == mesh["tp"].get_local_rank() == 0:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
