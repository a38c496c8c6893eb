"""Random numbers that belong to a microbatch in a stage, whenever and wherever it is run.

Dropout draws from the generator of its device. While a stage runs, that generator has a state made from the numbers of
step, stage and microbatch, so the same numbers are drawn under every schedule, in every process, and once more when the
stage is run again to save memory. Then it has the state it had before: a program's own random numbers do not change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn

# Runs of a module that leave its buffers, such as the running statistics of BatchNorm, as they were.


@contextmanager
def same_buffers(module: nn.Module) -> Iterator[None]:
    """Puts back, at the end, what the buffers held."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)  # not a change to autograd, which may have saved the buffer for a backward


# Autocast around forwards and backwards, wherever the program that calls them is.

_DEVICES = ("cpu", "cuda")


class Autocast(NamedTuple):
    """What autocast was set to when a forward was run, which may be run again elsewhere."""

    dtypes: tuple[torch.dtype | None, ...]
    """For each kind of device what its products are cast to; None: they are not."""

    @staticmethod
    def now() -> Autocast:
        """Returns what it is set to."""
        return Autocast(tuple(_dtype(device) for device in _DEVICES))

    def again(self) -> AbstractContextManager[object]:
        """Does what is inside under the same setting."""
        changed = [pair for pair in zip(_DEVICES, self.dtypes, strict=True) if _dtype(pair[0]) != pair[1]]
        if not changed:
            return nullcontext()
        stack = ExitStack()
        for device, dtype in changed:
            stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
        return stack


_OFF = Autocast((None,) * len(_DEVICES))


def outside_autocast() -> AbstractContextManager[object]:
    """Does what is inside in the dtypes that the forward left, as a backward after `with torch.autocast` would."""
    return _OFF.again()


def is_casting() -> bool:
    """Says whether autocast is on, so that a backward has to leave it."""
    return Autocast.now() != _OFF


def _dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class Key(NamedTuple):
    """What random numbers depend on beside stage and microbatch; see `keyed`."""

    seed: int = 0
    step: int = 0
    replica: int = 0


def keyed(
    step: int = 0, stage: int = 0, microbatch: int = 0, *, replica: int = 0, seed: int = 0
) -> AbstractContextManager[None]:
    """Gives torch's generators a state that depends on these numbers only, and afterwards the state they had.

    A loop in one process that runs stage `stage` of a model inside of `keyed(step, stage, microbatch)` draws what a
    Pipeline draws there. On an accelerator it is the generator of the current device.

    Args:
        step: how many training steps were before.
        stage: number of the stage.
        microbatch: number of the microbatch in the step.
        replica: rank in the data-parallel group.
        seed: that of the Pipeline.
    """
    return Seeded(number_of(Key(seed, step, replica), stage, microbatch))


class Seeded:
    """Gives torch's generators the state that a number makes, and afterwards the state they had."""

    # Around every forward, where code is mostly cold: a generator with `contextmanager` takes twice as long.
    __slots__ = ("_number", "_states")

    def __init__(self, number: int) -> None:
        self._number = number
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []

    def __enter__(self) -> None:
        self._states = [(generator, generator.get_state()) for generator in _generators()]
        for generator, _ in self._states:
            generator.manual_seed(self._number)

    def __exit__(self, *_: object) -> None:
        for generator, state in self._states:
            generator.set_state(state)


def number_of(key: Key, stage: int, microbatch: int) -> int:
    """Returns what the random numbers of a microbatch in a stage are made from."""
    text = f"{key.step} {stage} {microbatch} {key.replica} {key.seed}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _generators() -> list[torch.Generator]:
    """Returns the default generators that may be drawn from: the CPU's, and the current GPU's if it is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]
