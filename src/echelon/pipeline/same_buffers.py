"""Runs of a module that leave its buffers, such as the running statistics of BatchNorm, as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def same_buffers(module: nn.Module) -> Iterator[None]:
    """Puts back, at the end, what the buffers held."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)  # not a change to autograd, which may have saved the buffer for a backward
