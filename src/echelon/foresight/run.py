"""`echelon.foresee`: a program recorded on fake tensors, checked, and played on a cluster that is not there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from echelon.arguments import check_path, check_world_size, is_amount, is_count, refuse_others, shown, writing
from echelon.errors import InvalidArgument, LaunchError
from echelon.foresight.advice import Advice, advice_on
from echelon.foresight.calibrate import this_machine
from echelon.foresight.calibration_file import load
from echelon.foresight.check import Problem, check
from echelon.foresight.measure import measured
from echelon.foresight.memory_curves import MemoryCurves
from echelon.foresight.networks import cluster_of
from echelon.foresight.play.cluster import Cluster
from echelon.foresight.play.device import Device
from echelon.foresight.play.devices import device_named
from echelon.foresight.play.fusion import fuse
from echelon.foresight.play.played import Exposed, Played
from echelon.foresight.play.player import play
from echelon.foresight.record.gpu.gpu_names import Gpu
from echelon.foresight.record.run import Request, record_in_turn
from echelon.foresight.report import Report
from echelon.foresight.roles import Roles
from echelon.foresight.trace import GIB, Copy, HostKernel, Trace, alike_layers
from echelon.foresight.what_if import what_ifs
from echelon.launch.call import OF_OTHER_LAUNCHERS, rank_call
from echelon.launch.output import Console
from echelon.launch.run import Program
from echelon.simulation.network import Network
from echelon.simulation.script.run import Failure, failure_of
from echelon.simulation.script.script import Script
from echelon.timeline.timeline import LazySequence, Level, Timeline
from echelon.wording import with_article

_CAPABILITIES = {"ampere": (8, 0), "hopper": (9, 0), "blackwell": (10, 0)}
_PRODUCTS = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "a100-40g": "NVIDIA A100-SXM4-40GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "h100-500w": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
}
"""Names of GPUs as `torch.cuda.get_device_name` gives them, by which scripts find the peak for their MFU."""
_MOST_AT_ONCE = 8
"""Most ranks that are timed at once with real tensors, as ranks of one host share its processors and its memory."""
_LISTED = 8
"""Lines of tensors that a report of too little memory has."""
_LEAST_LISTED = 0.005
"""Least size of such a line, by that of the largest one. Less would read 0.00 GiB."""
_LARGE = 1 << 20
"""Bytes in a step from which on copies, or operators of the host, are worth an assumption: they take 20 us."""
_NOTHING = (
    "has nothing to foresee: no operator of torch, no collective and no step of an optimizer was recorded: give the "
    "script that trains, with the arguments that make it train"
)
"""End of the line about a script whose step takes no time."""

_OF_OTHERS = dict.fromkeys(("nodes", "nnodes", "num_nodes"), "hosts") | {"device": "gpu"}
"""Names that other tools give to arguments."""


@dataclass(frozen=True)
class Foreseen:
    """Result of `foresee`: a step of a program on a cluster."""

    played: Played
    """The step as it was played."""
    traces: Mapping[int, Trace]
    """Recorded step of each role, by the rank that was recorded."""
    classes: tuple[int, ...]
    """Role of each rank: the recorded rank that represents it."""
    found: tuple[Problem, ...]
    """Problems of the program on any hardware."""
    network: Network | str
    """Network that was asked for."""
    asked_hosts: int | Sequence[int] | None = None
    """Hosts that were asked for, as for `foresee`."""

    @property
    def device(self) -> Device:
        """Device of every rank."""
        return self.played.device

    @property
    def cluster(self) -> Cluster:
        """Hosts and network of all ranks."""
        return self.played.cluster

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.classes)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: until the last rank has ended. Of the whole program if it has no optimizer."""
        return self.played.seconds

    def tokens_per_second(self, tokens: float) -> float:
        """Returns tokens per second of the whole job.

        Args:
            tokens: tokens of all ranks in a step.

        Raises:
            InvalidArgument: `tokens` is not a number of at least 0.
        """
        if not is_amount(tokens):
            raise InvalidArgument(f"tokens={shown(tokens)}: give the tokens of all ranks in a step, 0 or more")
        return tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs, without recomputation, divided by the dense bfloat16 peak of all devices: 0 to 1."""
        return self.played.mfu

    @property
    def bubble(self) -> float:
        """Share of a step in which a device computes nothing because it waits for messages, 0 to 1: mean of all ranks.

        0 if the program has no messages between ranks, so no pipeline. The time in which messages are under way counts
        as exposed communication.
        """
        return self.played.bubble

    @cached_property
    def memory(self) -> MemoryCurves:
        """Memory of each role over the step, by the rank that was recorded."""
        return MemoryCurves(self.played, self.played.memory())

    @cached_property
    def peak_memory(self) -> tuple[int, ...]:
        """Most bytes that PyTorch's allocator reserves, by rank."""
        return tuple(self.memory[role].reserved_peak for role in self.classes)

    @cached_property
    def live_memory(self) -> tuple[int, ...]:
        """Most bytes of tensors at once, by rank."""
        return tuple(self.memory[role].live_peak for role in self.classes)

    @cached_property
    def host_memory(self) -> tuple[int, ...]:
        """Most bytes of tensors on the CPU by host, of all its ranks together, such as offloaded parameters."""
        return self.memory.of_hosts

    @property
    def exposed(self) -> Mapping[Exposed, float]:
        """Seconds of communication that no kernel hides, by (group, line), on the rank that ends last."""
        return self.played.exposed

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return self.memory.fits

    @property
    def fits_narrowly(self) -> bool:
        """Whether every rank fits, with less room than the uncounted CUDA context and NCCL buffers need."""
        return self.memory.fits_narrowly

    @cached_property
    def problems(self) -> list[Problem]:
        """Problems that do not keep the program from running, and too little memory."""
        if self.fits:
            return list(self.found)
        return [Problem("out of memory", self._too_little(self.memory.fullest)), *self.found]

    @cached_property
    def advice(self) -> Advice:
        """Changes that may make the fullest role fit."""
        rank = self.memory.fullest
        return advice_on(self.memory[rank], self.traces[rank], self.device.memory_bytes)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumed values of tensors and approximations, each with its line."""
        found = dict.fromkeys(text for trace in self.traces.values() for text in trace.assumptions)
        is_whole = not all(trace.is_step for trace in self.traces.values())
        return (*["no optimizer has stepped: the whole program is one step"] * is_whole, *found, *self._of_player())

    def _of_player(self) -> Iterator[str]:
        """Yields the assumptions of the player, also about copies from and to the host and about its operators."""
        yield from self.played.assumptions
        device = self.device
        kinds: tuple[type[Copy | HostKernel], ...] = Copy, HostKernel
        copied, computed = (
            max(
                sum(entry.num_bytes for entry in trace.entries if isinstance(entry, kind))
                for trace in self.traces.values()
            )
            for kind in kinds
        )
        if copied >= _LARGE:
            speed = device.host_link * device.host_link_share / 1e9
            yield (
                f"copies between the CPU and a GPU move {speed:.0f} GB/s in each direction, also those of memory that "
                "is not pinned, and neither other GPUs nor the other direction slow them down"
            )
        if computed >= _LARGE:
            yield (
                f"operators on tensors of the CPU move {device.host_bandwidth / 1e9:.0f} GB/s on each rank, its share "
                "of the CPU's memory: with a single thread, as torchrun starts ranks, they take several times as long"
            )

    @property
    def skipped(self) -> tuple[str, ...]:
        """Writes to files that were skipped, each with its line."""
        return tuple(dict.fromkeys(text for trace in self.traces.values() for text in trace.skipped))

    @cached_property
    def what_ifs(self) -> tuple[str, ...]:
        """Forecasts of the step with one change, such as faster communication, as sentences."""
        return tuple(what_ifs(self.played, self.traces))

    @cached_property
    def timeline(self) -> Timeline:
        """Step of each role, in seconds, with its communication beside it and its memory in bytes."""
        return replace(
            self.played.timeline(),
            name=f"{self.world_size} x {self.device.name}, foreseen",
            memory=LazySequence(partial(map, self._levels, self.played.roles)),
            memory_unit="B",
        )

    def _levels(self, rank: int) -> list[Level]:
        """Returns the bytes of tensors of a recorded rank over the step."""
        curve = self.memory.curve(rank)
        return list(map(Level, curve.seconds, map(sum, zip(*curve.kinds.values(), strict=True))))

    def _repr_html_(self) -> str:
        from echelon.foresight.page.page import page
        from echelon.timeline.widget.markup import frame

        return frame(page(self, self.report()), title="A foreseen step", height=900)

    @refuse_others(
        **_OF_OTHERS,
        **dict.fromkeys(("num_ranks", "world_size"), " foresee the program again with that number of ranks"),
    )
    def on(
        self,
        gpu: str | Device | None = None,
        hosts: int | Sequence[int] | None = None,
        network: Network | str | None = None,
        rails: int | None = None,
        oversubscription: float | None = None,
    ) -> Foreseen:
        """Returns the same program on other hardware. Plays the step again, and records nothing.

        Args:
            gpu, hosts, network, rails, oversubscription: as for `foresee`. None: as `foresee` was given.

        Raises:
            LaunchError: an argument is invalid, or one of the devices is a processor and the other a GPU.
        """
        device = self.device if gpu is None else _device(gpu)
        if device.is_synchronous != self.device.is_synchronous:
            raise LaunchError(
                f"gpu={device.name!r}: the program was recorded for {self.device.name!r}, which runs other kernels: "
                "foresee it again"
            )
        hosts = self.asked_hosts if hosts is None else hosts
        network = self.network if network is None else network
        cluster = cluster_of(
            network,
            device,
            self.world_size,
            hosts,
            rails=self.cluster.rails if rails is None else rails,
            oversubscription=self.cluster.oversubscription if oversubscription is None else oversubscription,
        )
        traces = self.traces
        if device.machine != self.device.machine:
            # Seconds that were measured are those of another kind of machine.
            traces = {rank: replace(trace, measured=()) for rank, trace in traces.items()}
        played = play(traces, self.classes, device, cluster)
        return replace(self, played=played, traces=traces, network=network, asked_hosts=hosts)

    def report(self, tokens: int | None = None, title: str = "") -> Report:
        """Returns the figures as a report. Its `str` is a table, and its `to_json` returns plain values.

        Args:
            tokens: tokens of all ranks in a step. None: not known.
            title: name of the program.
        """
        problems = [str(problem) for problem in self.problems]
        return Report(
            self.played,
            tokens,
            problems,
            self.assumptions,
            title=title,
            what_ifs=self.what_ifs,
            network=self.network if isinstance(self.network, str) else "a network of its own",
            skipped=self.skipped,
            _memory=self.memory,
        )

    def to_html(self, path: str | os.PathLike[str], tokens: int | None = None, title: str = "") -> None:
        """Writes the report as one HTML file, with timeline and memory. It needs no network.

        Args:
            path: file to write.
            tokens, title: as for `report`.

        Raises:
            InvalidArgument: `path` is not a path.
            FileError: the file cannot be written.
        """
        from echelon.foresight.page.page import page

        check_path(path)
        text = page(self, self.report(tokens, title))
        # Names of files may have bytes that are not text.
        with writing(path), open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)

    def largest_at_peak(self, rank: int) -> list[tuple[str, int]]:
        """Returns the tensors at the peak of a recorded rank as (kind, line and module; bytes), the largest first.

        Layers that differ by their number alone are one entry: "in 32 modules layers.*.attention".

        Raises:
            KeyError: `rank` was not recorded; `traces` has the ranks that were.
        """
        trace = self.traces[rank]
        sizes: dict[tuple[str, str], int] = {}
        modules: dict[tuple[str, str], set[str]] = {}
        for storage in self.memory[rank].alive_at_peak:
            module = trace.modules[storage.module] if storage.module >= 0 else ""
            place = f"{storage.kind} of {trace.line(storage)}", alike_layers(module)
            sizes[place] = sizes.get(place, 0) + storage.num_bytes
            modules.setdefault(place, set()).add(module)
        named = []
        for (line, pattern), size in sizes.items():
            alike = modules[line, pattern]
            where = f"{len(alike)} modules {pattern}" if len(alike) > 1 else next(iter(alike))
            named.append((f"{line} in {where}" if where else line, size))
        return sorted(named, key=lambda item: -item[1])

    def _too_little(self, rank: int) -> str:
        """Returns the text for a rank that does not fit: advice, and a line for each of the largest tensors."""
        memory, largest = self.memory[rank], self.largest_at_peak(rank)[:_LISTED]
        worth = [(where, size) for where, size in largest if size >= _LEAST_LISTED * largest[0][1]]
        others = sum(not each.fits for each in self.memory.values()) - 1
        too = f" ({others} other role{'s do' if others > 1 else ' does'} not fit either)" if others else ""
        head = (
            f"rank {rank} needs at least {memory.needed_peak / GIB:.1f} GiB, {with_article(self.device.name)} has "
            f"{self.device.memory_bytes / GIB:.1f}{too}. {self.advice}. The largest tensors then:"
        )
        return "\n".join((head, *(f"  {size / GIB:.2f} GiB {where}" for where, size in worth)))

    def __str__(self) -> str:
        return str(self.report())


@refuse_others(**OF_OTHER_LAUNCHERS, **_OF_OTHERS)
def foresee(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[object] = (),
    *,
    gpu: str | Device = "h100",
    hosts: int | Sequence[int] | None = None,
    network: Network | str = "infiniband-400g",
    rails: int = 0,
    oversubscription: float = 1.0,
    steps: int | None = None,
    seed: int = 0,
    allow_writes: bool = False,
    until: str | None = None,
    full: bool = False,
) -> Foreseen:
    """Foresees a step of a training program on a cluster. Needs no GPU, and computes nothing.

    The program runs unchanged, with tensors that have shapes but no values: on one rank for each role, such as rank 0,
    the last one, and others that differ from them. Collectives are compared between roles. The recorded step is then
    played on a model of the devices and their network. Files are only written with `allow_writes`.

    On a machine of the kind that `gpu` was calibrated on, each role also runs for some seconds with real tensors, in a
    process of its own. Its kernels then take the time measured there.

    Args:
        fn: function of the ranks, called as by `echelon.simulate`.
        world_size: number of ranks.
        args: arguments of `fn` without the group.
        gpu: device of every rank: its name, the file of `echelon foresee --calibrate`, or a `Device`.
        hosts: number of hosts of equal size, or number of ranks of each. None: those of `network`, else as many as
            needed.
        network: network between the hosts: its name, or a `Network`.
        rails: number of separate networks between hosts. NICs of equal position on their hosts share one. 0: a single
            network.
        oversubscription: bandwidth of a host's NICs, divided by that of its uplink, at least 1. 2: the uplink has half.
        steps: steps to run. The last one is foreseen, the others warm up. A step ends when all optimizers have stepped.
            None: 2, and 3 with a DDP whose graph is static, which overlaps nothing before.
        seed: seed of the random ranks that confirm a role.
        allow_writes: whether the program may write files.
        until: function of the program whose return ends a step, as "train_step" or "train.Trainer.step". None:
            optimizers end it. Recording takes about twice as long, because each call of Python is watched.
        full: whether all microbatches run. Otherwise those that do the same as an earlier one are copied from it.

    Raises:
        InvalidWorldSize, LaunchError: an argument is invalid, or a simulation runs in this process.
        CollectiveMismatch: two ranks call different collectives, or a message has no partner. It names the lines.
        DeadlockError: ranks wait for each other for ever. It names the lines.
        UnsupportedOp: the program has an operation that cannot be foreseen.
        Exception: the exception of the program itself, with a note that names the rank.
    """
    check_world_size(world_size)
    call = rank_call(fn, args)
    if steps is not None and not is_count(steps, 1):
        raise LaunchError(f"steps={steps!r}: give a whole number, at least 1")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise LaunchError(f"seed={shown(seed)}: give a whole number")
    if not isinstance(allow_writes, bool):
        raise LaunchError(f"allow_writes={shown(allow_writes)}: give True or False")
    if not isinstance(full, bool):
        raise LaunchError(f"full={shown(full)}: give True or False")
    if until is not None and not (isinstance(until, str) and all(map(str.isidentifier, until.split(".")))):
        raise LaunchError(f"until={until!r}: give the name of a function, as 'train_step' or 'Trainer.step'")
    device = _device(gpu)
    cluster = cluster_of(network, device, world_size, hosts, rails=rails, oversubscription=oversubscription)
    is_here = bool(device.machine) and device.machine == this_machine()
    roles = Roles(world_size, seed, cluster.hosts[0] if len(set(cluster.hosts)) == 1 else 0)

    def choose(traces: Mapping[int, Trace]) -> Sequence[int]:
        roles.add(traces)
        return roles.next_ranks()

    request = Request(
        fn=fn,
        call=call,
        hosts=tuple(map(cluster.host_of, range(world_size))),
        # DDP rebuilds its buckets in the second step, which a timed step does not do.
        steps=max(steps or 2, 3) if is_here else steps or 2,
        may_add_steps=steps is None,
        gpu=_facts_of(device),
        allow_writes=allow_writes,
        until=until or "",
        full=full,
        keeps_calls=is_here,
    )
    calls = record_in_turn(request, choose).calls
    found = check(roles.traces, roles.classes)
    # The others only confirmed a role.
    traces = {rank: roles.traces[rank] for rank in sorted(set(roles.classes))}
    if is_here:
        traces = measured(request, traces, calls, min(_MOST_AT_ONCE, max(cluster.hosts)))
    # After the measurement, whose positions count single kernels. It leaves programs with compiled ones out.
    traces = {rank: fuse(trace) for rank, trace in traces.items()}
    played = play(traces, roles.classes, device, cluster)
    return Foreseen(played, traces, roles.classes, tuple(found), network, hosts)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a script: its step on the cluster, or its failure."""

    foreseen: Foreseen | None
    failure: Failure | None = None


def foresee_script(program: Program, world_size: int, console: Console, **options: Any) -> Outcome:
    """Foresees a step of a script. Blocks until it is recorded and played.

    Args:
        program: script or module.
        world_size: number of ranks.
        console: destination of the output of recorded ranks.
        options: further arguments of `foresee`.

    Raises:
        EchelonError: an argument is invalid. No rank has begun.
        OSError: the output cannot be written. BrokenPipeError: its reader has gone.
        KeyboardInterrupt: Ctrl-C.
    """
    script = Script(program, console)
    try:
        with script.installed():
            foreseen = foresee(script, world_size, **options)
    except Exception as error:
        script.check_output()
        if not script.has_begun:
            raise
        return Outcome(None, failure_of(error, script))
    if not foreseen.step_seconds:  # a sweep would take it for the fastest step of all
        return Outcome(None, Failure(1, None, f"{program.name} {_NOTHING}"))
    return Outcome(foreseen)


def _device(gpu: str | Device) -> Device:
    if isinstance(gpu, Device):
        return gpu
    if not isinstance(gpu, str):
        raise LaunchError(f"gpu={gpu!r}: give the name of a device, the path of a calibration file, or a Device")
    return load(gpu) if gpu.endswith(".json") else device_named(gpu)


def _facts_of(device: Device) -> Gpu | None:
    if device.is_synchronous:
        return None
    return Gpu(
        _PRODUCTS.get(device.name, device.name),
        device.memory_bytes,
        _CAPABILITIES.get(device.generation, (8, 0)),
        device.num_sms,
    )
