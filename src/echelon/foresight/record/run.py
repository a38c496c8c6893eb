"""Run of a program on some ranks of a world that is not there, which records a step of each of them.

Strategy. Ranks are simulated ranks: threads that take turns, each with its own state of the process. One runs to its
end before the next begins, because communication of fake tensors needs no other rank. A rank waits for another only for
real values that it alone has, such as those of a broadcast. The first ranks run in this process; later ones in child
processes, if that saves time (`processes`), with the same traces.
"""

from __future__ import annotations

import functools
import gc
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # before ranks compute on fake tensors, which its constants would be

from echelon._torch_private.distributed import DistributedBackendOptions
from echelon._torch_private.tensors import real_tensors, recorded_tensors
from echelon.backends.admission import taking_fake_tensors
from echelon.backends.work import DEFAULT_TIMEOUT
from echelon.errors import EchelonError
from echelon.foresight.record.files.saved import Saved
from echelon.foresight.record.files.writes import no_writes
from echelon.foresight.record.gpu.allocator_settings import AllocatorSettings, allocator_settings
from echelon.foresight.record.gpu.compiling import not_compiled
from echelon.foresight.record.gpu.device import OnDevice, OnHost
from echelon.foresight.record.gpu.device_names import device_names
from echelon.foresight.record.gpu.gpu_names import Gpu
from echelon.foresight.record.here import Recording, recorded, recording_here
from echelon.foresight.record.log.calls import Answers, Calls
from echelon.foresight.record.log.log import Log
from echelon.foresight.record.log.memory import Memory
from echelon.foresight.record.log.modules import Modules
from echelon.foresight.record.log.placement import Placement
from echelon.foresight.record.log.repeats import NotRepeated, Repeats, can_repeat, microbatches_repeated
from echelon.foresight.record.ranks.communication import RecordedGroup
from echelon.foresight.record.ranks.exchange import Exchange, RecordingBackend
from echelon.foresight.record.ranks.processes import Children, Recorded, can_fork, has_device_threads
from echelon.foresight.record.ranks.threads import Threads, threads_of_ranks
from echelon.foresight.record.recorder import Recorder
from echelon.foresight.record.refusals import not_pickled, refused
from echelon.foresight.record.routing import Routing
from echelon.foresight.record.steps import Steps, StepsDone, Timing, steps_noted
from echelon.foresight.record.until import Until
from echelon.foresight.trace import Message, Trace
from echelon.group.group import ProcessGroup
from echelon.hint import Hint
from echelon.interop.torch_distributed import make_group
from echelon.launch.call import RankCall, rank_call
from echelon.launch.init import provide
from echelon.replacements import replaced
from echelon.simulation import watchdog
from echelon.simulation.boundary import StoreWait
from echelon.simulation.deadlock import explain
from echelon.simulation.failures import Failures
from echelon.simulation.process.shared import SharedProcess, only_simulation
from echelon.simulation.process.state import ProgramWithStates
from echelon.simulation.process.torch_distributed import TorchDistributed
from echelon.simulation.scheduler import Ended, Task
from echelon.simulation.world import World

_BACKEND = "echelon-recorded"
"""Name under which torch.distributed makes groups of recorded ranks."""

_NOT_MODELLED = frozenset({"gloo", "mpi", "ucc"})
"""Backends of torch.distributed that are timed as another one."""

MANY_ENTRIES = 20_000
"""Entries of ranks, a few seconds' work, above which child processes record them. A fork takes hundredths of one."""
MANY_RANKS = 16
"""Size of a world above which even the first ranks are recorded in child processes."""

Choose: TypeAlias = Callable[[Mapping[int, Trace]], Sequence[int]]
"""Function that returns the ranks to record next. It gets the traces so far, by rank."""


class Request(NamedTuple):
    """Program to record."""

    fn: object
    """Function of the ranks."""
    call: RankCall
    """Call that each rank makes of it."""
    hosts: tuple[int, ...]
    """Number of each rank's host."""
    steps: int = 2
    """Steps to run. The last one is recorded."""
    may_add_steps: bool = False
    """Whether more steps may run if the last one would be unlike later ones."""
    gpu: Gpu | None = Gpu()
    """Facts that the program may ask for. None: its hosts have no GPUs."""
    allow_writes: bool = False
    """Whether the program may write files."""
    until: str = ""
    """Function whose return ends a step. Empty: optimizers do."""
    timing: Timing | None = None
    """Steps to time with real tensors, on one rank alone. None: steps are recorded with fake tensors."""
    answers: Answers = ()
    """Calls of that rank in an earlier recording."""
    full: bool = False
    """Whether all microbatches run, even if they repeat an earlier one."""
    keeps_calls: bool = False
    """Whether the calls of all ranks are wanted. All ranks are then recorded in this process."""


class Records(NamedTuple):
    """Steps of recorded ranks, and the calls of all their steps."""

    traces: dict[int, Trace]
    calls: dict[int, Answers]
    """By rank, until the end of the last step. Empty unless they are wanted, see `Request.keeps_calls`."""


def record(
    fn: Callable[..., Any],
    world_size: int,
    ranks: Sequence[int] = (0,),
    *,
    args: Sequence[object] = (),
    gpu: Gpu | None = Gpu(),  # noqa: B008 # it cannot be changed
    full: bool = False,
    ranks_per_host: int | None = None,
) -> dict[int, Trace]:
    """Records the second step of a program, on some ranks. Blocks until they have ended.

    The program runs unchanged, with tensors that have shapes but no values. Nothing is computed.

    Args:
        fn: function of the ranks, called as by `echelon.simulate`.
        world_size: number of ranks of the world.
        ranks: ranks to record. Further ranks are run if one of them needs their values, and are recorded too.
        args: arguments of `fn` without the group.
        gpu: facts that the program may ask for. None: its hosts have no GPUs.
        full: whether all microbatches run, even those that repeat an earlier one.
        ranks_per_host: None: all ranks are on one host, of at most 128, since torch numbers devices with 7 bits.

    Returns:
        The trace of each recorded rank.

    Raises:
        LaunchError: an argument is invalid, or a simulation runs in this process.
        DeadlockError: recorded ranks wait for real values of each other for ever.
        CollectiveMismatch: recorded ranks disagree on a collective of real values.
        Exception: the exception of the first failing rank, with a note that names the rank.
    """
    hosts = tuple(rank // (ranks_per_host or world_size) for rank in range(world_size))
    request = Request(fn, rank_call(fn, args), hosts, gpu=gpu, full=full)
    return record_in_turn(request, lambda traces: [] if traces else ranks).traces


def record_in_turn(request: Request, choose: Choose) -> Records:
    """Records ranks of a program; see `record`.

    Args:
        request: the program.
        choose: returns the ranks to record next, and gets those recorded so far. No ranks end the recording.
    """
    try:
        return _record_in_turn(request, choose)
    except NotRepeated:
        return _record_in_turn(request._replace(full=True), choose)


def _record_in_turn(request: Request, choose: Choose) -> Records:
    recorded_tensors()  # imports torch's compiler, which has to see the names of torch.cuda as they are
    with only_simulation(), _collected_by_hand():
        world = World(request.hosts)
        # Events of one time come in the order in which they were queued: no other order is explored here.
        world.clock.draw = lambda: 0.0
        run = _Run(world, request, choose)
        with run.process.entered(
            device_names(max(Counter(request.hosts).values()), request.gpu),
            steps_noted(),
            no_writes(run.saved, allow_files=request.allow_writes),
            replaced([*not_compiled(), *not_pickled(), *threads_of_ranks()]),
            replaced([] if request.full or not can_repeat() else microbatches_repeated()),
        ):
            return run.run()


@contextmanager
def _collected_by_hand() -> Iterator[None]:
    """Inside, the garbage collector runs only when it is called: memory is freed at the same place in every run."""
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()  # older objects are frozen, so it takes no time
        gc.unfreeze()
        if was_enabled:
            gc.enable()


class _NotAlone(Exception):
    """A rank in a child process needs another one."""


class _Run:
    """Recording of some ranks."""

    def __init__(self, world: World, request: Request, choose: Choose) -> None:
        self.traces: dict[int, Trace] = {}
        self.answers: dict[int, Answers] = {}
        self._world = world
        self._request = request
        self._choose = choose
        self._started: set[int] = set()
        self._failures = Failures()
        self._backends: list[RecordingBackend] = []
        self._exchange = Exchange(self._start, self._started.__contains__)
        self.saved = Saved()
        self._num_left = 0
        self._recordings: dict[int, Recording] = {}
        """Of ranks that run now."""
        self._dog = watchdog.Watchdog(watchdog.PATIENCE)
        self._may_fork = not has_device_threads()
        self._in_children: set[int] = set()
        """Ranks that were recorded in child processes."""
        self._is_child = False
        self._facts: dict[tuple[Any, ...], str] = {}
        """Digests of the values that ranks in children have contributed to collectives."""
        torch_distributed = TorchDistributed(world, _BACKEND, self._note_group)
        self.process = SharedProcess(world, torch_distributed, request.fn, request.hosts)
        world.scheduler.on_stuck = self._help

    def run(self) -> Records:
        try:
            while chosen := self._choose(self.traces):
                if not self._record_in_children(chosen):
                    self._record(chosen)
        finally:
            for backend in self._backends:
                backend.forget()
            self._world.forget()
            self._world.scheduler.forget()
            self._failures.forget()
        return Records(dict(sorted(self.traces.items())), self.answers)

    def _note_group(self, group: Any, asked: str, device: torch.device | int | None) -> None:
        """Notes the backend of a group, and the device for which the program makes it.

        That is whether its times are modelled, whether it takes tensors of the host, and whether it is NCCL.
        """
        names = dict(each.split(":", 1) for each in asked.split(",")) if ":" in asked else {"cuda": asked, "cpu": asked}
        modelled = ("cpu", "echelon") if self._request.gpu is None else ("cuda", "nccl")
        name = names.get(modelled[0], "")
        if isinstance(group, RecordedGroup) and set(asked.split(",")) <= {"nccl", "cuda:nccl"}:
            group.takes_gpu_only = "nccl"
        # torch's own choice for GPUs is NCCL.
        if isinstance(group, RecordedGroup) and names.get("cuda") in ("nccl", "undefined"):
            own = self._request.hosts[group.ranks[group.rank()]]
            group.shares_by_nccl = sum(self._request.hosts[each] == own for each in group.ranks) > 1
        if device is not None and (recording := recording_here()) is not None:
            recording.log.gpus.name(device if isinstance(device, int) else device.index)
        if name in _NOT_MODELLED and (recording := recording_here()) is not None:
            recording.log.assume(f"communication of backend {name!r} takes the time of {modelled[1]!r}")

    def _record(self, ranks: Sequence[int]) -> None:
        """Records ranks in this process."""
        # Contributions of ranks in child processes are lost: these ranks run again if another one needs them.
        self._started.difference_update(self._in_children)
        self._world.scheduler.begin_anew()
        for rank in ranks:
            self._start(rank)
        if self._request.timing is None:  # ranks that are timed wait for each other
            self._dog = watchdog.Watchdog(watchdog.PATIENCE)
            self._world.scheduler.watch = self._watch
        try:
            self._world.scheduler.run()
        finally:
            for each in list(self._recordings.values()):  # of ranks that wait for ever
                if each.threads is not None:
                    each.threads.end()
            self._recordings.clear()
        if error := self._error():
            raise error
        # The collector does not look at objects of these ranks again: otherwise it takes longer with each rank.
        gc.collect()
        gc.freeze()

    def _watch(self, running: Task | None) -> EchelonError | None:
        """Returns the error that ends the recording of a rank which waits for a thread for ever. None if it may not."""
        if self.process.calls.thread_error:
            return self.process.calls.thread_error
        blocked = self._dog.look(running)
        recording = None if running is None else self._recordings.get(running.rank)
        if recording is None or (threads := recording.threads) is None:
            return None
        if recording.steps.are_done and threads.have_started and not threads.has_ended:
            # The program is ended early, perhaps while a thread waits for a place in a queue.
            if self._dog.is_idle:
                threads.leave()
                self._dog = watchdog.Watchdog(watchdog.PATIENCE)
            return None
        return None if blocked is None else threads.never_woken(blocked.task.rank, blocked.task.ident)

    # In children

    def _record_in_children(self, ranks: Sequence[int]) -> bool:
        """Records ranks in child processes. Returns False, without effect, if this process has to record them."""
        if not self._is_worth_forking(ranks):
            return False
        children = Children(
            self._exchange.mail, self._started.__contains__, self._record_alone, self.process.calls.cores
        )
        found = children.run(ranks)
        if found is None or not self._have_equal_values(found.values()):
            self._may_fork = False
            return False
        self._started.update(found)
        self._in_children.update(found)
        for _, each in sorted(found.items()):
            self.saved.add(each.saved)
        self.traces.update((rank, each.trace) for rank, each in found.items())
        return True

    def _is_worth_forking(self, ranks: Sequence[int]) -> bool:
        if (
            self._request.keeps_calls
            or not self._may_fork
            or self._exchange.undelivered.is_used
            or len(self.process.calls.cores) < 2
            or not can_fork()
        ):
            return False
        if not self.traces:  # the program's length is not known yet, nor whether it is a pipeline
            # A function that takes a group is written for Echelon, whose ranks need each other's values.
            is_ordinary = isinstance(self._request.fn, ProgramWithStates) or not self._request.call.takes_group
            return is_ordinary and len(self._request.hosts) > MANY_RANKS
        entries = [entry for trace in self.traces.values() for entry in trace.entries]
        # The last stage of a pipeline starts all stages before it.
        num_ranks = 2 if len(ranks) == 1 and any(isinstance(entry, Message) for entry in entries) else len(ranks)
        return num_ranks > 1 and num_ranks * len(entries) > MANY_ENTRIES * len(self.traces)

    def _record_alone(self, rank: int) -> Recorded:
        """Records one rank in a child process."""
        self._is_child = True
        self.saved.take_new()
        self._record([rank])
        if self._exchange.undelivered.is_used:
            raise _NotAlone
        return Recorded(self.traces[rank], self._exchange.facts(rank), self.saved.take_new())

    def _have_equal_values(self, found: Iterable[Recorded]) -> bool:
        """Whether all ranks have contributed equal values to collectives, so that none misses values of others."""
        known = self._exchange.facts() | self._facts
        for each in found:
            for key, fact in each.facts.items():
                if known.setdefault(key, fact) != fact:
                    return False
            self._facts |= each.facts
        return True

    def _start(self, rank: int) -> Task | None:
        """Starts a rank, unless it was started before."""
        if rank in self._started:
            return None
        if self._is_child and self._num_left:
            raise _NotAlone
        self._started.add(rank)
        self._num_left += 1
        return self._world.scheduler.add(rank, functools.partial(self._run_rank, rank))

    def _help(self, waiting: Sequence[Task]) -> EchelonError | None:
        """Starts the next rank if one waits for a key of a store, which any rank may set. Else returns the deadlock."""
        left = [] if self._is_child else [rank for rank in range(len(self._request.hosts)) if rank not in self._started]
        if left and any(isinstance(task.awaits, StoreWait) for task in waiting):
            self._start(left[0])
            return None
        return explain(self._world, waiting)

    def _recording(self, rank: int) -> Recording:
        """Returns a new recording of a rank."""
        request = self._request
        clock = time.thread_time if request.timing is None else request.timing.clock
        num_gpus = 0 if request.gpu is None else request.hosts.count(request.hosts[rank])
        log = Log(Calls(request.answers, clock, request.keeps_calls), num_gpus)
        memory, routing = Memory(log), Routing(log.assume)
        repeats = None
        # Calls are compared with those of real tensors, where all microbatches run.
        if can_repeat() and not request.full and not request.keeps_calls and request.timing is None:
            repeats = Repeats(log, memory, routing, request.steps)
        steps = Steps(
            log, memory, request.steps, not request.until, request.timing, repeats, may_add_steps=request.may_add_steps
        )
        placement = None if request.gpu is None or request.timing is not None else Placement(log, memory)
        threads = Threads(self.process.calls.fail) if request.timing is None else None
        return Recording(rank, log, memory, routing, steps, placement, repeats, threads)

    def _run_rank(self, rank: int) -> None:
        """Runs the program on a rank, in the rank's thread, and keeps its trace."""
        self._prepare_thread()
        backend = self._backend(rank)
        group = ProcessGroup(backend)
        try:
            backend.begin()
            recording = self._recording(rank)
            until = Until(self._request.until) if self._request.until else None
            with provide(group), self.process.torch.rank(group), recorded(recording), ExitStack() as stack:
                self._recordings[rank] = recording
                self._enter_modes(recording, stack)
                self._run_program(group, recording.steps, until)
                self.process.calls.at_exit(rank)
            self._end_threads(recording)
            if until and not recording.steps.num_done:
                raise until.missing(rank)
            self._keep(recording)
            self._world.returned.add(rank)
        except Ended:
            raise
        except BaseException as error:
            if not self._world.scheduler.is_ending:
                self._hint_at_skipped(rank, error)
                self._failures.add(rank, refused(error))
                self._end_others()
        finally:
            self._num_left -= 1
            if self._num_left == 0:
                self._end_others()

    def _end_threads(self, recording: Recording) -> None:
        """Ends the threads of a rank, and notes that they took no time."""
        self._recordings.pop(recording.rank, None)
        if (threads := recording.threads) is not None:
            threads.end()
            if threads.line:
                recording.log.assumptions.of(
                    f"kernels and copies in threads of the program take no time, as those at {threads.line}"
                )

    def _prepare_thread(self) -> None:
        torch.set_num_threads(1)  # as simulated ranks, which share a core
        # Of a build without NCCL. No operation takes time, so there are no timeouts either.
        warnings.filterwarnings("ignore", "Attempted to get default timeout for nccl|Set timeout is now only supported")
        if self._request.gpu is not None:  # not true of the mesh of GPUs, which one of CPUs represents
            warnings.filterwarnings(
                "ignore", r"DTensor (random operators|manual_seed\(\)) may not have complete support"
            )

    def _backend(self, rank: int) -> RecordingBackend:
        hosts = self._request.hosts
        backend = RecordingBackend(rank, len(hosts), self._world, DEFAULT_TIMEOUT, self._exchange)
        self._backends.append(backend)
        if self._request.gpu is not None:
            backend.device = torch.device("cuda", hosts[:rank].count(hosts[rank]))
        return backend

    def _enter_modes(self, recording: Recording, stack: ExitStack) -> None:
        """Enters the modes in which the program runs: on fake tensors unless its steps are timed."""
        if self._request.timing is not None:
            # A timed step collects its garbage as the program does by itself.
            gc.enable()
            return
        Modules(recording.log, recording.memory, recording.placement).watch()
        stack.enter_context(taking_fake_tensors())
        mode = stack.enter_context(recorded_tensors())
        if recording.threads is not None:
            recording.threads.mode = mode
        stack.enter_context(OnHost() if self._request.gpu is None else OnDevice())
        stack.enter_context(Recorder(recording))

    def _run_program(self, group: ProcessGroup, steps: Steps, until: Until | None) -> None:
        """Runs the program until its last step has ended, or to its own end."""
        try:
            with until.watched(steps.finish) if until else nullcontext():
                self._request.call.run(group)
            steps.end_program()
        except StepsDone:
            pass
        except SystemExit as error:
            if error.code:
                raise

    def _keep(self, recording: Recording) -> None:
        """Keeps the trace of a rank that has ended, and its calls if they are wanted."""
        rank, log, steps, repeats = recording.rank, recording.log, recording.steps, recording.repeats
        if steps.entries is None and repeats is not None and repeats.num_repeated:
            raise NotRepeated  # no step was kept, of which the last microbatch had to run
        if log.gpus.count > 1 and not log.gpus.named and dist.is_initialized():
            log.assumptions.of(
                "each rank has a GPU of its own, though it names none: torch.cuda.set_device(LOCAL_RANK) does"
            )
        # Now: programs set variables, too.
        settings = AllocatorSettings() if self._request.gpu is None else allocator_settings(os.environ)
        if settings.assumption:
            log.assumptions.of(settings.assumption)
        self.traces[rank] = replace(
            steps.trace(rank, len(self._request.hosts)),
            first_gpu=self._first_gpu(rank, log),
            has_expandable_segments=settings.has_expandable_segments,
        )
        if self._request.keeps_calls:
            self.answers[rank] = log.calls.of_all_steps()

    def _hint_at_skipped(self, rank: int, error: BaseException) -> None:
        """Adds a hint to an error about a file that is not there, if the program's writes were skipped."""
        recording = self._recordings.get(rank)
        if isinstance(error, FileNotFoundError) and recording is not None:
            for first in islice(recording.log.skipped, 1):
                error.add_note(
                    Hint(
                        f"writes of the program are skipped, such as {first}: make files that it needs, as a cache of "
                        "data, before, or pass --allow-writes (allow_writes=True)"
                    )
                )

    def _end_others(self) -> None:
        """Ends the ranks that have not ended yet."""
        self._world.scheduler.is_ending = True
        self._world.scheduler.cancel()

    def _first_gpu(self, rank: int, log: Log) -> tuple[int, str] | None:
        """Returns the number of a rank on its host, and the line that uses cuda:0, see `Trace.first_gpu`."""
        sees_one = bool(seen := os.environ.get("CUDA_VISIBLE_DEVICES", "")) and "," not in seen
        gpus, hosts = log.gpus, self._request.hosts
        if sees_one or not gpus.shares_by_nccl or not gpus.first_line or not gpus.named <= {0}:
            return None
        return hosts[:rank].count(hosts[rank]), gpus.first_line

    def _error(self) -> BaseException | None:
        if self.process.calls.thread_error:  # the ranks may have failed because of it
            return self.process.calls.thread_error
        if first := self._failures.first():
            if not isinstance(first.error, EchelonError):
                first.error.add_note(f"raised on rank {first.rank}{first.where}")
            return first.error
        return self._world.scheduler.error


def _make(options: DistributedBackendOptions, _: object) -> RecordedGroup:
    with real_tensors():
        return RecordedGroup(*make_group(options))


dist.Backend.register_backend(_BACKEND, _make, extended_api=True, devices=["cpu"])
