"""torch.compile in a recorded program: the program runs as it is, since its compiler would need values and kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from echelon.foresight.record.here import recording_here

_ASSUMPTION = "torch.compile was taken as eager code"


@contextmanager
def not_compiled() -> Iterator[None]:
    """Inside, recorded ranks compile nothing. Their assumptions say so."""
    with (
        patch.object(torch, "compile", _compiling(torch.compile)),
        patch.object(torch.nn.Module, "compile", _compiling_itself(torch.nn.Module.compile)),
    ):
        yield


def _compiling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        if (recording := recording_here()) is None:
            return original(model, **options)
        recording.log.assume(_ASSUMPTION)
        return (lambda function: function) if model is None else model

    return compile


def _compiling_itself(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def compile(module: torch.nn.Module, *args: Any, **options: Any) -> None:
        if (recording := recording_here()) is None:
            original(module, *args, **options)
        else:
            recording.log.assume(_ASSUMPTION)

    return compile
