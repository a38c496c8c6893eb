"""The published models: Llama as in torchtitan, MPT as in llm-foundry, with the kernels that these used."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


@torch.library.custom_op("foresee::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm in one kernel (Triton), as torchtitan's "fused_rmsnorm"."""
    raise NotImplementedError


@rms_norm.register_fake
def _(x: Tensor, _weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("foresee::rms_norm_backward", mutates_args=())
def rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


@rms_norm_backward.register_fake
def _(_gradient: Tensor, x: Tensor, weight: Tensor, _scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


rms_norm.register_autograd(
    lambda ctx, gradient, _: rms_norm_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1]),
)


@torch.library.custom_op("foresee::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy in one kernel, as that of flash-attn, MPT's default."""
    raise NotImplementedError


@cross_entropy.register_fake
def _(logits: Tensor, _labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits), dtype=torch.float32), logits.new_empty(len(logits), dtype=torch.float32)


@torch.library.custom_op("foresee::cross_entropy_backward", mutates_args=("logits",))
def cross_entropy_backward(gradient: Tensor, logits: Tensor, labels: Tensor, sums: Tensor) -> None:
    raise NotImplementedError


@cross_entropy_backward.register_fake
def _(_gradient: Tensor, _logits: Tensor, _labels: Tensor, _sums: Tensor) -> None:
    return None


class FusedCrossEntropy(torch.autograd.Function):
    """Cross entropy whose gradient overwrites the logits."""

    @staticmethod
    def forward(context, logits, labels):
        losses, sums = cross_entropy(logits, labels)
        context.save_for_backward(logits, labels, sums)
        return losses

    @staticmethod
    def backward(context, gradient):
        logits, labels, sums = context.saved_tensors
        logits = logits.detach()
        cross_entropy_backward(gradient, logits, labels, sums)
        return logits, None


class RMSNorm(nn.Module):
    def __init__(self, dim: int, is_fused: bool) -> None:
        super().__init__()
        self.is_fused = is_fused
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_fused:
            return rms_norm(x, self.weight)[0]
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


class LlamaAttention(nn.Module):
    def __init__(self, dim: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.head_dim, self.repeats = dim // heads, heads // key_heads
        linear = partial(nn.Linear, bias=False)
        self.wq, self.wo = linear(dim, dim), linear(dim, dim)
        self.wk, self.wv = linear(dim, key_heads * self.head_dim), linear(dim, key_heads * self.head_dim)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, angles), rotate(k, angles)
        if self.repeats > 1:
            k, v = (
                y[:, :, :, None].expand(-1, -1, -1, self.repeats, -1).reshape(batch, length, -1, self.head_dim)
                for y in (k, v)
            )
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(batch, length, -1))


class LlamaFeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.w1, self.w3, self.w2 = linear(dim, hidden), linear(dim, hidden), linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, dim: int, heads: int, key_heads: int, hidden: int, is_fused: bool) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim, is_fused), RMSNorm(dim, is_fused)
        self.attention, self.feed_forward = LlamaAttention(dim, heads, key_heads), LlamaFeedForward(dim, hidden)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, size: LlamaSize, layers: int, length: int, is_fused: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(size.vocabulary, size.dim)
        self.layers = nn.ModuleList(
            LlamaBlock(size.dim, size.heads, size.key_heads, size.hidden, is_fused) for _ in range(layers)
        )
        self.norm, self.output = RMSNorm(size.dim, is_fused), nn.Linear(size.dim, size.vocabulary, bias=False)
        angles = torch.empty(length, 1, size.dim // size.heads // 2, dtype=torch.complex64)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.output(self.norm(x))


class MptBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(batch, length, dim))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Mpt(nn.Module):
    def __init__(self, size: MptSize, layers: int, length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(MPT_VOCABULARY, size.dim), nn.Embedding(length, size.dim)
        self.layers = nn.ModuleList(MptBlock(size.dim, size.heads) for _ in range(layers))
        self.norm = nn.LayerNorm(size.dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[None, : tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.wte.weight)


class LlamaSize(NamedTuple):
    dim: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int


class MptSize(NamedTuple):
    dim: int
    layers: int
    heads: int


MPT_VOCABULARY = 50368
LLAMA = {
    "llama3-8b": LlamaSize(4096, 32, 32, 8, 14336, 128256),
    "llama3-70b": LlamaSize(8192, 80, 64, 8, 28672, 128256),
    "llama2-13b": LlamaSize(5120, 40, 40, 40, 13824, 32000),
    "llama2-70b": LlamaSize(8192, 80, 64, 8, 28672, 32000),
}
MPT = {
    "mpt-125m": MptSize(768, 12, 12),
    "mpt-350m": MptSize(1024, 24, 16),
    "mpt-760m": MptSize(1536, 24, 12),
    "mpt-1b": MptSize(2048, 24, 16),
    "mpt-3b": MptSize(2560, 32, 20),
    "mpt-7b": MptSize(4096, 32, 32),
    "mpt-13b": MptSize(5120, 40, 40),
    "mpt-30b": MptSize(7168, 48, 56),
    "mpt-70b": MptSize(8192, 80, 64),
}


def depth_of(model: str) -> int:
    return (LLAMA.get(model) or MPT[model]).layers
