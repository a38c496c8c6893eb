"""LSTM layers as one kernel each way: its products, and the workspace that its backward reads.

torch computes an LSTM on the CPU by oneDNN. Its fake kernel returns an empty workspace, and has no formula of FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LSTM_LAYERS = frozenset({"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"})
_GATES = 4
_GRADIENT = 10
"""Position of the gradient of the output among the arguments of backward."""
_KEPT_ON_GPU = 6
"""Values for each step, sequence and unit that a GPU keeps for the backward: gates, cell and its tanh. An estimate."""
_OF_16_BITS = 0.71
"""Workspace of bfloat16 by that of float32, whose gradients and cells stay float32. Measured with oneDNN."""


def products_of(args: Sequence[Any]) -> tuple[int, int, int, int]:
    """Returns the products of a layer: how many, rows, columns, and terms of a sum. Backward takes twice as many."""
    num_steps, num_sequences, width = args[0].shape
    hidden = args[2].shape[1]
    return num_steps, num_sequences, _GATES * hidden, width + hidden


def with_workspace(out: Sequence[Tensor], args: Sequence[Any], on_gpu: bool) -> tuple[Tensor, ...]:
    """Returns the results of a layer, with a workspace of its true size."""
    sequence = args[0]
    num_steps, num_sequences, width = sequence.shape
    hidden = args[2].shape[1]
    if on_gpu:
        num_bytes = _KEPT_ON_GPU * num_steps * num_sequences * hidden * sequence.element_size()
    else:
        num_bytes = _workspace(num_steps, num_sequences, width, hidden)
        num_bytes = num_bytes if sequence.element_size() > 2 else int(_OF_16_BITS * num_bytes)
    return (*out[:3], sequence.new_empty(num_bytes, dtype=torch.uint8))


def scratch(args: Sequence[Any], is_backward: bool) -> Tensor:
    """Returns what a layer on the CPU has allocated while it computes.

    That is its gates, its weights in oneDNN's layout, in backward their gradients as well, and contiguous copies.
    """
    sequence = args[0]
    num_steps, num_sequences, width = sequence.shape
    hidden = args[2].shape[1]
    weights = (width + hidden) * (2 if is_backward else 1)
    read = [sequence, *args[_GRADIENT : _GRADIENT + 1]] if is_backward else [sequence]
    copies = sum(each.numel() for each in read if isinstance(each, Tensor) and not each.is_contiguous())
    made: Tensor = sequence.new_empty(_padded(_GATES * hidden) * (num_steps * num_sequences + weights) + copies)
    return made


def _workspace(num_steps: int, num_sequences: int, width: int, hidden: int) -> int:
    """Returns the bytes of oneDNN's workspace, within 2 percent from 200 KB on. Fitted to sizes that it gave."""
    widest = _padded(max(width, hidden))
    states = (num_steps + 1) * (6 * widest + 4 * hidden + _padded(hidden))
    return 4 * num_sequences * (num_steps * _padded(_GATES * hidden) + states)


def _padded(length: int) -> int:
    """Returns the length of a row: whole cache lines, but no multiple of 256, whose lines would share a cache set."""
    rounded = -(-length // 16) * 16
    return rounded + 16 if rounded % 256 == 0 else rounded
