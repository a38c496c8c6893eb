"""Determinism of simulated ranks: a random state for each rank, and one core for all threads of a simulation."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence

from echelon.simulation.process.state import State


@contextmanager
def on_one_core() -> Iterator[None]:
    """Inside, the calling thread and threads that it starts stay on its present core, as far as the system allows.

    Afterwards the calling thread's affinity and policy are restored.
    """
    core = policy = None
    # Handing the turn to another thread takes about 20 us across two cores, which involves waking the other core, and
    # 6 us on one.
    with suppress(OSError):
        core = _this_core()
    # 3 us with SCHED_BATCH, which lets the waking thread go on until it sleeps. Otherwise the woken thread runs at
    # once, finds the interpreter's lock taken, and sleeps again.
    with suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # a policy that the user has chosen stays
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            policy = os.SCHED_OTHER
    try:
        with nullcontext() if core is None else cores_of_thread({core}):
            yield
    finally:
        with suppress(OSError):
            if policy is not None:
                os.sched_setscheduler(0, policy, os.sched_param(0))


@contextmanager
def cores_of_thread(cores: Collection[int]) -> Iterator[None]:
    """Inside, the calling thread, and threads and processes that it starts, run on some cores, if the system allows."""
    before = None
    with suppress(OSError):
        before = cores_here()
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with suppress(OSError):
            if before is not None:
                os.sched_setaffinity(0, before)


_affinity = os.sched_getaffinity
"""The original: for simulated ranks it is replaced."""


def cores_here() -> set[int]:
    """Returns the cores on which the calling thread may run."""
    return _affinity(0)


def _this_core() -> int:
    """Returns the number of the core that the calling thread is on.

    Raises:
        OSError: the system cannot tell.
    """
    number = int(_c_library().sched_getcpu())
    if number < 0:
        raise OSError("sched_getcpu failed")
    return number


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class _MT19937(np.random.MT19937):
    """NumPy's generator, which hides its 624 words while the rest of a state is read or set: that takes 1 us, not 20.

    A state names the class of its generator, so that it goes by the name of its base.
    """

    hides_words = False

    @property
    def state(self) -> Any:
        """State of the generator, or none of it."""
        return {"bit_generator": "MT19937", "state": {}} if self.hides_words else super().state

    @state.setter
    def state(self, value: Any) -> None:
        if not self.hides_words:
            np.random.MT19937.state.__set__(self, value)  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        plain = np.random.MT19937()
        plain.state = self.state
        return plain.__reduce__()


_MT19937.__name__ = _MT19937.__qualname__ = "MT19937"


@dataclass(slots=True)
class _State:
    python: tuple[Any, ...]
    numpy: np.random.BitGenerator
    normal: float | None
    """Number of `numpy.random.randn`, which draws two at a time and keeps one. None if it keeps none."""
    torch: torch.Tensor


class RandomState(State):
    """Random states of `random`, `numpy.random` and torch's CPU generator."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def first(self, rank: int) -> _State:
        """Draws the first state of a rank, which depends on the seed and the rank only."""
        return _first(self._seed, rank)

    def take(self) -> _State:  # noqa: D102
        numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
        with _without_words(numpy):
            kept = np.random.get_state(legacy=False)
        normal = kept["gauss"] if kept["has_gauss"] else None
        return _State(random.getstate(), numpy, normal, torch.default_generator.get_state())

    def put(self, state: _State) -> None:  # noqa: D102
        random.setstate(state.python)
        np.random.set_bit_generator(state.numpy)  # type: ignore[attr-defined]  # drops the number that is kept
        if state.normal is not None:
            with _without_words(state.numpy):
                kept = np.random.get_state(legacy=False)
                np.random.set_state({**kept, "has_gauss": 1, "gauss": state.normal})
        torch.default_generator.set_state(state.torch)


@contextmanager
def _without_words(generator: object) -> Iterator[None]:
    if not isinstance(generator, _MT19937):  # that of the process, or of the program
        yield
        return
    generator.hides_words = True
    try:
        yield
    finally:
        generator.hides_words = False


def _first(seed: int, rank: int) -> _State:
    # A hash, so that neighbouring seeds and ranks have unrelated states.
    digest = hashlib.blake2b(f"rank {rank} of the simulation with seed {seed}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    generator = torch.Generator().manual_seed(number >> 1)
    numpy = _MT19937(_Seed(digest))  # type: ignore[arg-type]
    return _State(random.Random(number).getstate(), numpy, None, generator.get_state())


class _Seed(ISeedSequence):
    """Seed of a NumPy generator from a digest, in half of the time of NumPy's own SeedSequence."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        """Returns `n_words` numbers that depend on the digest only."""
        size = np.dtype(dtype).itemsize
        return np.frombuffer(hashlib.shake_128(self._digest).digest(n_words * size), dtype)
