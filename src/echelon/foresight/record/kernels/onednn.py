"""Kernels of oneDNN, by which torch computes LSTMs and convolutions on the CPU: their memory, and FLOPs of an LSTM.

torch's fake LSTM returns an empty workspace and has no formula of FLOPs, and no fake kernel has temporary memory.
torch 2.13 has allocated these sizes on x86-64 with one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.foresight.record.kernels.convolutions import is_channels_last
from echelon.foresight.trace import CONVOLUTIONS

LSTM_LAYERS = frozenset({"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"})
HAS_SCRATCH = LSTM_LAYERS | CONVOLUTIONS
"""Operators that have temporary memory on the CPU."""
_GATES = 4
_BLOCK = 16
"""Channels of a block."""
_FEW = 4
"""Channels of an input up to which it keeps its layout, such as those of an image."""
_GRADIENT = 10
"""Position of the gradient of the output among the arguments of backward."""
_OF_16_BITS = 0.71
"""Workspace of bfloat16 by that of float32, whose gradients and cells stay float32. Measured with oneDNN."""


def products_of(args: Sequence[Any]) -> tuple[int, int, int, int]:
    """Returns the products of a layer: how many, rows, columns, and terms of a sum. Backward takes twice as many."""
    num_steps, num_sequences, width = args[0].shape
    hidden = args[2].shape[1]
    return num_steps, num_sequences, _GATES * hidden, width + hidden


def with_workspace(out: Sequence[Tensor], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Returns the results of a layer, with a workspace of its true size."""
    sequence = args[0]
    num_steps, num_sequences, width = sequence.shape
    hidden = args[2].shape[1]
    num_bytes = _workspace(num_steps, num_sequences, width, hidden)
    num_bytes = num_bytes if sequence.element_size() > 2 else int(_OF_16_BITS * num_bytes)
    return (*out[:3], sequence.new_empty(num_bytes, dtype=torch.uint8))


def scratch(name: str, args: Sequence[Any], out: Any) -> int:
    """Returns the bytes that an operator on the CPU has allocated while it computes, beside its results `out`."""
    if name in CONVOLUTIONS:
        return _blocked(name, args, out)
    sequence: Tensor = args[0]
    num_steps, num_sequences, width = sequence.shape
    hidden: int = args[2].shape[1]
    # The gates, the weights in oneDNN's layout, in backward their gradients as well, and contiguous copies.
    is_backward = name.endswith("backward")
    weights = (width + hidden) * (2 if is_backward else 1)
    read = [sequence, *args[_GRADIENT : _GRADIENT + 1]] if is_backward else [sequence]
    copies = sum(each.numel() for each in read if isinstance(each, Tensor) and not each.is_contiguous())
    elements: int = _padded(_GATES * hidden) * (num_steps * num_sequences + weights) + copies
    return elements * sequence.element_size()


def _blocked(name: str, args: Sequence[Any], out: Any) -> int:
    """Returns the bytes of copies in oneDNN's layout, in which channels of a pixel are neighbours in blocks.

    Forward copies the input and the weight, and then its result back. Backward has copies of the input and of the
    gradient at once, and then the gradient of the weight.
    """
    inputs, weight, *others = args if name == "convolution" else args[1:]
    stride, is_transposed, groups = others[1], others[4], others[6]
    size = inputs.numel() if inputs.shape[1] > _FEW else 0
    # With one thread, neither needs another layout.
    if is_channels_last(inputs) or (weight.shape[2:].numel() == 1 and max(stride) == 1):
        return 0
    result = out if name == "convolution" else args[0]
    size_of_result = _in_blocks(result.shape[1]) * (result.numel() // result.shape[1])
    of_weight = weight.numel()
    if groups == 1 and size:
        of_weight = _in_blocks(weight.shape[0]) * _in_blocks(weight.shape[1]) * weight.shape[2:].numel()
    if name == "convolution":
        read = [inputs]
        elements = of_weight + 2 * size_of_result if is_transposed else max(of_weight + size, size_of_result)
    else:
        read = [inputs, result]
        _, needs_weight, _ = others[-1]
        copies = max(size + size_of_result, of_weight) if needs_weight else of_weight + size_of_result
        is_twice = max(stride) > 1 and groups == 1 and not is_transposed
        elements = max(copies, 2 * size - of_weight if is_twice else size)
    of_others = sum(each.numel() for each in read if not each.is_contiguous())
    return int(elements + of_others) * int(inputs.element_size())


def _in_blocks(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _workspace(num_steps: int, num_sequences: int, width: int, hidden: int) -> int:
    """Returns the bytes of oneDNN's workspace, within 2 percent from 200 KB on. Fitted to sizes that it gave."""
    widest = _padded(max(width, hidden))
    states = (num_steps + 1) * (6 * widest + 4 * hidden + _padded(hidden))
    return 4 * num_sequences * (num_steps * _padded(_GATES * hidden) + states)


def _padded(length: int) -> int:
    """Returns the length of a row: whole cache lines, but no multiple of 256, whose lines would share a cache set."""
    rounded = -(-length // 16) * 16
    return rounded + 16 if rounded % 256 == 0 else rounded
