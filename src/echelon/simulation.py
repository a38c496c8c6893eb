"""Runs a program on simulated ranks: threads of this process, messages in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.backends.base import DEFAULT_TIMEOUT
from echelon.backends.simulated import SimulatedBackend
from echelon.group import ProcessGroup
from echelon.launch.failure import first_cause
from echelon.launch.init import provide
from echelon.launch.report import describe


@dataclass(frozen=True)
class Simulation:
    """What a simulated run gave."""

    results: list[Any]
    """What the function returned, by rank."""


def simulate(
    fn: Callable[..., Any], world_size: int, args: Sequence[object] = (), *, timeout: float = DEFAULT_TIMEOUT
) -> Simulation:
    """Runs `fn(group, *args)` on every rank of a simulated world and returns when all have ended.

    Inside, `echelon.init()` returns the rank's group, so a script's main function runs unchanged. All ranks share what
    a process has only once: the environment, torch's default dtype and its random state.

    Args:
        fn: what each rank runs.
        world_size: the number of ranks.
        args: further arguments of `fn`, the same objects on every rank.
        timeout: seconds that a blocking call waits by default.

    Raises:
        InvalidWorldSize: `world_size` is below 1.
        Exception: that of the rank which failed first, with a note that names the rank.
    """
    backends = SimulatedBackend.create_group(world_size, timeout=timeout)
    results: list[Any] = [None] * world_size
    errors: dict[int, BaseException] = {}
    failures = []

    def run(backend: SimulatedBackend) -> None:
        try:
            with ProcessGroup(backend) as group, provide(group):
                results[group.rank] = fn(group, *args)
        except BaseException as error:
            errors[backend.rank] = error
            failures.append(describe(backend.rank, error))

    threads = [
        threading.Thread(target=run, args=(backend,), name=f"rank {backend.rank}", daemon=True) for backend in backends
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank = first_cause(failures).rank
        errors[rank].add_note(f"raised on rank {rank} of {world_size}")
        raise errors[rank]
    return Simulation(results)
