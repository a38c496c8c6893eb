"""Random numbers, autocast and buffers of a forward, so that it gives the same wherever and whenever it is run.

Dropout draws from the generator of its device. While a stage runs, this generator is seeded with the numbers of step,
stage and microbatch. So the same numbers are drawn under every schedule, in every process, and again when the stage is
recomputed to save memory. Afterwards the generator has its earlier state: a program's own random numbers do not change.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn

from echelon._torch_private.tensors import version_of
from echelon.backends.admission import stands_for_device
from echelon.hashing import stable_number

_SMALL = 2**16
"""Bytes of a buffer whose copy is kept without asking whether it changes, such as running statistics."""


class BufferValues:
    """Values that the buffers of a module had at one time, for a forward that is run from them.

    The forward gets tensors of its own in their place: it may read, change or replace them, and autograd may save them.
    """

    def __init__(self, module: nn.Module) -> None:
        """Copies all buffers."""
        values: dict[int, torch.Tensor] = {}  # one for each tensor, which may be a buffer of several modules
        self._places = []
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
                value = values.setdefault(id(buffer), buffer.detach().clone())
                self._places.append(_Place(owner, name, buffer, _version(buffer), value))

    def forget_constants(self) -> None:
        """Frees the copies of large buffers that the module has not changed since, such as masks."""
        self._places = [place for place in self._places if place.value.nbytes <= _SMALL or place.is_changed()]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The copies."""
        return [place.value for place in self._places]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the module has these values. At the end it has its present buffers back, as they are now. Once."""
        now = [(place.owner, place.name, getattr(place.owner, place.name)) for place in self._places]
        try:
            for owner, name, _, _, value in self._places:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, buffer in now:
                setattr(owner, name, buffer)


class _Place(NamedTuple):
    owner: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    value: torch.Tensor

    def is_changed(self) -> bool:
        buffer = getattr(self.owner, self.name)
        if buffer is not self.buffer or _version(buffer) != self.version:
            return True
        # BatchNorm and `buffer.data.mul_()` do not count as a new version. Values on a device are not read, which would
        # wait for it.
        return buffer.is_cpu and not stands_for_device(buffer) and not torch.equal(buffer, self.value)


def _version(buffer: torch.Tensor) -> int:
    return 0 if buffer.is_inference() else version_of(buffer)  # a tensor made in inference mode counts none


class HostRandomness:
    """State of the random generators of Python and NumPy, which a forward may draw from as well."""

    def __init__(self) -> None:
        """Reads the states. NumPy's only if the program has imported it."""
        self._python = random.getstate()
        self._numpy = sys.modules.get("numpy")
        self._of_numpy = None if self._numpy is None else self._numpy.random.get_state()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the generators begin at these states. At the end they have the states from before."""
        now = HostRandomness()
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.random.set_state(self._of_numpy)


_DEVICES = ("cpu", "cuda")


class Autocast(NamedTuple):
    """Setting of autocast in a forward, which may be run again under another one."""

    dtypes: tuple[torch.dtype | None, ...]
    """Dtype of autocast for each of `_DEVICES`; None: it is off."""

    @staticmethod
    def now() -> Autocast:
        """Returns the current setting."""
        return Autocast(tuple(_dtype(device) for device in _DEVICES))

    def again(self) -> AbstractContextManager[object]:
        """Inside, autocast has this setting."""
        changed = [pair for pair in zip(_DEVICES, self.dtypes, strict=True) if _dtype(pair[0]) != pair[1]]
        if not changed:
            return nullcontext()  # fast path: autocast has this setting already
        stack = ExitStack()
        for device, dtype in changed:
            stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
        return stack


_OFF = Autocast((None,) * len(_DEVICES))


def outside_autocast() -> AbstractContextManager[object]:
    """Inside, autocast is off: a backward computes in the forward's dtypes, as it does after `with torch.autocast`."""
    return _OFF.again()


def is_casting() -> bool:
    """Whether autocast is on, so that a backward has to leave it."""
    return Autocast.now() != _OFF


def _dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class Key(NamedTuple):
    """Key of random numbers, to which stage and microbatch are added; see `keyed`."""

    seed: int = 0
    step: int = 0
    replica: int = 0


def keyed(
    step: int = 0, stage: int = 0, microbatch: int = 0, *, replica: int = 0, seed: int = 0
) -> AbstractContextManager[None]:
    """Inside, torch's generators have a state that depends on these numbers only; afterwards their earlier state.

    A loop in one process that runs stage `stage` of a model inside of `keyed(step, stage, microbatch)` draws the
    same numbers as a Pipeline. On an accelerator, the generator of the current device is used.

    Args:
        step: number of training steps before this one.
        stage: index of the stage.
        microbatch: number of the microbatch in the step.
        replica: rank in the data-parallel group.
        seed: the Pipeline's seed.
    """
    return Seeded(number_of(Key(seed, step, replica), stage, microbatch))


class Seeded:
    """Context in which torch's generators are seeded with a number; restores their state at the end."""

    # A class, since it is around every forward, where code is cold: `contextmanager` takes twice as long.
    __slots__ = ("_number", "_states")

    def __init__(self, number: int) -> None:
        self._number = number
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []

    def __enter__(self) -> None:
        generators = [torch.default_generator]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        for generator in generators:
            self._states.append((generator, generator.get_state()))
            generator.manual_seed(self._number)

    def __exit__(self, *_: object) -> None:
        for generator, state in self._states:
            generator.set_state(state)


def number_of(key: Key, stage: int, microbatch: int) -> int:
    """Returns the seed of a microbatch in a stage: 63 bits."""
    # A run that is resumed with a later version must draw the same, so the text is fixed.
    text = f"{key.step} {stage} {microbatch} {key.replica} {key.seed}"
    return stable_number(text) >> 1
