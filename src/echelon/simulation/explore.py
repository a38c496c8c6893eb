"""`echelon.explore`: runs a program under many seeds, to find an order of events that breaks it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from echelon.errors import LaunchError
from echelon.simulation.costs import CostsLike
from echelon.simulation.faults import Faults
from echelon.simulation.network import NetworkLike
from echelon.simulation.run import Simulation, simulate


def explore(
    fn: Callable[..., Any],
    world_size: int,
    seeds: Iterable[int] = range(1000),
    args: Sequence[object] = (),
    network: NetworkLike = None,
    costs: CostsLike = None,
    faults: Faults = (),
    *,
    late_sends: bool = False,
    check: Callable[[Simulation], object] | None = None,
) -> int:
    """Simulates `fn` with one seed after another. Returns the number of seeds tried.

    Stops at the first failing seed and raises its exception. A line on stderr and a note of the exception tell how to
    replay it.

    Args:
        fn, world_size, args, network, costs, faults, late_sends: as for `simulate`.
        seeds: the seeds to try.
        check: function called with the simulation of each seed. An exception of it is a failure, too. It can check
            conditions that no single rank sees, such as equal results.

    Raises:
        LaunchError: there are no seeds, or `check` is no function.
        Exception: the exception of the first failing seed.
    """
    if not isinstance(seeds, Iterable):
        raise LaunchError(f"seeds={seeds!r}: give an iterable of seeds, such as range(1000)")
    if check is not None and not callable(check):
        raise LaunchError(f"check={check!r}: give a function of a Simulation")
    count = 0
    for seed in seeds:
        try:
            simulation = simulate(fn, world_size, args, seed, network, costs, faults, late_sends=late_sends)
            if check is not None:
                check(simulation)
        except Exception as error:  # not KeyboardInterrupt, which is no failure of the seed
            name = getattr(fn, "__name__", repr(fn))
            more = "".join(f", {what}=..." for what, given in _given(args, network, costs, faults) if given)
            more += ", late_sends=True" if late_sends else ""
            replay = f"echelon.simulate({name}, {world_size}{more}, seed={seed})"
            told = f"seed {seed} fails, after {count} that passed; to replay it: {replay}"
            error.add_note(told)
            print(told, file=sys.stderr)
            raise
        count += 1
    if count == 0:
        raise LaunchError(f"seeds={seeds!r} has none: nothing was tried; give at least one")
    return count


def _given(args: Sequence[object], network: NetworkLike, costs: CostsLike, faults: Faults) -> list[tuple[str, bool]]:
    return [
        ("args", bool(args)),
        ("network", network is not None),
        ("costs", costs is not None),
        ("faults", callable(faults) or bool(faults)),
    ]
