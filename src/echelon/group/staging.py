"""Admission of the tensors of a collective, and host staging of GPU tensors that the backend cannot move.

By default such a tensor is an error. ECHELON_ENABLE_GPU_FALLBACK=1 allows the copies. Every such call logs a warning:
staging is slow, and a benchmark must not use it by accident.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from torch import Tensor

from echelon.arguments import named
from echelon.backends.admission import check_values
from echelon.backends.base import Backend
from echelon.backends.host_copies import HostCopy
from echelon.backends.memory import check_dense, check_writable, plain, wrong_device
from echelon.backends.modes import normal_mode, outside_autograd, overwrite
from echelon.errors import InvalidArgument, LaunchError, UnsupportedOp

logger = logging.getLogger("echelon")

VARIABLE = "ECHELON_ENABLE_GPU_FALLBACK"
ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "off", "")


def fallback_is_on(environ: Mapping[str, str]) -> bool:
    """Whether host staging is allowed.

    Raises:
        LaunchError: the variable is neither on nor off.
    """
    text = environ.get(VARIABLE, "").strip().lower()
    if text not in (*ON, *OFF):
        raise LaunchError(
            f"{VARIABLE}={environ[VARIABLE]!r}: use one of {', '.join(ON)} to turn it on, or one of "
            f"{', '.join(filter(None, OFF))} or nothing to turn it off"
        )
    return text in ON


def check_fallback(tensor: Tensor, what: str, backend: str) -> None:
    """Logs a warning that a call stages its tensor on the host. Raises if that is not allowed.

    Args:
        tensor: Tensor on a device that the backend cannot move.
        what: The collective.
        backend: Name of the backend.

    Raises:
        UnsupportedOp: host staging is not allowed.
        LaunchError: the variable is neither on nor off.
    """
    if not fallback_is_on(os.environ):
        raise UnsupportedOp(
            f'{what}: a tensor on {tensor.device}, for which backend={backend!r} has no path: use backend="nccl", or '
            f"set {VARIABLE}=1 to go through the host's memory, which is slow"
        )
    logger.warning(
        "%s: a tensor on %s goes through the host's memory, since backend=%r has no path for it; to make that an "
        'error set %s=0, to have a path use backend="nccl"',
        what,
        tensor.device,
        backend,
        VARIABLE,
    )


class Around(NamedTuple):
    """Steps around a collective, in the thread that runs it."""

    before: Callable[[], object]
    """Called first, such as to wait for a copy on the host."""
    after: Callable[[Any], Any]
    """Maps the result."""


_OF_ROWS = frozenset({"all_gather", "gather", "all_to_all"})


def admit(
    backend: Backend, kind: str, tensor: Tensor | None, out: Tensor | None, *, writes: bool
) -> tuple[Tensor | None, Around | None]:
    """Checks the tensors of a collective.

    Args:
        backend: Backend of the group.
        kind: The collective.
        tensor: This rank's tensor.
        out: The user's place for the result.
        writes: Whether the collective overwrites `tensor`.

    Returns:
        The tensor for the executor: ordinary, and on a device that the backend can move. Steps around the collective,
        if there are any.

    Raises:
        UnsupportedOp: a tensor cannot be moved, or not be written.
        LaunchError: as `check_fallback`.
    """
    if tensor is None and kind in ("scatter", "barrier"):
        if out is not None:
            check_out(backend, out, kind)
        return None, None
    # Raises for None too.
    is_here = check_dense(cast("Tensor", tensor), backend.devices, kind)
    assert tensor is not None
    if writes:
        check_writable(tensor, kind)
    if out is not None:
        check_out(backend, out, kind)
    if not is_here:
        return _staged(to_host(backend, tensor, kind), kind, tensor, out, writes)
    # The memory of a lazy conjugate or negative does not hold the values.
    with normal_mode():
        values = plain(tensor) if tensor.is_conj() or tensor.is_neg() else outside_autograd(tensor)
    if kind in IN_PLACE and values is not tensor:
        return values, Around(nothing, lambda result: _written_back(tensor, result, writes))
    return values.reshape(1) if kind in _OF_ROWS and not values.dim() else values, None


IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast"})
"""Collectives that return their tensor."""


def _written_back(tensor: Tensor, result: Tensor, writes: bool) -> Tensor:
    if writes and (result.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg()):
        overwrite(tensor, result)
    return tensor


def _staged(copy: HostCopy, kind: str, tensor: Tensor, out: Tensor | None, writes: bool) -> tuple[Tensor, Around]:
    def after(found: Any) -> Any:
        if kind in IN_PLACE:
            return copy.copy_back(found, tensor) if writes else tensor
        # A result for an `out` on the CPU stays on the host.
        if not isinstance(found, Tensor) or (out is not None and out.is_cpu):
            return found
        # A result that does not fit goes to a new tensor, and raises SizeMismatch later.
        fits = out is not None and (out.shape, out.dtype) == (found.shape, found.dtype)
        return copy.copy_back(found, out if fits else None)

    values = copy.tensor
    return values.reshape(1) if kind in _OF_ROWS and not values.dim() else values, Around(copy.wait, after)


def to_host(backend: Backend, tensor: Tensor, what: str, *, number: int | None = None, warns: bool = True) -> HostCopy:
    """Starts to copy a tensor of a device that the backend cannot move to the host.

    Args:
        backend: Backend of the group.
        tensor: The tensor.
        what: The collective.
        number: Which one of several it is.
        warns: Whether to log a warning; once for a call is enough.

    Raises:
        UnsupportedOp: such a device has no copies, or they are not allowed.
        LaunchError: as `check_fallback`.
    """
    if not backend.host_copies.handles(tensor):
        raise wrong_device(tensor, backend.devices, what if number is None else f"{what}, tensor {number}")
    if warns:
        check_fallback(tensor, what, backend.name)
    return backend.host_copies.to_host(tensor)


def check_out(backend: Backend, out: object, what: str) -> None:
    """Raises InvalidArgument or UnsupportedOp if no result can be written into `out`."""
    # The shape of the result may be known only after the collective, so it is compared then.
    if not isinstance(out, Tensor):
        raise InvalidArgument(f"out is {named(out)}: pass one tensor for the whole result, or leave it out")
    check_values(out, f"{what}(out=)", takes_meta=True)
    if out.is_meta and not backend.host_copies.handles(out):
        raise wrong_device(out, backend.devices, f"{what}(out=)")
    check_writable(out, f"{what}(out=)")


def nothing() -> None:
    """Step before a collective that has nothing to wait for."""
