"""Advice for a step that does not fit into memory, by the tensors at its peak. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from echelon.foresight.play.allocator import Memory
from echelon.foresight.trace import GIB, UNKNOWN_STORAGE, Allocate, Kernel, Trace

_WORTH = 0.1
"""Least share of the peak that a change has to concern. Less hardly helps."""
_MOSTLY = 0.5
"""Share of the peak from which on a line is named."""
_OF_LOSS = 0.25
"""Share of the peak from which on the loss in chunks is advised."""
_LOSSES = ("log_softmax", "nll_loss", "cross_entropy")
"""Parts of the names of operators of a loss over a vocabulary, forward and backward."""


class Advice(NamedTuple):
    """Changes that may make a step fit."""

    cause: str
    """Tensors that hold most of the memory, as "train.py:3 holds 90.0 of 91.2 GiB". Empty if none do."""
    chunked_loss: bool
    smaller_tensor: bool
    """Whether a single tensor outside of modules, which may not depend on the batch, holds most."""
    smaller_batch: bool
    checkpointing: bool
    """Whether activation checkpointing may help. False if the step recomputes."""
    sharding: bool
    """Whether parameters, gradients and optimizer state are worth sharding over more ranks."""

    def __str__(self) -> str:
        used = ["a smaller batch"] * self.smaller_batch + ["activation checkpointing"] * self.checkpointing
        changes = [
            *["compute the loss in chunks"] * self.chunked_loss,
            *["make that tensor smaller"] * self.smaller_tensor,
            *[f"use {' or '.join(used)}"] * bool(used),
            *["shard parameters and optimizer state over more ranks"] * self.sharding,
        ]
        text = ", or ".join(changes or ["use a GPU with more memory"])
        return f"At the peak {self.cause}: {text}" if self.cause else text[0].upper() + text[1:]


def advice_on(memory: Memory, trace: Trace, limit: int) -> Advice:
    """Returns advice for a recorded rank that does not fit into a device of `limit` bytes."""
    kernels = [entry for entry in trace.entries if isinstance(entry, Kernel)]
    of_loss = _of_loss(kernels)
    state = sum(memory.kinds_at_peak.get(kind, 0) for kind in ("parameters", "gradients", "optimizer"))
    activations = [each for each in memory.alive_at_peak if each.kind in ("activations", "other")]
    loss = sum(each.num_bytes for each in activations if each.storage in of_loss)
    others = [each for each in activations if each.storage not in of_loss]
    rest = sum(each.num_bytes for each in others)
    peak = memory.live_peak
    lone = next((each.num_bytes for each in others if each.num_bytes > _MOSTLY * peak and _is_outside(each)), 0)
    lines = Counter[int]()
    for each in others:
        lines[each.place] += each.num_bytes
    line, held = max(lines.items(), key=lambda item: item[1], default=(-1, 0))
    # If the state alone is too large, no batch is small enough.
    may_fit = peak - loss - rest < limit
    cause = ""
    if loss >= _OF_LOSS * peak:
        cause = f"logits and loss hold {_of(loss, peak)}"
    elif line >= 0 and held > _MOSTLY * peak:
        cause = f"{trace.places[line]} holds {_of(held, peak)}"
    return Advice(
        cause,
        chunked_loss=loss >= _OF_LOSS * peak,
        smaller_tensor=lone > 0,
        smaller_batch=may_fit and loss + rest - lone >= _WORTH * peak,
        checkpointing=may_fit
        and rest - lone >= _WORTH * peak
        and not any(kernel.phase == "recompute" for kernel in kernels),
        sharding=state >= _WORTH * peak,
    )


def _of_loss(kernels: Sequence[Kernel]) -> set[int]:
    """Returns the storages that a loss reads or writes, and the copies of these in another type."""

    def of(kernel: Kernel) -> set[int]:
        return {storage for storage, _ in (*kernel.reads, *kernel.writes)} - {UNKNOWN_STORAGE}

    found = {each for kernel in kernels if any(name in kernel.name for name in _LOSSES) for each in of(kernel)}
    # Logits in 16 bits are converted before the loss, their gradients after it.
    copies = [of(kernel) for kernel in kernels if kernel.name == "_to_copy"]
    return found.union(*(copy for copy in copies if copy & found))


def _is_outside(storage: Allocate) -> bool:
    """Whether no module and no backward made a tensor."""
    return storage.kind == "other" and storage.module < 0


def _of(part: int, whole: int) -> str:
    return f"{part / GIB:.1f} of {whole / GIB:.1f} GiB"
