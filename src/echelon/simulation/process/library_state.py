"""State that torch and other libraries keep once per process, of which each simulated rank has its own."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from echelon.simulation.process.state import State


class DefaultDtype(State):
    """Default dtype of new floating-point tensors."""

    def __init__(self) -> None:
        self._outside = torch.get_default_dtype()

    def first(self, rank: int) -> torch.dtype:  # noqa: ARG002, D102
        return self._outside

    def take(self) -> torch.dtype:  # noqa: D102
        return torch.get_default_dtype()

    def put(self, state: torch.dtype) -> None:  # noqa: D102
        if state is not torch.get_default_dtype():
            torch.set_default_dtype(state)


class LibraryAttribute(NamedTuple):
    """Attribute in which a library keeps state for the whole process."""

    module: str
    """Module that has it, which a rank may import at any time."""
    path: str
    """Dotted name inside of the module."""
    first: Callable[[], Any]
    """Makes the value with which a rank begins."""


_NOTHING: Callable[[], Any] = lambda: None  # noqa: E731



def _handlers_of_dtensor() -> dict[Any, Any]:
    """Returns the handlers of operators with which torch begins: `loss_parallel` adds some for a while."""
    return type(torch.distributed.tensor.DTensor._op_dispatcher)()._custom_op_handlers


LIBRARY_ATTRIBUTES = (
    LibraryAttribute("torch.nn.parallel.distributed", "DistributedDataParallel._active_ddp_module", _NOTHING),
    LibraryAttribute("torch.distributed.fsdp._debug_utils", "SimpleProfiler.profiling", set),
    LibraryAttribute("torch.distributed.fsdp._debug_utils", "SimpleProfiler.results", lambda: defaultdict(float)),
    LibraryAttribute("torch.distributed.tensor", "DTensor._op_dispatcher._custom_op_handlers", _handlers_of_dtensor),
    LibraryAttribute("accelerate.state", "PartialState._shared_state", dict),
    LibraryAttribute("accelerate.state", "AcceleratorState._shared_state", dict),
    LibraryAttribute("accelerate.state", "GradientState._shared_state", dict),
)
"""Attributes that ranks would overwrite for each other."""


class LibraryState(State):
    """Attributes of libraries, as far as they are imported."""

    def __init__(self, attributes: Sequence[LibraryAttribute] = LIBRARY_ATTRIBUTES) -> None:
        self._attributes = attributes

    def first(self, rank: int) -> Mapping[LibraryAttribute, Any]:  # noqa: ARG002, D102
        return {}

    def take(self) -> Mapping[LibraryAttribute, Any]:  # noqa: D102
        found = {}
        for attribute in self._attributes:
            owner, name = _owner(attribute)
            if owner is not None and hasattr(owner, name):
                found[attribute] = getattr(owner, name)
        return found

    def put(self, state: Mapping[LibraryAttribute, Any]) -> None:  # noqa: D102
        for attribute in self._attributes:
            owner, name = _owner(attribute)
            if owner is not None and hasattr(owner, name):
                setattr(owner, name, state[attribute] if attribute in state else attribute.first())


def _owner(attribute: LibraryAttribute) -> tuple[object | None, str]:
    """Returns the object that has the attribute, and the attribute's name. None if its module is not imported."""
    *parts, name = attribute.path.split(".")
    owner: object | None = sys.modules.get(attribute.module)
    for part in parts:
        owner = getattr(owner, part, None)
    return owner, name
