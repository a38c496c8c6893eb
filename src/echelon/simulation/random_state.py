"""Gives each simulated rank random numbers of its own: the process has one state of each kind, which takes turns.

The states are exchanged when code of another rank's program is about to run, not at every hand-over: inside the
library nothing is drawn.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence

from echelon.simulation import python_random
from echelon.simulation.python_random import PythonState


@dataclass(slots=True)
class _State:
    python: PythonState
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
        return _State(python_random.take(python_random.shared()), numpy, torch.default_generator.get_state())


def _put(state: _State) -> None:
    python_random.put(python_random.shared(), state.python)
    np.random.set_bit_generator(state.numpy)  # type: ignore[attr-defined]
    torch.default_generator.set_state(state.torch)


def _first(seed: int, rank: int) -> _State:
    digest = hashlib.blake2b(f"rank {rank} of the simulation with seed {seed}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    generator = torch.Generator().manual_seed(number >> 1)
    numpy = np.random.MT19937(_Seed(digest))  # type: ignore[arg-type]
    return _State(python_random.take(random.Random(number)), numpy, generator.get_state())


class _Seed(ISeedSequence):
    """Gives NumPy's generator its first state in half of the time that NumPy's own way takes."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        """Returns `n_words` numbers that depend on nothing but the digest."""
        size = np.dtype(dtype).itemsize
        return np.frombuffer(hashlib.shake_128(self._digest).digest(n_words * size), dtype)
