"""Race detector: finds programs whose results depend on the order in which ranks run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from echelon.errors import LaunchError
from echelon.simulation import Simulation, explore
from echelon.simulation.costs import CostsLike
from echelon.simulation.faults import Faults
from echelon.simulation.network import NetworkLike


class RaceError(AssertionError):
    """Race: results of a program differ between two seeds of the simulation."""


def check_same_results(
    fn: Callable[..., Any],
    world_size: int,
    seeds: Iterable[int] = range(100),
    args: Sequence[object] = (),
    network: NetworkLike = None,
    costs: CostsLike = None,
    faults: Faults = (),
    *,
    late_sends: bool = False,
) -> int:
    """Simulates `fn` with many seeds and checks that every rank returns equal results each time, bit for bit.

    Each rank's random numbers depend on the seed too: a program that draws some must seed them itself.

    Args:
        fn, world_size, args, network, costs, faults, late_sends: as for `echelon.simulate`.
        seeds: at least two; results are compared with those of the first.

    Returns:
        The number of seeds.

    Raises:
        LaunchError: fewer than two seeds.
        RaceError: a rank's results differ. The message has the rank, both seeds and both results.
        Exception: the exception of the first failing seed.
    """
    runs: list[Simulation] = []

    def check(run: Simulation) -> None:
        if not runs:
            runs.append(run)
        for rank, (result, first) in enumerate(zip(run.results, runs[0].results, strict=True)):
            if not _equal(result, first):
                raise RaceError(
                    f"rank {rank} returned {first!r} with seed {runs[0].seed}, but {result!r} with seed {run.seed}: "
                    "the result depends on the order in which messages arrive; compare the traces of the two runs"
                )

    count = explore(fn, world_size, seeds, args, network, costs, faults, late_sends=late_sends, check=check)
    if count == 1:
        raise LaunchError(f"seeds={seeds!r} has one seed: nothing was compared; give at least two")
    return count


def _equal(left: object, right: object) -> bool:
    # Tensors first, also inside containers: their == is elementwise.
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)
