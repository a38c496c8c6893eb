"""Ordinary training programs for GPUs, small. Nothing in them knows of Echelon."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

WIDTH, HEADS, VOCAB, SEQUENCE, BATCH = 64, 4, 128, 32, 2


class Attention(nn.Module):
    def __init__(self, width=WIDTH, heads=HEADS):
        super().__init__()
        self.size = width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        batch, sequence, _ = x.shape
        q, k, v = (w(x).view(batch, sequence, -1, self.size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, sequence, -1))


class Mlp(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width), Mlp(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, depth=2, width=WIDTH, recompute=""):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.recompute = recompute

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self._run(layer, x)
        return self.output(self.norm(x))

    def _run(self, layer, x):
        if self.recompute == "selective":
            saved = [torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default]
            contexts = lambda: create_selective_checkpoint_contexts(saved)  # noqa: E731
            return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        if self.recompute:
            return checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
        return layer(x)


def begin():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def train(model, device, *, batch=BATCH, accumulate=1, after=None, autocast=None, steps=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        for _ in range(accumulate):
            tokens = torch.randint(0, VOCAB, (batch, SEQUENCE), device=device)
            with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
                logits = model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(0, 1))
            loss.backward()
        if after is not None:
            after(step)
        optimizer.step()
        optimizer.zero_grad()


def fsdp(*, depth=2, width=WIDTH, recompute="", accumulate=1, reduce_dtype=torch.float32, after=None):
    device = begin()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = Decoder(depth, width, recompute)
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    train(model, device, accumulate=accumulate, after=after)


def ddp(*, depth=2, recompute="", accumulate=1, autocast=None, after=None, **options):
    device = begin()
    model = DistributedDataParallel(
        Decoder(depth, recompute=recompute).to(device), device_ids=[device.index], **options
    )
    train(model, device, accumulate=accumulate, after=after, autocast=autocast)


def fsdp1(*, depth=2, use_orig_params=True, reduce_dtype=torch.float32):
    device = begin()
    model = Decoder(depth).cuda()
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    options = {"mixed_precision": policy, "device_id": device, "use_orig_params": use_orig_params}
    for number, layer in enumerate(model.layers):
        model.layers[number] = FullyShardedDataParallel(layer, **options)
    train(FullyShardedDataParallel(model, **options), device)


def tensor_parallel(*, tp=2, depth=2, after=None):
    """FSDP2 x tensor parallel x sequence parallel, as torchtitan's Llama."""
    device = begin()
    mesh = init_device_mesh("cuda", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    model = Decoder(depth)
    parallelize_module(
        model,
        mesh["tp"],
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        plan = {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.w1": ColwiseParallel(),
            "mlp.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    train(model, device, after=after)
