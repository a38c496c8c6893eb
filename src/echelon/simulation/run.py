"""`echelon.simulate` and `explore`: run a program on simulated ranks, one at a time, in virtual time."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from echelon.arguments import check_default_timeout, check_world_size, is_count, refuse_others
from echelon.backends.work import DEFAULT_TIMEOUT
from echelon.collectives.calls.hang_diagnosis import HangDiagnosis
from echelon.errors import DeadlockError, EchelonError, LaunchError, fails, message_of
from echelon.group.group import ProcessGroup
from echelon.launch.call import OF_OTHER_LAUNCHERS, RankCall, check_no_keywords, rank_call
from echelon.launch.init import provide
from echelon.replacements import replaced
from echelon.simulation import watchdog
from echelon.simulation.backend import VirtualBackend
from echelon.simulation.called_lines import notes_of
from echelon.simulation.costs import CostsLike, Measurements, meter_for, step_cost
from echelon.simulation.deadlock import explain, explain_blocked, whereabouts
from echelon.simulation.failures import Failures
from echelon.simulation.faults import FaultPlan, Faults, fault_text
from echelon.simulation.network import Network, NetworkLike, host_numbers, link_function, takes_no_time
from echelon.simulation.process.compiling import compiled_for_ranks
from echelon.simulation.process.environment import (
    children_with_environment,
)
from echelon.simulation.process.shared import SharedProcess, only_simulation
from echelon.simulation.process.torch_distributed import TorchDistributed
from echelon.simulation.record import text_of
from echelon.simulation.scheduler import Ended, Task
from echelon.simulation.whole import Collectives, Order, backend_of
from echelon.simulation.world import World
from echelon.timeline.timeline import Timeline


@dataclass(frozen=True)
class Simulation:
    """Result of a simulated run."""

    results: list[Any]
    """Return values of the function, by rank. None for a killed rank."""
    elapsed: float
    """Virtual seconds from the start until the last rank's function ended."""
    seed: int
    """Seed of the run, which repeats it."""
    timeline: Timeline
    """Steps and collectives of each rank, in virtual seconds. Asynchronous collectives are in `Timeline.beside`."""
    bytes_sent: Mapping[tuple[int, int], int]
    """Bytes, by (sender, receiver)."""
    peak_memory: tuple[int, ...] | None = None
    """Peak bytes of the tensors that each rank made, by rank. None without `memory=True`."""
    measurements: Measurements | None = None
    """Measured costs. As `costs` of another simulation they repeat this one. None if costs are not measured."""
    notes: tuple[str, ...] = ()
    """Sentences about what may be wrong, though no error says so.

    Faults that had no effect, such as the kill of a rank at a message that it never sent. Calls that two ranks seem to
    have swapped, each of them at the line of the other: such collectives have the same kind, shape and dtype, so their
    values may be mixed up. Settings of torch that simulated ranks share, and processes do not, if the program has set
    one, such as `torch.backends.mkldnn.enabled`. For a script also methods of an installed class that it has set, such
    as `torch.nn.Linear.forward`, which ranks share, too.
    """
    events: Sequence[tuple[object, ...]] = field(default=(), repr=False)
    """Events of the trace, each as the arguments of an `Event`."""

    @functools.cached_property
    def trace(self) -> str:
        """All events as text, one per line. The same seed gives the same trace."""
        return text_of(self.events)


@refuse_others(
    **OF_OTHER_LAUNCHERS,
    **dict.fromkeys(("latency", "bandwidth"), " give network=echelon.Network(latency=, bandwidth=)"),
    **dict.fromkeys(("hosts", "nnodes", "num_hosts"), " give network=echelon.Network(hosts=[4, 4])"),
    backend=" ranks are simulated always: leave it out, or call echelon.spawn",
)
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
    collectives: Collectives | None = None,
    order: Order = "shm",
) -> Simulation:
    """Runs `fn(group, *args)` on every rank of a simulated world. Blocks until all ranks have ended.

    A function that does not take the group is called as `fn(*args)`: `def main():` needs no change. If both calls fit,
    as for `def main(*args):` or one parameter of `None`, the group comes first.

    Exactly one rank runs at a time. The virtual clock decides which, and the seed where times are equal, so the same
    seed gives the same run. Inside, `echelon.init()` returns the rank's group, so a script's main function runs
    unchanged. Each rank has its own random states (Python's, NumPy's, torch's for the CPU), environment, `sys.argv`,
    groups of torch.distributed and settings of torch, and computes with one thread. Ranks share the modules and the
    other state of the process. Calls that concern the whole process, such as `os._exit`, act for the rank or are
    refused.

    Args:
        fn: function that each rank runs.
        world_size: number of ranks.
        args: arguments of `fn` without the group, the same objects on every rank.
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
            found whenever it does so at that time. So is one that changes a tensor of an asynchronous collective before
            that begins, which is as late. Most strict without `network` and `costs`, where all is one time.
        collectives: "whole" plays each collective as one event with the cost of its plan, "messages" plays the messages
            of the plan. Results are the same. So is the virtual time, unless a rank's messages get in each other's way.
            None: "messages" with `faults` or `late_sends`, which act on messages, else "whole".
        order: order in which reductions combine values. "shm": that of the ranks, as real processes of one host do.
            "tcp": that of the algorithm, as processes do over TCP.

    Raises:
        InvalidWorldSize: `world_size` is below 1 or above 65,536.
        LaunchError, InvalidRank: an argument is invalid, `late_sends` is given with `memory`, a fault names a rank that
            is not in the world, or a fault acts on messages and collectives have none.
        DeadlockError: no rank can go on. It lists which rank waits for which, and where.
        CollectiveMismatch: a rank took no part in a collective, though no other rank had to wait for it.
        UnsupportedOp: a rank changed a tensor before its send was done. It names the line of the send. Checked with
            `late_sends`, and if messages take time, but not with `memory`. Also for a program that needs CUDA, and
            calls that cannot be made for one rank, such as `os.fork`.
        PeerFailed: a rank called `sys.exit` with an error status. It names the rank.
        Exception: the exception of the first failing rank, with a note that names the rank.
    """
    check_world_size(world_size)
    check_no_keywords("seed", seed)  # before the call without them seems wrong
    call = rank_call(fn, args)
    _check(seed, timeout)
    cost, meter = step_cost(costs), meter_for(costs)
    if callable(faults):
        faults = faults(random.Random(f"faults of {seed}"), world_size)
    plan = FaultPlan(faults, world_size, has_costs=cost is not None or meter is not None)
    if late_sends and memory:
        # The check keeps sent tensors alive, so they would count for longer.
        raise LaunchError("late_sends=True and memory=True: leave one out, because no send is checked with memory=True")
    link, hosts = link_function(network, world_size), host_numbers(network, world_size)
    named = isinstance(network, Network) and network.hosts is not None  # else all ranks are on one, as torchrun's
    make = backend_of(_way_of(collectives, plan, late_sends), _checked_order(order))
    with only_simulation():
        world = World(
            hosts,
            seed=seed,
            link=link,
            faults=plan,
            cost=cost,
            meter=meter,
            measures_memory=memory,
            late_sends=late_sends,
            is_instant=takes_no_time(network),
            follows_plans=order == "tcp",
        )
        process = SharedProcess(world, TorchDistributed(world), fn, hosts if named else (0,) * world_size, seed)
        run = _Run(world, process, call, timeout, make)
        with process.entered(
            replaced(children_with_environment(world.scheduler.is_running_here)),
            replaced(world.resizes_counted()),
            compiled_for_ranks(world.scheduler.rank_here, world_size),
        ):
            run.run()
    return Simulation(
        results=run.results,
        elapsed=run.elapsed,
        seed=seed,
        timeline=world.recorder.timeline(),
        bytes_sent=world.bytes_sent(),
        peak_memory=tuple(memory_meter.peak for memory_meter in world.memory_meters) if memory else None,
        measurements=None if meter is None else meter.measurements(),
        notes=(
            *world.fault_notes(),
            *notes_of(world.lines.values()),
            *process.notes(),
        ),
        events=world.recorder.events,
    )


def _check(seed: object, timeout: object) -> None:
    if not is_count(seed):
        raise LaunchError(f"seed={seed!r}: give a whole number, at least 0, so that the run can be repeated")
    check_default_timeout(timeout, LaunchError)


def _way_of(collectives: object, faults: FaultPlan, late_sends: bool) -> Collectives:
    """Returns how collectives are played."""
    if collectives is None:
        return "messages" if faults.faults or late_sends else "whole"
    if collectives == "messages":
        return "messages"
    if collectives != "whole":
        raise LaunchError(
            f'collectives={collectives!r}: use "whole" or "messages", or None to let the simulation choose'
        )
    if on_messages := faults.on_messages():
        raise LaunchError(
            f'collectives="whole" has no messages for {fault_text(on_messages)}: use collectives="messages"'
        )
    return "whole"


def _checked_order(order: object) -> Order:
    if order == "shm":
        return "shm"
    if order == "tcp":
        return "tcp"
    raise LaunchError(f'order={order!r}: use "shm" or "tcp"')


class _Run:
    """Running simulation: its ranks, their results and their failures."""

    def __init__(
        self,
        world: World,
        process: SharedProcess,
        call: RankCall,
        timeout: float,
        make_backend: Callable[[int, int, World, float], VirtualBackend],
    ) -> None:
        world_size = len(world.hosts)
        self.results: list[Any] = [None] * world_size
        self.elapsed = 0.0
        self._world = world
        self._scheduler = world.scheduler
        self._call = call
        self._timeout = timeout
        self._make_backend = make_backend
        self._num_left = world_size
        self._failures = Failures()
        self._backends: list[VirtualBackend] = []
        self._torch = process.torch
        self._calls = process.calls
        self._disputed: set[int] = set()
        """Contexts whose ranks have got CollectiveMismatch already."""
        self._scheduler.on_stuck = self._explain
        self._scheduler.whereabouts = functools.partial(whereabouts, world)
        self._scheduler.watch = functools.partial(self._watch, watchdog.Watchdog(watchdog.PATIENCE))

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
            self._world.forget()
            self._scheduler.forget()
            self._failures.forget()
        # The error's traceback refers to this frame: without the `del`, frame and error would be a cycle.
        try:
            if error is not None:
                raise error
        finally:
            del error

    def _error(self) -> BaseException | None:
        """Returns the error of the simulation. None if all ranks succeeded."""
        if self._calls.thread_error:  # the ranks may have failed because of it
            return self._calls.thread_error
        if first := self._failures.first():
            error = self._told_in(first.error, first.rank) or first.error
            error.add_note(f"raised on rank {first.rank} of {len(self.results)}{first.where}")
            return error
        return self._scheduler.error or self._world.overwritten or self._world.missed() or self._torch.missed()

    def _told_in(self, error: BaseException, rank: int) -> BaseException | None:
        """Returns the failure of a collective of which only the text came through torch's C++. None if it did not.

        DDP waits for a future in C++, and raises a RuntimeError with the text of the future's error.
        """
        if isinstance(error, EchelonError):
            return None
        failures = self._world.mailboxes[rank].failures.contexts.values()
        found = next((failure for failure in failures if str(failure) in message_of(error)), None)
        if found is not None:
            found.__cause__ = error
        return found

    def _run_rank(self, rank: int) -> None:
        """Body of a rank's main task."""
        # More threads would add in another order. `simulate` restores the caller's number.
        torch.set_num_threads(1)
        backend = self._make_backend(rank, len(self.results), self._world, self._timeout)
        self._backends.append(backend)
        group = ProcessGroup(backend)
        try:
            backend.begin()
            with provide(group), self._torch.rank(group), self._world.memory_meter(backend.rank):
                self.results[rank] = self._call.run(group)
                self._calls.at_exit(rank)
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
                    error = self._calls.needs_cuda(rank, error) or error
                    self._failures.add(rank, error)
                # As the `with` of a real rank would, which tells the others.
                group.__exit__(type(error), error, error.__traceback__)
                self._calls.at_exit(rank)
        finally:
            self._end()

    def _end(self) -> None:
        self.elapsed = max(self.elapsed, self._world.clock.now)
        self._num_left -= 1
        if self._num_left == 0:
            self._scheduler.is_ending = True
            self._scheduler.cancel()

    def _watch(self, dog: watchdog.Watchdog, running: Task | None) -> DeadlockError | None:
        """Returns the error for a running task that can never pass the turn. None if it may."""
        blocked = dog.look(running)
        return None if blocked is None else explain_blocked(self._world, blocked)

    def _explain(self, tasks: Sequence[Task]) -> DeadlockError | None:
        """Returns the error for ranks that wait for ever. None if news could be sent that lets some go on."""
        world = self._world
        # With faults a rank may have returned because of one. It did not call too little by mistake, so the ranks that
        # wait for it get PeerFailed, and there is no deadlock.
        if world.faults.faults and world.tell_of_returned():
            return None
        if self._tell_of_disagreement():
            return None
        return explain(world, tasks, self._torch.mistake())

    def _tell_of_disagreement(self) -> bool:
        """Fails a collective that two ranks called differently, on all ranks. True if there was one."""
        for backend in self._backends:
            for flight in backend.flight_recorder.under_way():
                if flight.sequence and flight.context not in self._disputed:
                    watch = HangDiagnosis(backend, range(backend.world_size), flight, self._world.clock.now)
                    if mismatch := watch.mismatch():
                        self._disputed.add(flight.context)
                        for mailbox in self._world.mailboxes:
                            mailbox.fail_context(flight.context, mismatch)
                        return True
        return False


@refuse_others(**OF_OTHER_LAUNCHERS)
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
    collectives: Collectives | None = "messages",
    order: Order = "shm",
    check: Callable[[Simulation], object] | None = None,
) -> int:
    """Simulates `fn` with one seed after another. Returns the number of seeds tried.

    Stops at the first failing seed and raises its exception. A note of the exception has the call that replays it, and
    stands in its traceback. Nothing is printed: the caller may catch it.

    Args:
        fn, world_size, args, network, costs, faults, late_sends, order: as for `simulate`.
        seeds: the seeds to try.
        collectives: as for `simulate`, but "messages" if it is not given, because the order of messages is explored.
        check: function called with the simulation of each seed. An exception of it is a failure, too. It can check
            conditions that no single rank sees, such as equal results.

    Raises:
        InvalidWorldSize, LaunchError: `world_size` or `args` is invalid, as for `simulate`; there are no seeds, or
            `check` is no function.
        Exception: the exception of the first failing seed.
    """
    if not isinstance(seeds, Iterable):
        raise LaunchError(f"seeds={seeds!r}: give an iterable of seeds, such as range(1000)")
    if check is not None and not callable(check):
        raise LaunchError(f"check={check!r}: give a function of a Simulation")
    check_world_size(world_size)
    rank_call(fn, args)  # not a failure of the first seed
    count = 0
    for seed in seeds:
        try:
            simulation = simulate(
                fn,
                world_size,
                args,
                seed,
                network,
                costs,
                faults,
                late_sends=late_sends,
                collectives=collectives,
                order=order,
            )
            if check is not None:
                check(simulation)
        except Exception as error:  # not KeyboardInterrupt, which is no failure of the seed
            name = getattr(fn, "__name__", repr(fn))
            more = "".join(f", {what}=..." for what, given in _given(args, network, costs, faults) if given)
            more += ", late_sends=True" if late_sends else ""
            more += f", seed={seed}"
            # The way that `simulate` chooses is left out.
            if collectives == "whole" or (collectives == "messages" and not faults and not late_sends):
                more += f', collectives="{collectives}"'
            more += ', order="tcp"' if order == "tcp" else ""
            replay = f"echelon.simulate({name}, {world_size}{more})"
            error.add_note(f"seed {seed} fails, after {count} that passed; to replay it: {replay}")
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
