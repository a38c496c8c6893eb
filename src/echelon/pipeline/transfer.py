"""Nested values on their way between stages of different ranks.

A value travels as one message per tensor. The first carries the structure as its note (in a message of its own if it is
long), so nothing about shapes, dtypes or nesting is agreed beforehand, and a single tensor is a single message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from echelon.backends.base import Tag, Work
from echelon.backends.wire import MAX_NOTE_BYTES
from echelon.errors import PeerFailed, Timeout
from echelon.group import ProcessGroup
from echelon.pipeline.nested import Value, map_tensors, structure_of, tensors_of, value_of

_APART = "+"
"""The note that says: this message is the structure, the tensors follow."""
_PARTS = 1 << 8
_SEQUENCES = 1 << 63
"""Sequence numbers from here on are those of transfers; below are the collectives of the same group."""


class Route(NamedTuple):
    """What a transfer is: of which step, into which stage, for which microbatch, and in which direction."""

    step: int
    stage: int
    microbatch: int
    backward: bool

    def tag(self, context: int, part: int) -> Tag:
        """Returns the tag of one of its messages."""
        sequence = _SEQUENCES | (self.step & 0xFFFFFFFFFF) << 20 | self.stage << 1 | self.backward
        return Tag(context, sequence, self.microbatch * _PARTS + part)

    def __str__(self) -> str:
        what = "gradient" if self.backward else "input"
        return f"the {what} of microbatch {self.microbatch} for stage {self.stage}"


class Incoming:
    """A value that is expected. Posted early, so that it can arrive while this rank computes."""

    def __init__(self, group: ProcessGroup, src: int, route: Route) -> None:
        self._group = group
        self._src = group.ranks[src]
        self._route = route
        self._first = self._post(0, note=None)

    def wait(self) -> Value:
        """Returns the value; tensors that had required a gradient where they came from are leaves that require one.

        Raises:
            PeerFailed, Timeout: it will not come, or did not in time.
        """
        with named(self._group, f"waiting for {self._route}"):
            first = self._first.wait(self._group.timeout)
            rest = self._rest(self._first.note, first)
            structure = next(rest)
            return value_of(str(structure), lambda requires_grad: _leaf(next(rest), requires_grad))

    def _rest(self, note: str, first: torch.Tensor) -> Iterator[torch.Tensor | str]:
        """Yields the structure, then the tensors."""
        if note == _APART:
            yield bytes(first.numpy()).decode()
        else:
            yield note
            yield first
        for part in range(1, _PARTS):
            yield self._post(part, note="").wait(self._group.timeout)

    def _post(self, part: int, note: str | None) -> Work[torch.Tensor]:
        return self._group.backend.irecv(self._src, self._route.tag(self._group.context, part), note=note)


def start_transfer(group: ProcessGroup, dst: int, route: Route, value: Value) -> list[Work[None]]:
    """Starts to send a value to the rank of the stage it is for; its tensors must not change until all Works are
    done."""
    structure = structure_of(value)
    tensors = [tensor.detach().contiguous() for tensor in tensors_of(value)]
    if len(structure.encode()) > MAX_NOTE_BYTES or not tensors:
        head, tensors = torch.frombuffer(bytearray(structure.encode()), dtype=torch.uint8), [*tensors]
        parts = [(head, _APART), *((tensor, "") for tensor in tensors)]
    else:
        parts = [(tensor, "" if index else structure) for index, tensor in enumerate(tensors)]
    return [
        group.backend.isend(tensor, group.ranks[dst], route.tag(group.context, part), note=note)
        for part, (tensor, note) in enumerate(parts)
    ]


@contextmanager
def named(group: ProcessGroup, doing: str) -> Iterator[None]:
    """Adds to the errors of waiting what this rank was doing."""
    operation = f"rank {group.backend.rank}, {doing}"
    try:
        yield
    except PeerFailed as error:
        raise PeerFailed(error.rank, error.reason, error.operation or operation) from error
    except Timeout as error:
        raise Timeout(f"{operation}: {error}") from error


def detached(value: Value) -> Value:
    """Returns a value whose tensors share memory with the given ones, but are leaves of a graph of their own."""
    return map_tensors(lambda tensor: _leaf(tensor.detach(), tensor.requires_grad), value)


def _leaf(tensor: torch.Tensor | str, requires_grad: bool) -> torch.Tensor:
    assert isinstance(tensor, torch.Tensor)
    return tensor.requires_grad_() if requires_grad else tensor
