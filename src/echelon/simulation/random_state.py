"""Gives each simulated rank random numbers of its own: the process has one state of each kind, which takes turns.

The states are exchanged when code of another rank's program is about to run, not at every hand-over: inside the
library nothing is drawn.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(slots=True)
class _State:
    python: tuple[object, ...]
    numpy: np.random.BitGenerator
    torch: torch.Tensor


class RandomStates:
    """The random states of all ranks of one simulation, and of the program that started it."""

    def __init__(self, seed: int, world_size: int) -> None:
        """Draws a first state for each rank from the seed and the rank alone."""
        self._outside = self._take()
        self._states = [_first(seed, rank) for rank in range(world_size)]
        self._installed: int | None = None

    def install(self, rank: int) -> None:
        """Makes `random`, `numpy.random` and torch's CPU generator those of `rank`."""
        if rank != self._installed:
            self._keep()
            _put(self._states[rank])
            self._installed = rank

    def restore(self) -> None:
        """Makes them those of the program that started the simulation."""
        _put(self._outside)
        self._installed = None

    def _keep(self) -> None:
        if self._installed is not None:
            self._states[self._installed] = self._take()

    def _take(self) -> _State:
        numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
        return _State(random.getstate(), numpy, torch.default_generator.get_state())


def _put(state: _State) -> None:
    random.setstate(state.python)
    np.random.set_bit_generator(state.numpy)  # type: ignore[attr-defined]
    torch.default_generator.set_state(state.torch)


def _first(seed: int, rank: int) -> _State:
    digest = hashlib.blake2b(f"rank {rank} of the simulation with seed {seed}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    generator = torch.Generator().manual_seed(number >> 1)
    return _State(random.Random(number).getstate(), np.random.MT19937(number), generator.get_state())
