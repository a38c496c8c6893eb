"""torch.compile in a recorded program: the code runs as it is, and its kernels are marked.

The compiler itself would need values and kernels. `echelon.foresight.play.fusion` joins the marked kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from echelon.foresight.record.here import Recording, in_place_of, recording_here

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
    @in_place_of(original)
    def compile(recording: Recording, model: Any = None, **_: Any) -> Any:
        recording.log.assume(_ASSUMPTION)
        return _marked if model is None else _marked(model)

    return compile


def _compiling_itself(original: Callable[..., None]) -> Callable[..., None]:
    @in_place_of(original)
    def compile(recording: Recording, module: torch.nn.Module, *_: Any, **__: Any) -> None:
        recording.log.assume(_ASSUMPTION)
        recording.log.compiled.add(module)

    return compile


def _marked(model: Any) -> Any:
    """Returns the same module, or a function that does the same. Their kernels are marked."""
    recording = recording_here()
    if isinstance(model, torch.nn.Module) and recording is not None:
        recording.log.compiled.add(model)
        return model

    @in_place_of(model)
    def call(here: Recording, *args: Any, **kwargs: Any) -> Any:
        with here.log.compiling():
            return model(*args, **kwargs)

    return call
