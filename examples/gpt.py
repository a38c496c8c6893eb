"""Byte-level GPT and its text. This file does not depend on ranks."""

from __future__ import annotations

import math
import sysconfig
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_BYTES = 256
"""Size of the vocabulary: a token is a byte."""


class Block(nn.Module):
    """Attention, then a feed-forward network, each with a residual connection."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width, bias=False)
        self.feed_forward_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_forward_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention_out(self._attend(self.attention_norm(hidden)))
        wide = functional.gelu(self.feed_forward_in(self.feed_forward_norm(hidden)), approximate="tanh")
        return hidden + self.feed_forward_out(wide)

    def _attend(self, hidden: Tensor) -> Tensor:
        heads = self.query_key_value(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each: samples, heads, positions, width of a head
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).flatten(-2)


class Embedding(nn.Module):
    """Sum of the embeddings of a byte, of the two bytes before it, and of its position."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.bytes = nn.ModuleList(nn.Embedding(NUM_BYTES, width) for _ in range(3))
        self.position = nn.Embedding(context, width)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.position.weight[: text.shape[1]]
        for distance, embedding in enumerate(self.bytes):
            hidden = hidden + functional.pad(embedding(text), (0, 0, distance, -distance))
        return hidden


class Head(nn.Module):
    """Scores of every byte as the next one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.score = nn.Linear(width, NUM_BYTES, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.score(self.norm(hidden))


def make_gpt(num_layers: int, width: int, num_heads: int, context: int, seed: int = 0) -> nn.Sequential:
    """Makes the model: bytes of shape (samples, positions) in, scores of shape (samples, positions, 256) out.

    The weights come from their own generator, so all ranks make the same ones.
    """
    layers: dict[str, nn.Module] = {"embedding": Embedding(context, width)}
    layers |= {f"block{index}": Block(width, num_heads) for index in range(num_layers)}
    layers["head"] = Head(width)
    model = nn.Sequential(OrderedDict(layers))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # the others are the scales of norms, which stay 1
            # Each block adds to the hidden state, so with more blocks each one starts smaller.
            shrink = math.sqrt(2 * num_layers) if name.endswith("_out.weight") else 1.0
            nn.init.normal_(parameter, std=0.02 / shrink, generator=generator)
    return model


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    """Returns the mean cross entropy, in nats per byte."""
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten())


class Text(NamedTuple):
    """Bytes to train on, and bytes of other files to validate with. Both tensors are uint8."""

    training: Tensor
    validation: Tensor


class Windows(NamedTuple):
    """Windows of text, of shape (samples, positions), and the next byte at each position."""

    inputs: Tensor
    target: Tensor


def read_text(max_bytes: int = 4_000_000) -> Text:
    """Reads the modules of Python's standard library in the order of their names. Every tenth is for validation."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = list(dict.fromkeys(path.read_bytes() for path in paths))  # drops copies, so no text is in both parts
    validation = bytearray().join(sources[::10])
    training = bytearray().join(source for index, source in enumerate(sources) if index % 10)
    parts = (part[:max_bytes] for part in (training, validation))
    return Text(*(torch.frombuffer(part, dtype=torch.uint8) for part in parts))


def random_windows(text: Tensor, num_samples: int, context: int, seed: int) -> Windows:
    """Cuts `num_samples` windows at random places, which the seed determines."""
    generator = torch.Generator().manual_seed(seed)
    return _cut(text, torch.randint(len(text) - context, (num_samples,), generator=generator), context)


def even_windows(text: Tensor, num_samples: int, context: int) -> Windows:
    """Cuts `num_samples` windows at equal distances."""
    return _cut(text, torch.arange(num_samples) * (len(text) - context) // num_samples, context)


def _cut(text: Tensor, starts: Tensor, context: int) -> Windows:
    pieces = text[starts[:, None] + torch.arange(context + 1)].long()
    return Windows(pieces[:, :-1], pieces[:, 1:])


def unigram_loss(training: Tensor, target: Tensor) -> float:
    """Returns the loss, in nats per byte, of a model that only knows how often each byte occurs in `training`."""
    counts = torch.bincount(training.long(), minlength=NUM_BYTES) + 1.0
    return functional.cross_entropy(counts.log().expand(target.numel(), -1), target.flatten()).item()
