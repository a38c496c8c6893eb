"""Nested values on their way between stages of different ranks.

A value is one message per tensor. The first time, nothing about shapes, dtypes or nesting is agreed beforehand: the
note of the first message is the structure, shapes and dtypes travel along. Both ends remember what it looked like. As
long as the same microbatch looks the same in the next step, its receives are posted with their memory, and messages say
no more than that all is as before; when it does not, a message in their place says so, and what follows is sent as the
first time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from echelon.backends.base import Tag, Work
from echelon.backends.wire import MAX_NOTE_BYTES
from echelon.errors import CollectiveMismatch, PeerFailed, Timeout, UnsupportedOp
from echelon.group import ProcessGroup
from echelon.pipeline.buffers import Buffers
from echelon.pipeline.lowering import Transfer
from echelon.pipeline.nested import Value, map_tensors, structure_of, tensors_of, value_of

_AS_BEFORE = "="
"""The note that says: a tensor of the same shape and dtype, in the same place of the same structure."""
_OTHERWISE = "!"
"""The note that says: not as before, see the messages of the first time."""
_APART = "+"
"""The note that says: this message is the structure, the tensors follow."""
_PARTS = 1 << 10
_ANEW = _PARTS // 2
"""The number of the first message, of those sent as the first time."""
_SEQUENCES = 1 << 63
"""Sequence numbers from here on are those of transfers; below are the collectives of the same group."""


class _Spec(NamedTuple):
    """What a tensor looks like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class _Layout(NamedTuple):
    """What a value looks like."""

    structure: str
    specs: tuple[_Spec, ...]


class Ports:
    """This rank's end of all transfers of one program."""

    def __init__(self, group: ProcessGroup, buffers: Buffers) -> None:
        """Makes the ends.

        Args:
            group: the ranks of the pipeline.
            buffers: for what arrives.
        """
        self._group = group
        self._buffers = buffers
        self._sent: dict[Transfer, _Layout] = {}
        self._received: dict[Transfer, _Layout] = {}

    def post(self, step: int, transfer: Transfer, peer: int) -> Incoming:
        """Returns a value that will arrive from rank `peer` in step number `step`."""
        return Incoming(self._group, self._group.ranks[peer], step, transfer, self._received, self._buffers)

    def send(self, step: int, transfer: Transfer, peer: int, value: Value) -> list[Work[None]]:
        """Starts to send a value to rank `peer`; its tensors must not change until all Works are done.

        Raises:
            UnsupportedOp: it has more than 511 tensors, or is no nested value.
        """
        tensors = [tensor.detach().contiguous() for tensor in tensors_of(value)]
        layout = _Layout(structure_of(value), tuple(_Spec(t.shape, t.dtype, t.device) for t in tensors))
        before = self._sent.get(transfer)
        self._sent[transfer] = layout
        if layout == before:
            messages = [(part, tensor, _AS_BEFORE) for part, tensor in enumerate(tensors or [_nothing()])]
        else:
            messages = [] if before is None else [(0, _nothing(), _OTHERWISE)]
            messages += _anew(layout, tensors)
        backend, dst = self._group.backend, self._group.ranks[peer]
        return [
            backend.isend(tensor, dst, _tag(self._group, step, transfer, part), note=note)
            for part, tensor, note in messages
        ]


class Incoming:
    """A value that is expected. Posted early, so that it can arrive while this rank computes."""

    def __init__(
        self,
        group: ProcessGroup,
        src: int,
        step: int,
        transfer: Transfer,
        known: dict[Transfer, _Layout],
        buffers: Buffers,
    ) -> None:
        self._group = group
        self._src = src
        self._step = step
        self._transfer = transfer
        self._known = known
        self._layout = known.get(transfer)
        self._works: list[Work[torch.Tensor]] = []
        if self._layout is None:
            self._works.append(self._post(_ANEW, note=None))
        for part, spec in enumerate(self._layout.specs if self._layout is not None else ()):
            self._works.append(self._post(part, _AS_BEFORE, buffers.take(*spec)))
        if self._layout is not None and not self._layout.specs:
            self._works.append(self._post(0, _AS_BEFORE))

    def wait(self) -> Value:
        """Returns the value; tensors that had required a gradient where they came from are leaves that require one.

        Raises:
            PeerFailed, Timeout: it will not come, or did not in time.
        """
        with _named(self._group, self._transfer):
            layout, works = self._layout, self._works
            if layout is not None and not self._is_otherwise():
                tensors = iter([work.wait(self._group.timeout) for work in works])
                return value_of(layout.structure, lambda requires_grad: _leaf(next(tensors), requires_grad))
            first = works[0] if layout is None else self._post(_ANEW, note=None)
            structure, fresh = self._anew(first)
            self._known[self._transfer] = _Layout(structure, tuple(_Spec(t.shape, t.dtype, t.device) for t in fresh))
            rest = iter(fresh)
            return value_of(structure, lambda requires_grad: _leaf(next(rest), requires_grad))

    def _is_otherwise(self) -> bool:
        """Says whether the value does not look as before; takes the other receives back then."""
        try:
            self._works[0].wait(self._group.timeout)
        except CollectiveMismatch:
            for work in self._works[1:]:
                self._group.backend.cancel(work)
            return True
        return False

    def _anew(self, first: Work[torch.Tensor]) -> tuple[str, list[torch.Tensor]]:
        """Returns the structure and the tensors of a value that is sent as the first time."""
        head = first.wait(self._group.timeout)
        apart = first.note == _APART
        structure = bytes(head.numpy()).decode() if apart else first.note
        tensors = [] if apart else [head]
        missing = _num_tensors(structure) - len(tensors)
        works = [self._post(_ANEW + 1 + number, note="") for number in range(missing)]
        return structure, tensors + [work.wait(self._group.timeout) for work in works]

    def _post(self, part: int, note: str | None, out: torch.Tensor | None = None) -> Work[torch.Tensor]:
        tag = _tag(self._group, self._step, self._transfer, part)
        return self._group.backend.irecv(self._src, tag, out=out, note=note)


def detached(value: Value) -> Value:
    """Returns a value whose tensors share memory with the given ones, but are leaves of a graph of their own."""
    return map_tensors(lambda tensor: _leaf(tensor, tensor.requires_grad), value)


def _anew(layout: _Layout, tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor, str]]:
    """Returns number, tensor and note of the messages that say all."""
    if len(tensors) >= _ANEW:
        raise UnsupportedOp(f"{len(tensors)} tensors pass between two stages: at most {_ANEW - 1} can; stack some")
    encoded = layout.structure.encode()
    if tensors and len(encoded) <= MAX_NOTE_BYTES:
        notes = [layout.structure, *("" for _ in tensors[1:])]
        return [(_ANEW + part, tensor, note) for part, (tensor, note) in enumerate(zip(tensors, notes, strict=True))]
    head = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    rest = [(_ANEW + 1 + part, tensor, "") for part, tensor in enumerate(tensors)]
    return [(_ANEW, head, _APART), *rest]


def _num_tensors(structure: str) -> int:
    count = 0

    def one(_: bool) -> torch.Tensor:
        nonlocal count
        count += 1
        return torch.empty(0)

    value_of(structure, one)
    return count


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _tag(group: ProcessGroup, step: int, transfer: Transfer, part: int) -> Tag:
    sequence = _SEQUENCES | (step & 0xFFFFFFFFFF) << 20 | transfer.stage << 1 | transfer.backward
    return Tag(group.context, sequence, transfer.microbatch * _PARTS + part)


@contextmanager
def _named(group: ProcessGroup, transfer: Transfer) -> Iterator[None]:
    """Adds to the errors of waiting what this rank was doing."""
    try:
        yield
    except (PeerFailed, Timeout) as error:
        what = "gradient" if transfer.backward else "input"
        where = f"the {what} of microbatch {transfer.microbatch} for stage {transfer.stage}"
        operation = f"rank {group.backend.rank}, waiting for {where}"
        if isinstance(error, PeerFailed):
            raise PeerFailed(error.rank, error.reason, error.operation or operation) from error
        raise Timeout(f"{operation}: {error}") from error


def _leaf(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if requires_grad else leaf
