"""Llama under FSDP2 x tensor parallel, in torch alone: run it, simulate it, or foresee it on GPUs that you do not have.

torchrun --nproc-per-node 2 examples/foresee_llama.py --model tiny --tp 2
echelon simulate -n 8 examples/foresee_llama.py --model tiny --tp 2
echelon foresee -n 64 --gpu h100 --hosts 8 --network infiniband-400g examples/foresee_llama.py --model 8b
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
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
    "tiny": (64, 2, 4, 2, 128, 512),
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
    def __init__(self, name: str, sequence: int, recompute: bool):
        super().__init__()
        width, layers, heads, kv_heads, hidden, vocabulary = MODELS[name]
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.recompute = recompute
        size = width // heads
        steps = torch.arange(sequence)[:, None] / 500_000 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("angles", steps, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, self.angles, use_reentrant=False) if self.recompute else layer(x, self.angles)
        return self.output(self.norm(x))


def split(model: Llama, mesh) -> None:
    """Tensor and sequence parallel."""
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a data-parallel rank")
    parser.add_argument("--sequence", type=int, default=None, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    args = parser.parse_args()
    sequence = args.sequence or (64 if args.model == "tiny" else 8192)

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    shape = (dist.get_world_size() // args.tp, args.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)
    model = Llama(args.model, sequence, args.recompute).to(device)
    if args.tp > 1:
        split(model, mesh["tp"])
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    vocabulary = MODELS[args.model][-1]
    generator = torch.Generator(device).manual_seed(mesh["dp"].get_local_rank())  # a batch for each dp rank
    for step in range(args.steps):
        tokens = torch.randint(0, vocabulary, (args.batch, sequence), device=device, generator=generator)
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(0, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
