"""Runs a program on simulated ranks, one at a time, in virtual time."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from echelon.arguments import check_default_timeout
from echelon.backends.work import DEFAULT_TIMEOUT
from echelon.collectives.watch import Watch
from echelon.errors import DeadlockError, LaunchError, PeerFailed
from echelon.exits import fails
from echelon.group import ProcessGroup
from echelon.launch.failure import RankFailure, first_cause
from echelon.launch.init import provide
from echelon.launch.job import check_call
from echelon.launch.report import describe
from echelon.simulation.arguments import is_count
from echelon.simulation.backend import VirtualBackend
from echelon.simulation.costs import CostsLike, Measurements, meter_for, step_cost
from echelon.simulation.explain import explain
from echelon.simulation.faults import FaultPlan, Faults
from echelon.simulation.network import NetworkLike, host_numbers, link_function
from echelon.simulation.one_core import on_one_core
from echelon.simulation.record import text_of
from echelon.simulation.task import Ended, Task
from echelon.simulation.world import World
from echelon.trace import Timeline
from echelon.world_size import check_world_size

_ALLOCATIONS = 100_000
"""How many objects are made before the garbage collector looks at them; 700 is the default."""


@dataclass(frozen=True)
class Simulation:
    """What a simulated run gave."""

    results: list[Any]
    """What the function returned, by rank; None for a rank that was killed."""
    elapsed: float
    """Virtual seconds from the start until the last rank's function ended."""
    seed: int
    timeline: Timeline
    """What each rank computed and its collectives, in virtual seconds. Asynchronous ones are in `Timeline.beside`."""
    bytes_sent: Mapping[tuple[int, int], int]
    """By sender and receiver."""
    peak_memory: tuple[int, ...] | None = None
    """With `memory=True`: the most bytes that the tensors made by each rank had at one time."""
    measurements: Measurements | None = None
    """With measured costs: the figures. As `costs` of another simulation they repeat this one."""
    events: Sequence[tuple[object, ...]] = field(default=(), repr=False)
    """What the trace is made of."""

    @functools.cached_property
    def trace(self) -> str:
        """All that happened, one line per event. The same seed gives the same trace."""
        return text_of(self.events)


def simulate(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[object] = (),
    seed: int = 0,
    network: NetworkLike = None,
    costs: CostsLike = None,
    faults: Faults = (),
    *,
    timeout: float = DEFAULT_TIMEOUT,
    memory: bool = False,
) -> Simulation:
    """Runs `fn(group, *args)` on every rank of a simulated world and returns when all have ended.

    Exactly one rank runs at a time, and the seed decides who, wherever the clock does not: the same seed gives the same
    run. Inside, `echelon.init()` returns the rank's group, so a script's main function runs unchanged. Each rank has
    random states of its own (Python's, NumPy's, torch's for the CPU) and computes with one thread. All ranks share what
    a process has only once: modules, the environment, torch's default dtype.

    Args:
        fn: what each rank runs.
        world_size: the number of ranks.
        args: further arguments of `fn`, the same objects on every rank.
        seed: of everything that is left to chance.
        network: a `Network`, the name of one (see `echelon.simulation.PRESETS`), or a function from two ranks to the
            `Network` between them. None: messages take no time.
        costs: what computing costs. None: nothing. `echelon.pipeline.Costs`: the actions of pipelines, in seconds. A
            mapping from a name to seconds, or a function of rank and step: what runs inside `backend.compute(step)`.
            "measured" or `Measured(factor=)`: the CPU time that it takes here. `Measurements`: the same as before.
        faults: what goes wrong, or a function of a seeded `random.Random` and the number of ranks that draws it.
        timeout: virtual seconds that a blocking call waits by default.
        memory: whether to count the memory of each rank's tensors, which takes time for every operation.

    Raises:
        InvalidWorldSize: `world_size` is below 1 or above 65,536.
        LaunchError, InvalidRank: an argument that makes no sense; faults of ranks that there are not.
        DeadlockError: no rank can go on; with who waits for whom, and where.
        CollectiveMismatch: a rank took no part in a collective, though no other rank had to wait for it.
        UnsupportedOp: a rank changed a tensor before its send was done. Looked for where messages take time, and there
            are neither faults nor `memory`.
        PeerFailed: a rank called `sys.exit` with an error status; it is named.
        Exception: that of the rank which failed first, with a note that names the rank.
    """
    check_world_size(world_size)
    _check(fn, args, seed, timeout)
    cost, meter = step_cost(costs), meter_for(costs)
    if callable(faults):
        faults = faults(random.Random(f"faults of {seed}"), world_size)
    plan = FaultPlan(faults, world_size, has_costs=cost is not None or meter is not None)
    link, hosts = link_function(network, world_size), host_numbers(network, world_size)
    world = World(world_size, seed, link, plan, cost, meter, memory, hosts)
    run = _Run(world, world_size, fn, args, timeout)
    num_threads = torch.get_num_threads()
    try:
        with _rarer_collections(), on_one_core():
            run.run()
    finally:
        world.random_states.restore()
        torch.set_num_threads(num_threads)
    return Simulation(
        results=run.results,
        elapsed=run.elapsed,
        seed=seed,
        timeline=world.recorder.timeline(),
        bytes_sent=dict(sorted(world.recorder.bytes_sent.items())),
        peak_memory=tuple(memory_meter.peak for memory_meter in world.memory_meters) if memory else None,
        measurements=None if meter is None else meter.measurements(),
        events=world.recorder.events,
    )


def _check(fn: object, args: object, seed: object, timeout: object) -> None:
    check_call(fn, args)
    if not is_count(seed):
        raise LaunchError(f"seed={seed!r}: give a whole number, at least 0: what repeats needs one")
    check_default_timeout(timeout, LaunchError)


class _Run:
    """One simulation under way."""

    def __init__(
        self, world: World, world_size: int, fn: Callable[..., Any], args: Sequence[object], timeout: float
    ) -> None:
        self.results: list[Any] = [None] * world_size
        self.elapsed = 0.0
        self._world = world
        self._scheduler = world.scheduler
        self._fn = fn
        self._args = args
        self._timeout = timeout
        self._num_left = world_size
        self._errors: dict[int, BaseException] = {}
        self._failures: list[RankFailure] = []
        self._backends: list[VirtualBackend] = []
        self._disputed: set[int] = set()
        """Contexts whose ranks were told that they disagree."""
        self._scheduler.on_stuck = self._explain

    def run(self) -> None:
        for rank in range(len(self.results)):
            self._scheduler.add(rank, functools.partial(self._run_rank, rank))
        try:
            self._scheduler.run()
            error = self._error()
        finally:
            # What refers to each other would live on until the garbage collector comes.
            for backend in self._backends:
                backend.forget()
            self._scheduler.forget()
            self._errors.clear()
        try:
            if error is not None:
                raise error
        finally:
            del error

    def _error(self) -> BaseException | None:
        """Returns what to raise, if anything went wrong."""
        if self._failures:
            cause = first_cause(self._failures)
            error = self._errors[cause.rank]
            if isinstance(error, SystemExit):  # raised here, it would end the program that simulates, without a word
                error = PeerFailed(cause.rank, f"it {cause.summary}")
                error.__cause__ = self._errors[cause.rank]
            error.add_note(f"raised on rank {cause.rank} of {len(self.results)}")
            return error
        return self._scheduler.error or self._world.overwritten or self._world.missed()

    def _run_rank(self, rank: int) -> None:
        """The body of a rank's own task."""
        torch.set_num_threads(1)
        backend = VirtualBackend(rank, len(self.results), self._world, self._timeout)
        self._backends.append(backend)
        group = ProcessGroup(backend)
        try:
            backend.begin()
            with provide(group), backend.memory_meter():
                self.results[rank] = self._fn(group, *self._args)
            self._world.returned.add(rank)
            backend.drain()
            self._world.note(rank, "has returned")
        except Ended:
            self._world.returned.discard(rank)
            raise
        except BaseException as error:
            if not self._scheduler.is_ending:
                if fails(error):
                    self._errors[rank] = error
                    self._failures.append(describe(rank, error))
                group.__exit__(type(error), error, error.__traceback__)
        finally:
            self._end()

    def _end(self) -> None:
        self.elapsed = max(self.elapsed, self._scheduler.now)
        self._num_left -= 1
        if self._num_left == 0:
            self._scheduler.is_ending = True
            self._scheduler.doom()

    def _explain(self, tasks: Sequence[Task]) -> DeadlockError | None:
        """Returns the error; with faults there is none as long as ranks wait for one that left because of them."""
        world = self._world
        if world.faults.faults and world.tell_of_returned():
            return None
        if self._tell_of_disagreement():
            return None
        return explain(world, tasks)

    def _tell_of_disagreement(self) -> bool:
        """Tells all ranks of a collective that two have called differently; says whether there was such news."""
        for backend in self._backends:
            for flight in backend.flight_recorder.under_way():
                if flight.sequence and flight.context not in self._disputed:
                    watch = Watch(backend, range(backend.world_size), flight, self._scheduler.now)
                    if mismatch := watch.mismatch():
                        self._disputed.add(flight.context)
                        for mailbox in self._world.mailboxes:
                            mailbox.fail_context(flight.context, mismatch)
                        return True
        return False


@contextmanager
def _rarer_collections() -> Iterator[None]:
    """Keeps the garbage collector from running all the time.

    A simulation makes many small objects, and few cycles of them. Without this, half of its time goes into looking at
    all that there is in memory, torch itself above all, again and again.
    """
    before = gc.get_threshold()
    gc.set_threshold(_ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
