"""Worlds for checks of a backend, in threads of this process or of simulated ranks, and the expectations of checks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from echelon.backends.base import Backend
from echelon.group.group import ProcessGroup
from echelon.simulation import simulate
from echelon.simulation.network import NetworkLike

Act: TypeAlias = Callable[[Backend], object]
"""Function that every rank calls with its backend."""

RunRanks: TypeAlias = Callable[[int, Act], Sequence[object]]
"""Runs a function on all ranks of a fresh world of the given size, closes them, and returns the results by rank.

Raises the first error of any rank.
"""

_SECONDS = 40.0
"""Longer than any wait of a check (20 s): a rank that still runs hangs."""


class ContractError(AssertionError):
    """Violation of the contract by a backend. The message names the clause and the difference."""


def expect(condition: bool, message: str) -> None:
    """Raises ContractError with `message` unless the condition holds."""
    if not condition:
        raise ContractError(message)


def expect_error(kind: type[BaseException], act: Callable[[], object], when: str) -> BaseException:
    """Returns the error of type `kind` that `act` raises. Raises ContractError if it raises none."""
    try:
        act()
    except kind as error:
        return error
    except Exception as error:
        raise ContractError(f"{when}: {kind.__name__} expected, got {type(error).__name__}: {error}") from error
    raise ContractError(f"{when}: {kind.__name__} expected, nothing was raised")


def ranks_in_threads(make_world: Callable[[int], Sequence[Backend]]) -> RunRanks:
    """Returns a runner that runs each rank of a world of backends in a thread of this process.

    Args:
        make_world: makes a fresh world of the given size and returns its backends by rank.

    Raises:
        Exception: in the runner: the first error of any rank.
        AssertionError: in the runner: a rank still blocks after 40 s.
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
                # Peers that wait for this rank fail at once instead of at their timeouts.
                backend.abort(f"{type(error).__name__}: {error}")

        # Daemons, so that a hanging rank does not keep the process from its end.
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


def simulated_ranks(
    seed: int = 0, network: NetworkLike = None, *, collectives: Literal["whole", "messages"] | None = None
) -> RunRanks:
    """Returns a runner on simulated ranks, one at a time.

    Args:
        seed, network, collectives: as of `echelon.simulate`.

    Raises:
        Exception: in the runner: as of `echelon.simulate`.
    """

    def run(world_size: int, act: Act) -> list[object]:
        def run_rank(group: ProcessGroup) -> object:
            result = act(group.backend)
            group.backend.close()
            return result

        return simulate(run_rank, world_size, seed=seed, network=network, collectives=collectives).results

    return run
