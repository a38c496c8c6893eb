"""Copies of one rank between the host and its GPU, and pinned memory.

For torch all recorded tensors are on the CPU, so a move returns the same tensor. Here it becomes a clone that the
recorder writes as a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from echelon._torch_private.tensors import FakeTensor, local_part, without_functions
from echelon.foresight.record.log.callers import LOADING
from echelon.foresight.record.log.log import Log
from echelon.foresight.record.log.memory import Memory
from echelon.foresight.trace import Copy, HostKernel, HostWait, Kernel

COPIES = frozenset({"copy_", "_foreach_copy_"})
"""Operators that copy between devices."""


class Move(NamedTuple):
    """Move of a tensor that is under way."""

    place: int | None
    """Line that moves it to the host. None: it goes to the GPU."""
    from_host: bool
    is_pinned: bool
    """Whether the memory of the host, at either end, is pinned."""
    waits: bool
    """Whether the host waits for its end."""

    @property
    def pins(self) -> bool:
        """Whether it stays on the host, and goes into pinned memory."""
        return self.from_host and self.place is not None


class Copies:
    """Moves of one rank's tensors."""

    def __init__(self, log: Log, memory: Memory) -> None:
        self.move: Move | None = None
        """Move for which a tensor is cloned now."""
        self._log = log
        self._memory = memory

    # Moves by functions of torch

    def to_gpu(self, tensor: Tensor, non_blocking: bool) -> Tensor:
        """Returns a copy on the GPU of a tensor on the host."""
        is_pinned = self._memory.is_pinned(self._memory.number_inside(tensor))
        return self._moved(tensor, Move(None, True, is_pinned, not (non_blocking and is_pinned)))

    def to_host(self, tensor: Tensor, non_blocking: bool) -> Tensor:
        """Returns a copy on the host of a tensor on the GPU. A tensor on the host is returned as it is."""
        number = self._memory.number_inside(tensor)
        if number is None or number in self._memory.on_host:
            self._memory.fix(number)
            return tensor
        # torch pins the memory if the host does not wait.
        return self._moved(tensor, Move(self._log.place(), False, non_blocking, not non_blocking))

    def pinned(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a tensor of the host in pinned memory, or the tensor itself if it is pinned."""
        with without_functions():
            local = local_part(tensor)
            if not isinstance(local, FakeTensor):
                return tensor
            number = self._memory.number(local)
        if self._memory.is_pinned(number):
            return tensor
        place = self._log.place()
        # torch pins no tensor of a GPU. So this one is on the host, also if a library has made it.
        with without_functions():
            self._memory.leave_gpu(local, place)
        self._memory.fix(number)
        return self._moved(tensor, Move(place, True, True, False))

    def loaded(self, tensor: object) -> None:
        """Notes that a loader has made a tensor in pinned memory."""
        if not isinstance(tensor, FakeTensor):
            return
        place = self._log.place()
        with without_functions():
            if self._memory.known(tensor) not in self._memory.on_gpu:
                self._memory.leave_gpu(tensor, place)
                self._memory.fix(self._memory.known(tensor), is_pinned=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in pinned memory."""
        return self._memory.is_pinned(self._memory.number_inside(tensor))

    def _moved(self, tensor: Tensor, move: Move) -> Tensor:
        with self._moving(move):
            out = tensor.clone()
        if out.requires_grad and not out.is_leaf and not move.pins:
            # autograd moves the gradient back.
            out.register_hook(partial(self._returned, move.from_host))  # type: ignore[no-untyped-call]
        return out

    def _returned(self, to_host: bool, gradient: Tensor) -> Tensor:
        """Returns a gradient on the host, or on the GPU."""
        if (self._memory.number_inside(gradient) in self._memory.on_host) == to_host:
            return gradient
        return self.to_host(gradient, False) if to_host else self.to_gpu(gradient, False)

    @contextmanager
    def _moving(self, move: Move) -> Iterator[None]:
        self.move = move
        try:
            yield
        finally:
            self.move = None

    # Entries

    def write(self, move: Move, tensor: Tensor, out: Tensor) -> None:
        """Writes the entry of a tensor that was cloned for a move, into `out`."""
        number = self._memory.number(out)
        if move.place is not None:
            self._memory.fix(number, move.is_pinned)
        else:
            self._memory.on_gpu.add(number)
        if move.pins:
            self.computed("pin_memory", [tensor], 2 * out.nbytes, 1)
        else:
            self._copied([tensor], out.nbytes, to_gpu=move.from_host, waits=move.waits)

    def write_copies(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Writes the entries of an operator that copies tensors into others. Returns whether one of them is moved."""
        targets, sources = args[:2]
        # As `copy_` and `_foreach_copy_` have it.
        non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        if isinstance(targets, Tensor):
            targets, sources = [targets], [sources]
        pairs = list(zip(targets, sources, strict=True))
        directions = [self._direction(target, source) for target, source in pairs]
        if all(each is None for each in directions):
            return False
        for (target, source), to_gpu in zip(pairs, directions, strict=True):
            if to_gpu is None:  # of a list: it stays where it is, which takes much less time
                continue
            is_pinned = self._memory.is_pinned(self._memory.number(source if to_gpu else target))
            self._copy_into(target, source, to_gpu, non_blocking, waits=not (non_blocking and is_pinned))
        return True

    def _copy_into(self, target: Tensor, source: Tensor, to_gpu: bool, non_blocking: bool, *, waits: bool) -> None:
        """Writes a copy into a tensor of another device. The type changes as in `_parts_of_move` of `device`."""
        if target.dtype == source.dtype:
            self._copied([source], target.nbytes, to_gpu=to_gpu, waits=waits)
            return
        num_bytes = {True: target.numel() * source.element_size(), False: target.nbytes}
        is_of_source = to_gpu == non_blocking
        changes = partial(self._changed_type, target, source, sum(num_bytes.values()), on_gpu=non_blocking)
        if not is_of_source:
            changes()
        self._copied([source], num_bytes[is_of_source], to_gpu=to_gpu, waits=waits)
        if is_of_source:
            changes()

    def _changed_type(self, target: Tensor, source: Tensor, num_bytes: int, *, on_gpu: bool) -> None:
        """Writes the conversion of one end of a copy to the type of the other one."""
        log = self._log
        if not on_gpu:
            self.computed("copy_", [source], num_bytes, 1)
            return
        phase, place, module = log.where([source])
        end = self._memory.number(target)
        accesses = ((end, num_bytes - target.nbytes),), ((end, target.nbytes),)
        name = str(target.dtype).removeprefix("torch.")
        log.entries.append(Kernel(log.stream, "copy_", "other", 0, name, (), *accesses, 1, phase, place, module))

    def _direction(self, target: Tensor, source: Tensor) -> bool | None:
        """Returns whether a copy goes to the GPU. None if it is none between the host and the GPU."""
        ends = [self._memory.number(each) for each in (target, source)]
        on_host = [each in self._memory.on_host for each in ends]
        if on_host[0] == on_host[1]:
            return None
        host, other = ends if on_host[0] else reversed(ends)
        # A tensor of an unknown device may be on the host as well, as the one of a library.
        return on_host[1] if self._memory.is_fixed(host) or other in self._memory.on_gpu else None

    def _copied(self, inputs: Sequence[Tensor], num_bytes: int, *, to_gpu: bool, waits: bool) -> None:
        log = self._log
        phase, place, module = log.where(inputs)
        log.entries.append(Copy(log.stream, to_gpu, num_bytes, phase, place, module))
        if waits:
            log.entries.append(HostWait(log.stream, -1, place))

    def computed(self, name: str, inputs: Sequence[Tensor], num_bytes: int, launches: int) -> None:
        """Writes an operator on tensors of the host. Loaders of data work beside the program, and are left out."""
        if _is_loading():
            return
        phase, place, module = self._log.where(inputs)
        self._log.entries.append(HostKernel(name, num_bytes, launches, phase, place, module))


def _is_loading() -> bool:
    """Whether a loader of torch makes a batch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if LOADING in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
