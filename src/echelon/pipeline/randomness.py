"""Random numbers that belong to a microbatch in a stage, whenever and wherever it is run.

Dropout draws from the generator of its device. While a stage runs, that generator has a state made from the numbers of
step, stage and microbatch, so the same numbers are drawn under every schedule, in every process, and once more when the
stage is run again to save memory. Then it has the state it had before: a program's own random numbers do not change.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch


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
