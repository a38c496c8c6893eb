"""`echelon.foresee`: a program recorded on fake tensors, checked, and played on a cluster that is not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from echelon.arguments import check_world_size, is_count
from echelon.errors import LaunchError
from echelon.foresight.check import Problem, check
from echelon.foresight.networks import cluster_of
from echelon.foresight.play.allocator import Memory
from echelon.foresight.play.cluster import Cluster
from echelon.foresight.play.device import Device
from echelon.foresight.play.devices import device_named
from echelon.foresight.play.played import Exposed, Played
from echelon.foresight.play.player import play
from echelon.foresight.record.cuda_names import Gpu
from echelon.foresight.record.run import Request, record_in_turn
from echelon.foresight.report import Report
from echelon.foresight.roles import Roles
from echelon.foresight.trace import Allocate, Trace
from echelon.launch.call import rank_call
from echelon.simulation.network import Network
from echelon.timeline.timeline import Timeline

_CAPABILITIES = {"ampere": (8, 0), "hopper": (9, 0)}
_GIB = 1 << 30
_LISTED = 8
"""Storages that a report of too little memory lists."""


@dataclass(frozen=True)
class Foreseen:
    """Result of `foresee`: a step of a program on a cluster."""

    played: Played
    """The step as it was played."""
    traces: Mapping[int, Trace]
    """Recorded step of each role, by the rank that was recorded."""
    classes: tuple[int, ...]
    """Role of each rank: the recorded rank that stands for it."""
    found: tuple[Problem, ...]
    """Problems of the program, whatever it runs on."""
    network: Network | str
    """Network that was asked for."""

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
        """
        return tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs, without recomputation, by the dense bfloat16 peak of all devices: 0 to 1."""
        return self.played.mfu

    @property
    def bubble(self) -> float:
        """Share of a step in which a device computes nothing because it waits for messages, 0 to 1: mean of all ranks.

        0 if the program has no messages between ranks, as it has no pipeline. The time in which messages are under way
        counts as exposed communication.
        """
        return self.played.bubble

    @cached_property
    def memory(self) -> Mapping[int, Memory]:
        """Memory of each role over the step, by the rank that was recorded."""
        return self.played.memory()

    @cached_property
    def peak_memory(self) -> tuple[int, ...]:
        """Most bytes that PyTorch's allocator reserves, by rank."""
        return tuple(self.memory[role].reserved_peak for role in self.classes)

    @cached_property
    def live_memory(self) -> tuple[int, ...]:
        """Most bytes of tensors at once, by rank."""
        return tuple(self.memory[role].live_peak for role in self.classes)

    @property
    def exposed(self) -> Mapping[Exposed, float]:
        """Seconds of communication that no kernel hides, by (group, line), on the rank where it is longest."""
        return self.played.exposed

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return all(memory.fits for memory in self.memory.values())

    @cached_property
    def problems(self) -> list[Problem]:
        """Problems that do not keep the program from running, and too little memory."""
        lacking = [
            Problem("out of memory", _too_little(self.traces[rank], memory, self.device))
            for rank, memory in self.memory.items()
            if not memory.fits
        ]
        return [*lacking, *self.found]

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumed values of tensors and approximations, each with its line."""
        return tuple(dict.fromkeys(text for trace in self.traces.values() for text in trace.assumptions))

    @property
    def skipped(self) -> tuple[str, ...]:
        """Writes to files that were skipped, each with its line."""
        return tuple(dict.fromkeys(text for trace in self.traces.values() for text in trace.skipped))

    @cached_property
    def timeline(self) -> Timeline:
        """Step of each role, in seconds, with its communication beside it."""
        return self.played.timeline()

    def on(
        self,
        gpu: str | Device | None = None,
        hosts: int | Sequence[int] | None = None,
        network: Network | str | None = None,
    ) -> Foreseen:
        """Returns the same program on other hardware. Plays the step again, and records nothing.

        Args:
            gpu, hosts, network: as for `foresee`. None: as before, but with the hosts that a new device needs.

        Raises:
            LaunchError: an argument is invalid.
        """
        device = self.device if gpu is None else _device(gpu)
        if hosts is None and gpu is None:
            hosts = self.cluster.hosts
        network = self.network if network is None else network
        cluster = cluster_of(network, device, self.world_size, hosts)
        return replace(self, played=play(self.traces, self.classes, device, cluster), network=network)

    def report(self, tokens: int | None = None, title: str = "") -> Report:
        """Returns the figures as a report, of which `str` is a table, and `to_json` has plain values.

        Args:
            tokens: tokens of all ranks in a step. None: not known.
            title: name of the program.
        """
        notes = [*self.assumptions, *(f"{text} was skipped" for text in self.skipped)]
        return Report(self.played, tokens, [str(problem) for problem in self.problems], notes, title=title)

    def __str__(self) -> str:
        return str(self.report())


def foresee(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[object] = (),
    *,
    gpu: str | Device = "h100",
    hosts: int | Sequence[int] | None = None,
    network: Network | str = "infiniband-400g",
    steps: int = 2,
    seed: int = 0,
    allow_writes: bool = False,
) -> Foreseen:
    """Foresees a step of a training program on a cluster. Needs no GPU, and computes nothing.

    The program runs unchanged, with tensors that have shapes but no values: on one rank for each role, as rank 0, the
    last one, and others that differ from them. Collectives are compared between roles. The recorded step is then played
    on a model of the devices and their network. Nothing is written to files.

    Args:
        fn: function of the ranks, called as by `echelon.simulate`.
        world_size: number of ranks.
        args: arguments of `fn` without the group.
        gpu: device of every rank: the name of one, or a `Device`.
        hosts: how many hosts of equal size, or the ranks of each. None: as many as the devices need.
        network: network between the hosts: the name of one, or a `Network`.
        steps: steps to run. The last one is foreseen, the others warm up. A step ends when all optimizers have stepped.
        seed: seed of the random ranks that confirm a role.
        allow_writes: whether the program may write files.

    Raises:
        InvalidWorldSize, LaunchError: an argument is invalid, or a simulation runs in this process.
        CollectiveMismatch: two ranks call different collectives, or a message has no partner. It names both lines.
        DeadlockError: ranks wait for each other for ever. It names the lines.
        UnsupportedOp: the program does what cannot be foreseen. It names the line.
        Exception: the exception of the program itself, with a note that names the rank.
    """
    check_world_size(world_size)
    call = rank_call(fn, args)
    if not is_count(steps, 1):
        raise LaunchError(f"steps={steps!r}: give a whole number, at least 1")
    device = _device(gpu)
    cluster = cluster_of(network, device, world_size, hosts)
    roles = Roles(world_size, seed)

    def choose(traces: Mapping[int, Trace]) -> Sequence[int]:
        roles.add(traces)
        return roles.next_ranks()

    record_in_turn(
        Request(
            fn=fn,
            call=call,
            hosts=tuple(map(cluster.host_of, range(world_size))),
            steps=steps,
            gpu=_facts_of(device),
            allow_writes=allow_writes,
        ),
        choose,
    )
    traces = {rank: roles.traces[rank] for rank in sorted(set(roles.classes))}
    found = check(roles.traces, roles.classes)
    return Foreseen(play(traces, roles.classes, device, cluster), traces, roles.classes, tuple(found), network)


def _device(gpu: str | Device) -> Device:
    if isinstance(gpu, Device):
        return gpu
    if not isinstance(gpu, str):
        raise LaunchError(f"gpu={gpu!r}: give the name of a device, or a Device")
    return device_named(gpu)


def _facts_of(device: Device) -> Gpu:
    return Gpu(device.name, device.memory_bytes, _CAPABILITIES.get(device.generation, (8, 0)), device.num_sms)


def _too_little(trace: Trace, memory: Memory, device: Device) -> str:
    """Returns the text for a rank that does not fit, with the largest storages at its peak by line and module."""
    kinds = ", ".join(f"{kind} {size / _GIB:.1f}" for kind, size in memory.kinds_at_peak.items() if size > _GIB // 20)
    largest: dict[str, int] = {}
    for storage in memory.alive_at_peak:
        where = _where(trace, storage)
        largest[where] = largest.get(where, 0) + storage.num_bytes
    shown = sorted(largest.items(), key=lambda item: -item[1])[:_LISTED]
    lines = "; ".join(f"{size / _GIB:.2f} GiB {where}" for where, size in shown)
    return (
        f"rank {trace.rank} needs {memory.reserved_peak / _GIB:.1f} GiB, a {device.name} has "
        f"{device.memory_bytes / _GIB:.1f}: tensors at the peak in GiB: {kinds}; the largest: {lines}: use a smaller "
        "batch, activation checkpointing, or more ranks"
    )


def _where(trace: Trace, storage: Allocate) -> str:
    place = trace.places[storage.place] if storage.place >= 0 else "an unknown line"
    module = f" in {trace.modules[storage.module]}" if storage.module >= 0 else ""
    return f"{storage.kind} of {place}{module}"
