"""The published training steps as programs: FSDP2 with activation checkpointing, in bfloat16.

Llama: torchtitan's recipe. MPT: llm-foundry's and Composer's recipe, with FSDP2 in the place of FSDP1. Composer
computes two metrics of every microbatch's logits, each a cross entropy without fusion. Its AdamW steps parameter by
parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import models
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten
SAVED = {
    aten.mm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
"""Operators whose results torchtitan's selective checkpointing saves, matrix products every other time."""


class Recipe(NamedTuple):
    """Program of a row, as far as its recording depends on it."""

    model: str
    world_size: int
    microbatch: int
    length: int
    checkpointing: str
    """"no", "full", "layer" (every other one) or "op" (selective)."""
    accumulation: int
    """Microbatches of a step."""
    reduce: str
    """Type of reduced gradients."""
    fused_norm: bool = False


def train(recipe: Recipe, layers: int) -> None:
    """Trains with as many layers."""
    mesh = init_device_mesh("cuda", (recipe.world_size,))
    is_llama = recipe.model in models.LLAMA
    if is_llama:
        size = models.LLAMA[recipe.model]
        model: nn.Module = models.Llama(size, layers, recipe.length, recipe.fused_norm)
    else:
        model = models.Mpt(models.MPT[recipe.model], layers, recipe.length)
    policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, recipe.reduce))
    for index, block in enumerate(model.layers):
        block = model.layers[index] = checkpointed(block, recipe.checkpointing, index)
        # torchtitan leaves the last block unsharded, because its backward comes at once.
        reshards = index < layers - 1 or not is_llama
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=True) if is_llama else DecoupledAdamW(parameters)
    while True:
        for _ in range(recipe.accumulation):
            (llama_microbatch if is_llama else mpt_microbatch)(model, recipe)
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=is_llama)
        optimizer.step()
        optimizer.zero_grad()


def batch_of(recipe: Recipe) -> tuple[Tensor, Tensor]:
    shape = recipe.microbatch, recipe.length
    return torch.randint(0, 100, shape, device="cuda"), torch.randint(0, 100, shape, device="cuda").flatten(0, 1)


def llama_microbatch(model: nn.Module, recipe: Recipe) -> None:
    tokens, labels = batch_of(recipe)
    logits = model(tokens)
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels)
    del logits
    loss.backward()


def mpt_microbatch(model: nn.Module, recipe: Recipe) -> None:
    tokens, labels = batch_of(recipe)
    logits = model(tokens).flatten(0, 1)
    loss = models.FusedCrossEntropy.apply(logits, labels).mean() / recipe.accumulation
    loss.backward()
    # Composer's LanguageCrossEntropy and LanguagePerplexity: autocast makes both float32.
    with torch.no_grad():
        for _ in range(2):
            functional.cross_entropy(logits.float(), labels, reduction="sum")


class DecoupledAdamW(torch.optim.Optimizer):
    """AdamW as in Composer: a loop over parameters, without kernels that join them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                local, gradient = parameter.to_local(), parameter.grad.to_local()
                state = self.state[parameter]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(local), torch.zeros_like(local)
                state["mean"].mul_(0.9).add_(gradient, alpha=0.1)
                state["square"].mul_(0.95).addcmul_(gradient, gradient, value=0.05)
                size = (state["square"].sqrt() / 1.1).add_(1e-8)
                local.addcdiv_(state["mean"], size, value=-1e-4)


def checkpointed(block: nn.Module, how: str, index: int) -> nn.Module:
    if how == "op":
        return checkpoint_wrapper(block, context_fn=_selective, preserve_rng_state=False)
    if how == "full" or (how == "layer" and index % 2 == 0):
        return checkpoint_wrapper(block, preserve_rng_state=False)
    return block


def _selective():
    counts = {True: 0, False: 0}

    def policy(context, func, *_args, **_kwargs):
        if func == aten.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if func in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
