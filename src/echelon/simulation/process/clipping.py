"""Gradient clipping over parameters of several device meshes, which torch refuses by an error of several pages."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from echelon._torch_private.modules import clipping_by
from echelon.replacements import Replacement


def clipping_explained() -> list[Replacement]:
    """Lets clipping that fails say in one line which meshes its gradients have.

    Clipping that torch does is left as it is.
    """
    return clipping_by(_explained)


def _explained(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(tensors: Tensor | Iterable[Tensor], *args: Any, **options: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        try:
            return original(tensors, *args, **options)
        except Exception:
            kinds = Counter(getattr(each, "device_mesh", None) for each in tensors)
            if len(kinds) < 2:
                raise
            groups = ", ".join(f"{number} {_text(mesh)}" for mesh, number in kinds.items())
            # `from None`: torch's own error is pages of meshes and placements.
            raise RuntimeError(
                f"clipping mixes gradients of several device meshes, or of one and none: {groups}: torch refuses that; "
                "call clip_grad_norm_ once for the parameters of each"
            ) from None

    return clip


def _text(mesh: Any) -> str:
    if mesh is None:
        return "that are plain tensors"
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    sizes = ", ".join(f"{name}={size}" if name else str(size) for name, size in zip(names, mesh.shape, strict=True))
    return f"on the mesh ({sizes})"
