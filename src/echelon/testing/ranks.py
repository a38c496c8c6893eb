"""Where a check of a backend runs its ranks: in threads of this process, or on simulated ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from echelon.backends.base import Backend
from echelon.group.group import ProcessGroup
from echelon.simulation import simulate
from echelon.simulation.network import NetworkLike

Act: TypeAlias = Callable[[Backend], object]
"""What every rank does with its backend."""

RunRanks: TypeAlias = Callable[[int, Act], Sequence[object]]
"""Makes a fresh world of so many ranks, runs `act` on all of them at once, closes them, and returns the results.

Raises the first error of any rank.
"""

_SECONDS = 40.0
"""Longer than a rank waits for anything: one that still runs then blocks for ever."""


def ranks_in_threads(make_world: Callable[[int], Sequence[Backend]]) -> RunRanks:
    """Returns what runs each rank of a world of backends in a thread of this process.

    Args:
        make_world: given a number of ranks, makes a fresh world and returns its backends by rank.
    """

    def run(world_size: int, act: Act) -> list[object]:
        world = make_world(world_size)
        results: list[object] = [None] * len(world)
        errors: list[BaseException] = []

        def run_rank(number: int, backend: Backend) -> None:
            try:
                results[number] = act(backend)
                backend.close()
            except BaseException as error:
                errors.append(error)
                backend.abort(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=run_rank, args=item, daemon=True) for item in enumerate(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_SECONDS)
        if errors:
            raise errors[0]
        if any(thread.is_alive() for thread in threads):
            raise AssertionError(f"a rank still blocks after {_SECONDS:.0f} s")
        return results

    return run


def simulated_ranks(seed: int = 0, network: NetworkLike = None) -> RunRanks:
    """Returns what runs the ranks in a simulation, one at a time; `seed` and `network` are those of `simulate`."""

    def run(world_size: int, act: Act) -> list[object]:
        def run_rank(group: ProcessGroup) -> object:
            result = act(group.backend)
            group.backend.close()
            return result

        return simulate(run_rank, world_size, seed=seed, network=network).results

    return run
