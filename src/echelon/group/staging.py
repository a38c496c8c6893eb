"""Host staging of collectives on GPU tensors that the backend cannot move: copies to the host's memory and back.

By default such a tensor is an error. ECHELON_ENABLE_GPU_FALLBACK=1 allows the copies. Every such call logs a warning:
staging is slow, and a benchmark must not use it by accident.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from echelon.backends.host_copies import HostCopy
from echelon.backends.native import Call, NativeCollectives
from echelon.collectives.calls.operations import Operation
from echelon.collectives.calls.run import Channel
from echelon.errors import LaunchError, UnsupportedOp

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


def check_away(tensor: Tensor, what: str, backend: str, environ: Mapping[str, str] = os.environ) -> None:
    """Logs a warning that a call stages its tensor on the host. Raises if that is not allowed.

    Args:
        tensor: Tensor on a device that the backend cannot move.
        what: The collective.
        backend: Name of the backend.

    Raises:
        UnsupportedOp: host staging is not allowed.
        LaunchError: the variable is neither on nor off.
    """
    if not fallback_is_on(environ):
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


S = TypeVar("S")
T = TypeVar("T")


def here(tensor: Tensor, away: HostCopy | None) -> Tensor:
    """Returns the tensor itself, or its host copy, whose values may still be in flight."""
    return tensor if away is None else away.tensor


def in_place(
    operation: Operation[Tensor], tensor: Tensor, away: HostCopy | None, *, writes: bool = True
) -> Operation[Tensor]:
    """Wraps an operation on a host copy: waits for the copy, runs it, and copies the result back into `tensor`.

    Without `writes` the rank gets no result, and `tensor` is returned unchanged.
    """
    if away is None:
        return operation
    return _around(operation, away.wait, lambda found: away.copy_back(found, tensor) if writes else tensor)


def on_device(operation: Operation[T], away: HostCopy | None, out: Tensor | None = None) -> Operation[T]:
    """Wraps an operation on a host copy: waits for the copy, runs it, and copies the result to `out` or the device.

    A result for an `out` on the CPU stays on the host. A result that does not fit `out` goes to a new tensor.
    """
    if away is None:
        return operation

    def finish(found: T) -> T:
        if not isinstance(found, Tensor) or (out is not None and out.is_cpu):
            return found
        # A result that does not fit raises SizeMismatch later, in `write_out`.
        fits = out is not None and (out.shape, out.dtype) == (found.shape, found.dtype)
        return away.copy_back(found, out if fits else None)  # type: ignore[return-value]

    return _around(operation, away.wait, finish)


class Copies:
    """Tensors of one call, with host copies of the tensors that the backend cannot move."""

    def __init__(self, tensors: Sequence[Tensor], away: Mapping[int, HostCopy]) -> None:
        """Takes over the host copies of some tensors, by their index."""
        self._away = away
        self.tensors = [here(tensor, away.get(number)) for number, tensor in enumerate(tensors)]
        """The tensors, or their host copies, whose values may still be in flight."""

    def around(self, operation: Operation[S], finish: Callable[[S], T]) -> Operation[T]:
        """Wraps an operation: waits for the host copies, runs it, and maps its result."""
        return _around(operation, self._wait, finish)

    def copy_back(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Returns the results on the devices of the original tensors, as new tensors where a copy is needed."""
        return [
            self._away[number].copy_back(result, None) if number in self._away else result
            for number, result in enumerate(results)
        ]

    def copy_back_into(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies the values of the host copies back into the original tensors, and returns the tensors."""
        for number, landing in self._away.items():
            landing.copy_back(landing.tensor, tensors[number])
        return list(tensors)

    def _wait(self) -> None:
        for landing in self._away.values():
            landing.wait()


def _around(operation: Operation[S], before: Callable[[], object], after: Callable[[S], T]) -> Operation[T]:
    def act(channel: Channel) -> T:
        before()
        return after(operation.act(channel))

    def native(collectives: NativeCollectives, call: Call) -> T:
        before()
        return after(operation.native(collectives, call))

    return Operation(operation.note, act, native, operation.num_bytes)
