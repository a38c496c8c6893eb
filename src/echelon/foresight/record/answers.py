"""Values of tensors that other ranks would have given, where a rank runs alone with real tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.foresight.record.calls import Call

_PAGE = 4096


def answer(call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor], values: Sequence[Tensor] | None) -> None:
    """Writes the values of a call into its outputs, see `give`. Mapping their memory counts as time of the program.

    Collectives were timed with tensors whose memory was mapped. A program often frees its buffers, and gets new ones
    whose pages the operating system maps at the first write.
    """
    begin = time.perf_counter()
    with torch.no_grad():
        for output in outputs:
            if output.is_contiguous() and not any(output is each for each in inputs):
                output.view(-1).view(torch.uint8)[::_PAGE].zero_()
    call.seconds += time.perf_counter() - begin
    give(outputs, inputs, values)


def give(outputs: Sequence[Tensor], inputs: Sequence[Tensor], values: Sequence[Tensor] | None) -> None:
    """Writes the values of a call into its outputs.

    Args:
        outputs: tensors to write.
        inputs: tensors that the rank has given. The same as `outputs` for a collective in place.
        values: known values of the outputs. None: they are copied from the inputs, or invented if there are none.
    """
    with torch.no_grad():
        if values is not None:
            for output, value in zip(outputs, values, strict=True):
                output.copy_(value.reshape(output.shape))
            return
        given = [each.detach().reshape(-1) for each in inputs if each.numel()]
        for number, output in enumerate(outputs):
            if any(output is each for each in inputs):
                continue
            if given and output.is_contiguous():
                _repeat(output.view(-1), given[number % len(given)])
            else:
                invent(output)


def invent(tensor: Tensor) -> None:
    """Fills a tensor with values that are safe to compute with: small random numbers, and zeros as indices."""
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.zero_()


def _repeat(output: Tensor, source: Tensor) -> None:
    for begin in range(0, len(output), len(source)):
        part = output[begin : begin + len(source)]
        part.copy_(source[: len(part)])
