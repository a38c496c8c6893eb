"""`echelon.simulate`: runs a program on simulated ranks, one at a time, in virtual time, and explains deadlocks."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from echelon.arguments import check_default_timeout, check_world_size, is_count
from echelon.backends.delivery import ANY
from echelon.backends.formats.wire import Tag, readable
from echelon.backends.work import DEFAULT_TIMEOUT
from echelon.call_site import place_of_thread, source_of
from echelon.collectives.calls.hang_diagnosis import HangDiagnosis
from echelon.errors import DeadlockError, LaunchError, PeerFailed
from echelon.exits import fails
from echelon.group.group import ProcessGroup
from echelon.launch.init import provide
from echelon.launch.job import check_call
from echelon.launch.report import RankFailure, describe, first_cause
from echelon.operation_records import FlightRecorder
from echelon.pipeline.run.transfer import what_passes
from echelon.simulation.backend import Passage, VirtualBackend, VirtualWork
from echelon.simulation.costs import CostsLike, Measurements, meter_for, step_cost
from echelon.simulation.faults import FaultPlan, Faults
from echelon.simulation.network import NetworkLike, host_numbers, link_function
from echelon.simulation.random_state import on_one_core
from echelon.simulation.record import text_of
from echelon.simulation.scheduler import Ended, Task
from echelon.simulation.world import World, is_plain
from echelon.timeline.timeline import Timeline

_MOST_UNCLAIMED = 8
"""Most unclaimed messages that a DeadlockError lists."""


class Waiting(NamedTuple):
    """Waiting task, as a DeadlockError lists it."""

    rank: int
    peer: int
    """Rank that it waits for. Its own if it waits for an asynchronous operation, ANY if any rank will do."""
    doing: str
    place: str
    """Line of the program. Empty if the rank's function has returned."""
    is_beside: bool
    """Whether the task is a lane. `place` is then the line that started the operation."""

    def __str__(self) -> str:
        whom = "any rank" if self.peer == ANY else f"rank {self.peer}"
        if self.is_beside:
            return f"rank {self.rank}, in {self.doing}, waits for {whom}; begun at {self.place}"
        whom = whom if self.peer != self.rank else "its own asynchronous operation"
        where = f", at {self.place}" if self.place else ", at the end of its function"
        return f"rank {self.rank} waits for {whom} in {self.doing}{where}"


def deadlock(
    waiting: Iterable[Waiting],
    returned: Mapping[int, str],
    killed: Collection[int],
    unclaimed: Sequence[str],
    now: float,
) -> DeadlockError:
    """Returns the error for ranks that wait for ever.

    Args:
        waiting: all waiting tasks.
        returned: ranks whose function has returned, with the last call of each and its line; empty without a call.
        killed: ranks that a fault ended.
        unclaimed: messages that were sent but not received, in words.
        now: virtual seconds.
    """
    tasks = sorted(waiting)
    lines = [str(task) for task in tasks]
    lines += [f"rank {rank} has returned, after {last or 'no call'}" for rank, last in sorted(returned.items())]
    lines += [f"rank {rank} was killed" for rank in sorted(killed)]
    lines += unclaimed[:_MOST_UNCLAIMED]
    if len(unclaimed) > _MOST_UNCLAIMED:
        lines.append(f"and {len(unclaimed) - _MOST_UNCLAIMED} more messages that were not received")
    return DeadlockError("\n  ".join([f"no rank can go on at {now:g} s: {_reason(tasks, returned)}", *lines]))


def _reason(tasks: Sequence[Waiting], returned: Collection[int]) -> str:
    # Before any cycle: a rank that has returned can send nothing more.
    for task in tasks:
        if task.peer in returned:
            return (
                f"rank {task.rank} waits for rank {task.peer}, which has returned: make both call the same operations"
            )
    edges: dict[int, list[int]] = {}
    for task in tasks:
        if task.peer not in (task.rank, ANY):
            edges.setdefault(task.rank, []).append(task.peer)
    cycle = find_cycle(edges)
    if not cycle:
        return "the messages that they wait for were never sent: match every receive with a send"
    path = " -> ".join(f"rank {rank}" for rank in (*cycle, cycle[0]))
    return f"they wait for each other, {path}: let one of them send before it waits"


def find_cycle(edges: Mapping[int, Sequence[int]]) -> list[int]:
    """Returns the nodes of one cycle in order, from its smallest. Empty if there is none."""
    # A node is left out once no cycle goes through it, so this ends after one visit of each.
    done: set[int] = set()
    for start in sorted(edges):
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in done and rank not in path:
            path.append(rank)
            rank = next((peer for peer in edges.get(rank, ()) if peer not in done), None)
        if rank in path:
            cycle = path[path.index(rank) :]
            first = cycle.index(min(cycle))
            return cycle[first:] + cycle[:first]
        done.update(path)
    return []


def explain(world: World, tasks: Sequence[Task]) -> DeadlockError:
    """Returns the error for tasks of a world that wait for ever."""
    # A rank that has returned but still waits for its asynchronous operations is listed as waiting.
    idle = world.returned - {task.rank for task in tasks if task.number == 0}
    return deadlock(
        waiting=[_waiting(world, task) for task in tasks],
        returned={rank: _last_call(world.flight_recorders[rank]) for rank in idle},
        killed=world.killed,
        unclaimed=sorted(_unclaimed(world)),
        now=world.scheduler.now,
    )


def _waiting(world: World, task: Task) -> Waiting:
    work = task.awaits
    assert isinstance(work, VirtualWork)
    return Waiting(
        rank=task.rank,
        peer=work.peer,
        doing=_doing(work, world.flight_recorders[task.rank]),
        place=task.origin if task.number else source_of(place_of_thread(task.thread.ident)),
        is_beside=task.number > 0,
    )


def _doing(work: VirtualWork[object], recorder: FlightRecorder) -> str:
    passage = work.description
    if not isinstance(passage, Passage):
        return str(passage)
    if value := what_passes(passage.tag):
        return f"{passage.doing} rank {passage.peer}, {value}"
    flight = work.flight or recorder.find(passage.tag.context, passage.tag.sequence)
    group = "" if flight is None or flight.group == "world" else f", of group {flight.group!r}"
    return (readable(work.operation) or str(passage)) + group


def _last_call(recorder: FlightRecorder) -> str:
    """Returns a rank's last call and its line. Empty if it made no call."""
    records = recorder.records()
    if not records:
        return ""
    last = records[-1]
    number = f", #{last.sequence}" if last.sequence else ""
    return f"{last.operation}{number} at {last.place}"


def _unclaimed(world: World) -> Iterator[str]:
    for rank, mailbox in enumerate(world.mailboxes):
        for src, tag in mailbox.unclaimed():
            if is_plain(tag):
                yield f"rank {rank} has not received a message of rank {src}, {_name_of(tag)}"


def _name_of(tag: Tag) -> str:
    return what_passes(tag) or f"tag {tag.step}"


_ALLOCATIONS = 100_000
"""Number of new objects between two runs of the garbage collector. Python's default is 700."""


@dataclass(frozen=True)
class Simulation:
    """Result of a simulated run."""

    results: list[Any]
    """Return values of the function, by rank. None for a killed rank."""
    elapsed: float
    """Virtual seconds from the start until the last rank's function ended."""
    seed: int
    timeline: Timeline
    """Steps and collectives of each rank, in virtual seconds. Asynchronous collectives are in `Timeline.beside`."""
    bytes_sent: Mapping[tuple[int, int], int]
    """Bytes, by (sender, receiver)."""
    peak_memory: tuple[int, ...] | None = None
    """Peak bytes of the tensors that each rank made, by rank. None without `memory=True`."""
    measurements: Measurements | None = None
    """Measured costs. As `costs` of another simulation they repeat this one. None if costs are not measured."""
    events: Sequence[tuple[object, ...]] = field(default=(), repr=False)
    """Events of the trace, each as the arguments of an `Event`."""

    @functools.cached_property
    def trace(self) -> str:
        """All events as text, one per line. The same seed gives the same trace."""
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
    late_sends: bool = False,
) -> Simulation:
    """Runs `fn(group, *args)` on every rank of a simulated world. Blocks until all ranks have ended.

    Exactly one rank runs at a time. The virtual clock decides which, and the seed where times are equal, so the same
    seed gives the same run. Inside, `echelon.init()` returns the rank's group, so a script's main function runs
    unchanged. Each rank has its own random states (Python's, NumPy's, torch's for the CPU) and computes with one
    thread. All ranks share the modules, the environment, torch's default dtype and the other state of the process.

    Args:
        fn: function that each rank runs.
        world_size: number of ranks.
        args: further arguments of `fn`, the same objects on every rank.
        seed: seed of the order of events and of all random states.
        network: a `Network`, the name of one (see `echelon.simulation.PRESETS`), or a function from two ranks to the
            `Network` between them. None: messages take no time.
        costs: virtual time of computing. None: no time. `echelon.pipeline.Costs`: the actions of pipelines, in seconds.
            A mapping from a step's name to seconds, or a function of rank and step: code inside
            `backend.compute(step)`. "measured" or `Measured(factor=)`: the CPU time that it takes here.
            `Measurements`: the times of an earlier simulation.
        faults: faults, or a function of a seeded `random.Random` and the number of ranks that draws them.
        timeout: default timeout of blocking calls, virtual seconds.
        memory: whether to count the memory of each rank's tensors, which slows down every operation of torch.
        late_sends: whether a send is done as late as it can be without virtual time: once no rank can go on otherwise
            at the time at which its message arrives. A rank that overwrites a tensor before its send is done is then
            found whenever it does so at that time. Most strict without `network` and `costs`, where all is one time.

    Raises:
        InvalidWorldSize: `world_size` is below 1 or above 65,536.
        LaunchError, InvalidRank: an argument is invalid, `late_sends` is given with `memory`, or a fault names a rank
            that is not in the world.
        DeadlockError: no rank can go on. It lists which rank waits for which, and where.
        CollectiveMismatch: a rank took no part in a collective, though no other rank had to wait for it.
        UnsupportedOp: a rank changed a tensor before its send was done. It names the line of the send. Checked with
            `late_sends`, and if messages take time, but not with `memory`.
        PeerFailed: a rank called `sys.exit` with an error status. It names the rank.
        Exception: the exception of the first failing rank, with a note that names the rank.
    """
    check_world_size(world_size)
    _check(fn, args, seed, timeout)
    cost, meter = step_cost(costs), meter_for(costs)
    if callable(faults):
        faults = faults(random.Random(f"faults of {seed}"), world_size)
    plan = FaultPlan(faults, world_size, has_costs=cost is not None or meter is not None)
    if late_sends and memory:
        # The check keeps sent tensors alive, so they would count for longer.
        raise LaunchError("late_sends=True and memory=True: leave one out, because no send is checked with memory=True")
    link, hosts = link_function(network, world_size), host_numbers(network, world_size)
    world = World(world_size, seed, link, plan, cost, meter, memory, hosts, late_sends)
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
        raise LaunchError(f"seed={seed!r}: give a whole number, at least 0, so that the run can be repeated")
    check_default_timeout(timeout, LaunchError)


class _Run:
    """Running simulation: its ranks, their results and their failures."""

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
        """Contexts whose ranks have got CollectiveMismatch already."""
        self._scheduler.on_stuck = self._explain

    def run(self) -> None:
        for rank in range(len(self.results)):
            self._scheduler.add(rank, functools.partial(self._run_rank, rank))
        try:
            self._scheduler.run()
            error = self._error()
        finally:
            # Breaks the reference cycles between tasks, backends and world: a thousand failed simulations kept 160 MB
            # until the garbage collector ran.
            for backend in self._backends:
                backend.forget()
            self._scheduler.forget()
            self._errors.clear()
        # The error's traceback refers to this frame: without the `del`, frame and error would be a cycle.
        try:
            if error is not None:
                raise error
        finally:
            del error

    def _error(self) -> BaseException | None:
        """Returns the error of the simulation. None if all ranks succeeded."""
        if self._failures:
            cause = first_cause(self._failures)
            error = self._errors[cause.rank]
            if isinstance(error, SystemExit):  # raised here, it would silently end the program that simulates
                error = PeerFailed(cause.rank, f"it {cause.summary}")
                error.__cause__ = self._errors[cause.rank]
            error.add_note(f"raised on rank {cause.rank} of {len(self.results)}")
            return error
        return self._scheduler.error or self._world.overwritten or self._world.missed()

    def _run_rank(self, rank: int) -> None:
        """Body of a rank's main task."""
        torch.set_num_threads(1)  # `simulate` restores the caller's number
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
                # A tensor that was sent wrong may be the cause. Once this rank has left, the others may give sends up.
                if fails(error) and self._world.check_sends() is None:
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
            self._scheduler.cancel()

    def _explain(self, tasks: Sequence[Task]) -> DeadlockError | None:
        """Returns the error for ranks that wait for ever. None if news could be sent that lets some go on."""
        world = self._world
        # With faults a rank may have returned because of one. It did not call too little by mistake, so the ranks that
        # wait for it get PeerFailed, and there is no deadlock.
        if world.faults.faults and world.tell_of_returned():
            return None
        if self._tell_of_disagreement():
            return None
        return explain(world, tasks)

    def _tell_of_disagreement(self) -> bool:
        """Fails a collective that two ranks called differently, on all ranks. True if there was one."""
        for backend in self._backends:
            for flight in backend.flight_recorder.under_way():
                if flight.sequence and flight.context not in self._disputed:
                    watch = HangDiagnosis(backend, range(backend.world_size), flight, self._scheduler.now)
                    if mismatch := watch.mismatch():
                        self._disputed.add(flight.context)
                        for mailbox in self._world.mailboxes:
                            mailbox.fail_context(flight.context, mismatch)
                        return True
        return False


@contextmanager
def _rarer_collections() -> Iterator[None]:
    """Inside, the garbage collector runs rarely."""
    # A simulation makes many small objects, and few reference cycles. With the default threshold half of its time goes
    # into collections, which traverse all objects, most of them torch's: 30 us per message.
    before = gc.get_threshold()
    gc.set_threshold(_ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
