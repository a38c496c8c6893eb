"""torch.compile in a recorded program: the code runs as it is, and its kernels are marked.

The compiler itself would need values and kernels. `echelon.foresight.play.fusion` joins the marked kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from echelon.foresight.record.here import recording_here

_ASSUMPTION = "torch.compile was taken as fused runs of elementwise kernels"


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
        return _marked if model is None else _marked(model)

    return compile


def _compiling_itself(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def compile(module: torch.nn.Module, *args: Any, **options: Any) -> None:
        if (recording := recording_here()) is None:
            original(module, *args, **options)
        else:
            recording.log.assume(_ASSUMPTION)
            recording.log.compiled.add(module)

    return compile


def _marked(model: Any) -> Any:
    """Returns the same module, or a function that does the same. Their kernels are marked."""
    recording = recording_here()
    if isinstance(model, torch.nn.Module) and recording is not None:
        recording.log.compiled.add(model)
        return model

    @functools.wraps(model)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (here := recording_here()) is None:
            return model(*args, **kwargs)
        with here.log.compiling():
            return model(*args, **kwargs)

    return call
