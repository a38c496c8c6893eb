"""Gives each simulated rank random numbers of its own: the process has one state of each kind, which takes turns.

The states are exchanged when code of another rank's program is about to run, not at every hand-over: inside the
library nothing is drawn.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence

# Takes the state of Python's random numbers and puts it back, in a sixth of the time that `random` takes for it.
#
# `random.getstate` makes a Python number of each of the 625 words of a state, 22 kB for every rank; with `setstate`
# that takes 17 microseconds, a quarter of all that a message costs. Here the words are copied as they lie in CPython's
# object. Whether they lie there is found out once, with a generator of our own; where not, `random`'s own way is
# taken.

_LAYOUT = struct.Struct("i624I")
"""Which word is next, and the words of the Mersenne Twister."""


class PythonState(NamedTuple):
    """A state of Python's random numbers, for `put` alone."""

    words: bytes | tuple[object, ...]
    gauss_next: float | None
    """What `random.gauss` has already drawn."""


def take(generator: random.Random) -> PythonState:
    """Returns the state of a generator."""
    if not _lies_open():
        return PythonState(generator.getstate(), None)
    return PythonState(ctypes.string_at(_address(generator), _LAYOUT.size), generator.gauss_next)  # type: ignore[attr-defined]


def put(generator: random.Random, state: PythonState) -> None:
    """Gives a generator a state."""
    if isinstance(state.words, bytes):
        ctypes.memmove(_address(generator), state.words, _LAYOUT.size)
        generator.gauss_next = state.gauss_next  # type: ignore[attr-defined]
    else:
        generator.setstate(state.words)


def shared() -> random.Random:
    """Returns the generator that the functions of `random` draw from."""
    generator = random.random.__self__  # type: ignore[attr-defined]
    assert isinstance(generator, random.Random)
    return generator


@functools.cache
def _lies_open() -> bool:
    """Says whether the words of a generator lie where `_address` says, in the order of `_LAYOUT`."""
    if random.Random.__basicsize__ < object.__basicsize__ + _LAYOUT.size:
        return False
    own = random.Random(1)
    own.random()
    words: object = own.getstate()[1]
    index, *lying = _LAYOUT.unpack(ctypes.string_at(_address(own), _LAYOUT.size))
    return (*lying, index) == words


def _address(generator: random.Random) -> int:
    return id(generator) + object.__basicsize__


# Keeps the threads of a simulation on one core, where handing over from one to the next takes the least time.
#
# Across two cores a hand-over takes about 20 microseconds, on one core 6: nobody has to wake the other core up. It
# takes 3 if the kernel lets who wakes another go on until it sleeps (SCHED_BATCH); else the one that was woken comes
# at once, finds that the interpreter's lock is taken, and sleeps again.


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keeps the calling thread, and those that it starts inside, on the core that it is on. Does what the system lets.

    Afterwards the calling thread is as it was before.
    """
    cores = policy = None
    with suppress(OSError, AttributeError):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {_this_core()})
    with suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
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
        return _State(take(shared()), numpy, torch.default_generator.get_state())


def _put(state: _State) -> None:
    put(shared(), state.python)
    np.random.set_bit_generator(state.numpy)  # type: ignore[attr-defined]
    torch.default_generator.set_state(state.torch)


def _first(seed: int, rank: int) -> _State:
    digest = hashlib.blake2b(f"rank {rank} of the simulation with seed {seed}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    generator = torch.Generator().manual_seed(number >> 1)
    numpy = np.random.MT19937(_Seed(digest))  # type: ignore[arg-type]
    return _State(take(random.Random(number)), numpy, generator.get_state())


class _Seed(ISeedSequence):
    """Gives NumPy's generator its first state in half of the time that NumPy's own way takes."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        """Returns `n_words` numbers that depend on nothing but the digest."""
        size = np.dtype(dtype).itemsize
        return np.frombuffer(hashlib.shake_128(self._digest).digest(n_words * size), dtype)
