"""State that torch and other libraries keep once per process, of which each simulated rank has its own."""

from __future__ import annotations

import copy
import functools
import os
import socket
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from echelon._torch_private.modules import hooks_of_all_modules, print_options
from echelon.simulation.process.environment import Attribute
from echelon.simulation.process.state import State


class Setting(NamedTuple):
    """Setting of torch or Python for the whole process, by its two functions."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


_Invariants: Any = torch.sparse.check_sparse_tensor_invariants
# Its settings are made by a class that has no types.
_deterministic: Any = torch.utils.deterministic


def _matmul_precision() -> str | None:
    """Returns the precision of matrix products. None if the program has set that of a backend, which torch refuses."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _cudnn_allows_tf32() -> bool | None:
    """Whether cuDNN may compute float32 by TF32. None as above."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return None


def _allow_cudnn_tf32(value: bool | None) -> None:
    if value is not None:
        torch.backends.cudnn.allow_tf32 = value


SETTINGS = (
    Setting(torch.get_default_dtype, torch.set_default_dtype),
    Setting(
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    Setting(_matmul_precision, _set_matmul_precision),
    Setting(_cudnn_allows_tf32, _allow_cudnn_tf32),
    Setting(torch.is_warn_always_enabled, torch.set_warn_always),
    Setting(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    Setting(torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    Setting(torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    Setting(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    Setting(lambda: torch.backends.cudnn.enabled, partial(setattr, torch.backends.cudnn, "enabled")),
    Setting(lambda: torch.backends.cudnn.benchmark, partial(setattr, torch.backends.cudnn, "benchmark")),
    Setting(lambda: torch.backends.cudnn.deterministic, partial(setattr, torch.backends.cudnn, "deterministic")),
    Setting(_Invariants.is_enabled, lambda value: _Invariants.enable() if value else _Invariants.disable()),
    Setting(
        torch.__future__.get_swap_module_params_on_conversion, torch.__future__.set_swap_module_params_on_conversion
    ),
    Setting(
        torch.__future__.get_overwrite_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    ),
    Setting(torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
    Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    Setting(socket.getdefaulttimeout, socket.setdefaulttimeout),
)
"""Settings that ranks would overwrite for each other. Grad mode and autocast belong to threads already."""


def _attribute(owner: Any, name: str) -> Setting:
    return Setting(lambda: getattr(owner, name), partial(setattr, owner, name))


SHARED_SETTINGS: Mapping[str, Setting] = {
    "torch.backends.mkldnn.enabled": _attribute(torch.backends.mkldnn, "enabled"),
    "torch.backends.mkldnn.deterministic": _attribute(torch.backends.mkldnn, "deterministic"),
    "torch.backends.quantized.engine": _attribute(torch.backends.quantized, "engine"),
    "torch.utils.deterministic.fill_uninitialized_memory": _attribute(_deterministic, "fill_uninitialized_memory"),
}
"""Settings that ranks share, and that are as before after a simulation. To read one takes up to 3 us."""


class Settings(State):
    """Settings of torch and Python."""

    def __init__(self) -> None:
        self._shared = {name: setting.get() for name, setting in SHARED_SETTINGS.items()}
        self.notes: list[str] = []

    def take(self) -> list[Any]:  # noqa: D102
        return [setting.get() for setting in SETTINGS]

    def finish(self, states: Sequence[Any]) -> None:  # noqa: ARG002
        """Notes each shared setting that the program has changed, and sets it as it was."""
        for name, before in self._shared.items():
            setting = SHARED_SETTINGS[name]
            if (last := setting.get()) != before:
                setting.set(before)
                self.notes.append(
                    f"{name} was set to {last!r}: unlike processes, simulated ranks share it, so each rank had what "
                    "the last one set"
                )

    def put(self, state: Sequence[Any]) -> None:  # noqa: D102
        for setting, value in zip(SETTINGS, state, strict=True):
            # Setting deterministic algorithms takes 0.7 ms, and reading them 0.3 us.
            if setting.get() != value:
                setting.set(value)


def shared_collections() -> list[Attribute]:
    """Returns lists and other objects of the process that programs change, of which each rank begins with a copy."""

    def of(owner: Any, name: str) -> Attribute:
        outside = getattr(owner, name)
        return Attribute(owner, name, lambda _: copy.copy(outside))

    hooks = hooks_of_all_modules()
    found = [of(torch.nn.modules.module, name) for name in hooks]
    return [of(sys, "argv"), of(warnings, "filters"), of(*print_options()), *found]


class LibraryAttribute(NamedTuple):
    """Attribute in which a library keeps state for the whole process."""

    module: str
    """Module that has it, which a rank may import at any time."""
    path: str
    """Dotted name inside of the module."""
    first: Callable[[], Any]
    """Makes the value with which a rank begins."""


_NOTHING: Callable[[], Any] = lambda: None  # noqa: E731


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _handlers_of_dtensor() -> dict[Any, Any]:
    """Returns the handlers of operators with which torch begins: `loss_parallel` adds some for a while."""
    return dict(_first_handlers())


# Once: each new dispatcher would leave some kilobytes behind.
@functools.cache
def _first_handlers() -> Mapping[Any, Any]:
    return type(torch.distributed.tensor.DTensor._op_dispatcher)()._custom_op_handlers


def _plans_of_redistribution() -> Callable[..., Any]:
    """Returns a cache of DTensor's plans. torch keeps a plan under the mesh, but it has the place of a rank in it."""
    return functools.cache(_make_plans())


@functools.cache
def _make_plans() -> Callable[..., Any]:
    return torch.distributed.tensor._redistribute._gen_transform_infos.__wrapped__


_CACHES_OF_PLANNERS = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)

LIBRARY_ATTRIBUTES = (
    LibraryAttribute("torch.nn.parallel.distributed", "DistributedDataParallel._active_ddp_module", _NOTHING),
    LibraryAttribute("torch.distributed.fsdp._debug_utils", "SimpleProfiler.profiling", set),
    LibraryAttribute("torch.distributed.fsdp._debug_utils", "SimpleProfiler.results", lambda: defaultdict(float)),
    LibraryAttribute("torch.distributed.tensor", "DTensor._op_dispatcher._custom_op_handlers", _handlers_of_dtensor),
    LibraryAttribute("torch.distributed.tensor._redistribute", "_gen_transform_infos", _plans_of_redistribution),
    LibraryAttribute("torch.distributed.tensor._redistribute", "_planner_cache", dict),
    *(
        LibraryAttribute("torch.distributed.checkpoint.planner", f"SavePlanner.{name}", dict)
        for name in _CACHES_OF_PLANNERS
    ),
    LibraryAttribute("torch.nn.utils.parametrize", "_cache_enabled", int),
    LibraryAttribute("torch.nn.utils.parametrize", "_cache", dict),
    LibraryAttribute("torch.utils._device", "CURRENT_DEVICE", _NOTHING),
    LibraryAttribute("torch.utils.checkpoint", "_enable_checkpoint_early_stop", _NOTHING),
    LibraryAttribute("lightning_utilities.core.rank_zero", "rank_zero_only.rank", _rank),
    LibraryAttribute("accelerate.state", "PartialState._shared_state", dict),
    LibraryAttribute("accelerate.state", "AcceleratorState._shared_state", dict),
    LibraryAttribute("accelerate.state", "GradientState._shared_state", dict),
)
"""Attributes that ranks would overwrite for each other."""


class LibraryState(State):
    """Attributes of libraries, as far as they are imported."""

    def __init__(self, attributes: Sequence[LibraryAttribute] = LIBRARY_ATTRIBUTES) -> None:
        self._attributes = [
            (attribute, sys.intern(attribute.module), *_parts(attribute.path)) for attribute in attributes
        ]

    def first(self, rank: int) -> list[Any]:  # noqa: ARG002, D102
        return [_MISSING] * len(self._attributes)

    def take(self) -> list[Any]:  # noqa: D102
        return [getattr(_owner(module, owners), name, _MISSING) for _, module, owners, name in self._attributes]

    def put(self, state: Sequence[Any]) -> None:  # noqa: D102
        for (attribute, module, owners, name), value in zip(self._attributes, state, strict=True):
            owner = _owner(module, owners)
            present = getattr(owner, name, _MISSING)
            # Only where it differs: an attribute of a class is slow to set.
            if present is not value and present is not _MISSING:
                setattr(owner, name, attribute.first() if value is _MISSING else value)


_MISSING: Any = object()
"""Value of an attribute whose module was not imported."""


@functools.cache
def _parts(path: str) -> tuple[tuple[str, ...], str]:
    """Returns the names in a dotted name: all but the last, and the last.

    Always the same texts: Python keeps each text that names an attribute.
    """
    *owners, name = (sys.intern(part) for part in path.split("."))
    return tuple(owners), name


def _owner(module: str, owners: tuple[str, ...]) -> object | None:
    """Returns the object that has an attribute. None if its module is not imported."""
    owner: object | None = sys.modules.get(module)
    for name in owners:
        owner = getattr(owner, name, None)
    return owner
