"""Collectives on tensors of a device that the backend has no path for: copied to the host's memory, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from echelon.backends.host_copies import Landing
from echelon.backends.native import Call, NativeCollectives
from echelon.collectives.operations import Operation
from echelon.collectives.run import Channel

S = TypeVar("S")
T = TypeVar("T")


def here(tensor: Tensor, away: Landing | None) -> Tensor:
    """Returns what to work on: the tensor itself, or its copy, whose values are not there yet."""
    return tensor if away is None else away.tensor


def in_place(
    operation: Operation[Tensor], tensor: Tensor, away: Landing | None, *, writes: bool = True
) -> Operation[Tensor]:
    """Returns what does an operation on a copy, and then has the result in `tensor`, where this rank gets one."""
    if away is None:
        return operation
    return _around(operation, away.wait, lambda found: away.take_back(found, tensor) if writes else tensor)


def on_device(operation: Operation[T], away: Landing | None, out: Tensor | None = None) -> Operation[T]:
    """Returns what does an operation on a copy, and then has the result, where there is one, in `out` or on the device.

    What does not fit `out`, or belongs to the host all the same, is returned as it is.
    """
    if away is None:
        return operation

    def finish(found: T) -> T:
        if not isinstance(found, Tensor) or (out is not None and out.is_cpu):
            return found
        fits = out is not None and (out.shape, out.dtype) == (found.shape, found.dtype)
        return away.take_back(found, out if fits else None)  # type: ignore[return-value]

    return _around(operation, away.wait, finish)


class Copies:
    """The tensors of one call, those of other devices as copies in the host's memory."""

    def __init__(self, tensors: Sequence[Tensor], away: Mapping[int, Landing]) -> None:
        """Takes over the copies of some of the tensors, by their place in the list."""
        self._away = away
        self.tensors = [here(tensor, away.get(number)) for number, tensor in enumerate(tensors)]
        """What to work on; a copy's values are not there yet."""

    def around(self, operation: Operation[S], finish: Callable[[S], T]) -> Operation[T]:
        """Returns what does an operation once all copies are there, and makes a result of that one's."""
        return _around(operation, self._wait, finish)

    def take_back(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Returns new results, one for each tensor, on the devices of these."""
        return [
            self._away[number].take_back(result, None) if number in self._away else result
            for number, result in enumerate(results)
        ]

    def take_back_into(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Has the values of the copies in the tensors that they were made of, and returns these."""
        for number, landing in self._away.items():
            landing.take_back(landing.tensor, tensors[number])
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
