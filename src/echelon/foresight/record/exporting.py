"""torch.export in a recorded program, as when a pipeline traces a model: outside of the recording.

Export has fake tensors and modes of its own, whose sizes are symbols. A recording would count its operations as the
program's, and does not know symbols as sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from echelon._torch_private.tensors import FakeTensor, tree_map, without_modes
from echelon.foresight.record.device import mapped
from echelon.foresight.record.here import Recording, in_ranks
from echelon.replacements import Replacement


def exported_unrecorded() -> list[Replacement]:
    """Lets recorded ranks export models outside of their recording."""
    return [Replacement(torch.export, "export", in_ranks(_export))]


def _export(
    recording: Recording,
    export: Callable[..., Any],
    model: torch.nn.Module,
    args: Any,
    kwargs: Any = None,
    **options: Any,
) -> Any:
    with without_modes():
        args, kwargs = tree_map(_real, (args, kwargs))
        with nullcontext() if recording.placement is None else _OnCpu():
            return export(model, args, kwargs, **options)


def _real(leaf: object) -> object:
    """Returns zeros for a fake tensor: export takes no fake ones of another mode as inputs, and reads no values."""
    return torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, FakeTensor) else leaf


class _OnCpu(TorchFunctionMode):
    """Maps devices of CUDA to the CPU, on which all tensors of an export are. `OnDevice` does more, for a recording."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _MOVES:
            return args[0]
        kwargs = {key: mapped(value) for key, value in (kwargs or {}).items()}
        return func(*map(mapped, args), **kwargs)


_MOVES = frozenset({"cuda", "pin_memory"})
"""Methods that return the tensor itself: here a device has no meaning."""
