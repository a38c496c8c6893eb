"""Gives each use of a weight an edge of its own in the graph, for stages that use one in several places."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class SeparateUses(TorchFunctionMode):
    """Replaces some parameters, as arguments of torch functions, by a new view of them at each call.

    Gradients are the same; only, between a node that uses the weight and the weight, there is a node that belongs to
    this use.
    """

    def __init__(self, parameters: Collection[torch.nn.Parameter]) -> None:
        super().__init__()
        self._ids = {id(parameter) for parameter in parameters}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "__set__"):  # an attribute such as .grad is the weight's own
            return func(*args, **(kwargs or {}))
        named = {name: self._view(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._view, args), **named)

    def _view(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Parameter) and id(value) in self._ids:
            return value.view_as(value)
        if isinstance(value, tuple | list):
            return type(value)(map(self._view, value)) if any(id(item) in self._ids for item in value) else value
        return value
