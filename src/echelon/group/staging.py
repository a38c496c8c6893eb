"""Collectives on tensors of a device that the backend has no path for: copied to the host's memory, and back."""

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

# What happens to a tensor of a GPU where the backend has no path for it: an error, unless the user allows more.
#
# ECHELON_ENABLE_GPU_FALLBACK=1 allows the way through the host's memory, with a warning at every call: it is slow, and
# whoever measures should know.

logger = logging.getLogger("echelon")

VARIABLE = "ECHELON_ENABLE_GPU_FALLBACK"
ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "off", "")


def fallback_is_on(environ: Mapping[str, str]) -> bool:
    """Says whether the way through the host's memory is allowed.

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
    """Warns that a call takes the way through the host's memory, if that is allowed.

    Args:
        tensor: on a device that the backend cannot handle.
        what: the collective.
        backend: its name.

    Raises:
        UnsupportedOp: it is not allowed.
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
    """Returns what to work on: the tensor itself, or its copy, whose values are not there yet."""
    return tensor if away is None else away.tensor


def in_place(
    operation: Operation[Tensor], tensor: Tensor, away: HostCopy | None, *, writes: bool = True
) -> Operation[Tensor]:
    """Returns what does an operation on a copy, and then has the result in `tensor`, where this rank gets one."""
    if away is None:
        return operation
    return _around(operation, away.wait, lambda found: away.copy_back(found, tensor) if writes else tensor)


def on_device(operation: Operation[T], away: HostCopy | None, out: Tensor | None = None) -> Operation[T]:
    """Returns what does an operation on a copy, and then has the result, where there is one, in `out` or on the device.

    What does not fit `out`, or belongs to the host all the same, is returned as it is.
    """
    if away is None:
        return operation

    def finish(found: T) -> T:
        if not isinstance(found, Tensor) or (out is not None and out.is_cpu):
            return found
        fits = out is not None and (out.shape, out.dtype) == (found.shape, found.dtype)
        return away.copy_back(found, out if fits else None)  # type: ignore[return-value]

    return _around(operation, away.wait, finish)


class Copies:
    """The tensors of one call, those of other devices as copies in the host's memory."""

    def __init__(self, tensors: Sequence[Tensor], away: Mapping[int, HostCopy]) -> None:
        """Takes over the copies of some of the tensors, by their place in the list."""
        self._away = away
        self.tensors = [here(tensor, away.get(number)) for number, tensor in enumerate(tensors)]
        """What to work on; a copy's values are not there yet."""

    def around(self, operation: Operation[S], finish: Callable[[S], T]) -> Operation[T]:
        """Returns what does an operation once all copies are there, and makes a result of that one's."""
        return _around(operation, self._wait, finish)

    def copy_back(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Returns new results, one for each tensor, on the devices of these."""
        return [
            self._away[number].copy_back(result, None) if number in self._away else result
            for number, result in enumerate(results)
        ]

    def copy_back_into(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Has the values of the copies in the tensors that they were made of, and returns these."""
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
