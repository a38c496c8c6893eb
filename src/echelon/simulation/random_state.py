"""Determinism of simulated ranks: a random state for each rank, and one core for all threads of a simulation.

A process has one random state of each kind, so ranks take turns in it. The states are exchanged when code of another
rank's program is about to run, not at every hand-over between threads: inside the library nothing is drawn.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence


@contextmanager
def on_one_core() -> Iterator[None]:
    """Inside, the calling thread and threads that it starts stay on its present core, as far as the system allows.

    Afterwards the calling thread's affinity and policy are restored.
    """
    cores = policy = None
    # Handing the turn to another thread takes about 20 us across two cores, which involves waking the other core, and
    # 6 us on one.
    with suppress(OSError, AttributeError):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {_this_core()})
    # 3 us with SCHED_BATCH, which lets the waking thread go on until it sleeps. Otherwise the woken thread runs at
    # once, finds the interpreter's lock taken, and sleeps again.
    with suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # a policy that the user has chosen stays
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            policy = os.SCHED_OTHER
    try:
        yield
    finally:
        with suppress(OSError, AttributeError):
            if policy is not None:
                os.sched_setscheduler(0, policy, os.sched_param(0))
        with suppress(OSError, AttributeError):
            if cores is not None:
                os.sched_setaffinity(0, cores)


def _this_core() -> int:
    """Returns the number of the core that the calling thread is on.

    Raises:
        OSError, AttributeError: the system cannot tell.
    """
    number = int(_c_library().sched_getcpu())
    if number < 0:
        raise OSError("sched_getcpu failed")
    return number


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@dataclass(slots=True)
class _State:
    python: tuple[Any, ...]
    numpy: np.random.BitGenerator
    torch: torch.Tensor


class RandomStates:
    """Random states of all ranks of one simulation, and of the program that started it."""

    def __init__(self, seed: int, world_size: int) -> None:
        """Draws a first state for each rank, which depends on the seed and the rank only."""
        self._outside = self._take()
        self._states = [_first(seed, rank) for rank in range(world_size)]
        self._installed: int | None = None

    def install(self, rank: int) -> None:
        """Installs the states of `rank` in `random`, `numpy.random` and torch's CPU generator."""
        # Fast path: the rank goes on without another one's program having run.
        if rank != self._installed:
            self._keep()
            _put(self._states[rank])
            self._installed = rank

    def restore(self) -> None:
        """Installs the states of the program that started the simulation."""
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
    # A hash, so that neighbouring seeds and ranks have unrelated states.
    digest = hashlib.blake2b(f"rank {rank} of the simulation with seed {seed}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    generator = torch.Generator().manual_seed(number >> 1)
    numpy = np.random.MT19937(_Seed(digest))  # type: ignore[arg-type]
    return _State(random.Random(number).getstate(), numpy, generator.get_state())


class _Seed(ISeedSequence):
    """Seed of a NumPy generator from a digest, in half of the time of NumPy's own SeedSequence."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        """Returns `n_words` numbers that depend on the digest only."""
        size = np.dtype(dtype).itemsize
        return np.frombuffer(hashlib.shake_128(self._digest).digest(n_words * size), dtype)
