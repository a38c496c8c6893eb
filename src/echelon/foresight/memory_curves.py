"""Memory of each role over a step, by kind, and its picture."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from echelon.errors import LaunchError
from echelon.foresight.play.allocator import Memory, memory_of
from echelon.foresight.play.played import Played, PlayedRole
from echelon.foresight.trace import DEFAULT_STREAM, GIB, Allocate, Collective, Free, MemoryKind, Message
from echelon.timeline.palette import COLORS, THEMES, Tone

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS: tuple[MemoryKind, ...] = ("parameters", "optimizer", "gradients", "activations", "communication", "other")
"""Kinds of tensors, from the bottom of a stack to its top: the state of training first, since it is always there."""

NAMES: Mapping[MemoryKind, str] = {"optimizer": "optimizer state", "communication": "communication buffers"}
"""Names of kinds in a legend, where they differ from the kind."""

TONES: Mapping[MemoryKind, Tone] = {
    "parameters": "compute",
    "optimizer": "optimizer",
    "gradients": "B",
    "activations": "F",
    "communication": "all_gather",
    "other": "recompute",
}
"""Colours of kinds: those of the work that produces them, where there is such work."""

_CONTEXT = GIB // 2
"""Bytes of CUDA's context and libraries.

An error of PyTorch on an A100 with 80 GB leaves 0.51 GiB for them: Lightning-AI/litgpt, tutorials/oom.md.
"""
_OF_GROUP = 688 << 20
"""Bytes of NCCL's buffers for a process group of A100 with NVLink: NVIDIA/nccl, issue 964. A group of two takes 544."""
_OF_PEER = 3_280_000_000 // 7
"""Bytes of NCCL's buffers for each other GPU of a host in an all-to-all.

On a host of 8 H100 the first one took 3.28 GB: NVIDIA/nccl, issue 1685.
"""
POINTS = 1000
"""Intervals of a curve, each with at most two points. A picture does not show more."""


class Curve(NamedTuple):
    """Memory of one rank: values that hold from a point in time until the next one."""

    seconds: tuple[float, ...]
    kinds: Mapping[MemoryKind, tuple[int, ...]]
    """Bytes of tensors at each point, by kind. Kinds that never occur are left out."""
    reserved: tuple[int, ...]
    """Bytes that the allocator has reserved at each point."""


@dataclass(frozen=True, repr=False)
class MemoryCurves(Mapping[int, Memory]):
    """Memory of each role over a step, by the rank that was recorded.

    Args:
        played: The step.
        memories: Memory of each role.
    """

    played: Played
    memories: Mapping[int, Memory]

    def __getitem__(self, rank: int) -> Memory:
        return self.memories[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self.memories)

    def __len__(self) -> int:
        return len(self.memories)

    def __repr__(self) -> str:
        return f"<Memory of {len(self)} roles, the fullest is that of rank {self.fullest}>"

    @property
    def fullest(self) -> int:
        """Rank of the role with the highest peak of tensors, among the roles that do not fit if there are such ones.

        The lowest rank if several have it.
        """
        return max(self, key=lambda rank: (not self[rank].fits, self[rank].live_peak, -rank))

    @property
    def of_hosts(self) -> tuple[int, ...]:
        """Most bytes of tensors on the CPU by host, of all its ranks together, such as offloaded parameters."""
        cluster = self.played.cluster
        sizes = [0] * len(cluster.hosts)
        for rank in range(self.played.world_size):
            sizes[cluster.host_of(rank)] += self.memories[self.played.classes[rank]].host_peak
        return tuple(sizes)

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return all(memory.fits for memory in self.memories.values())

    def uncounted(self, rank: int) -> int:
        """Returns the bytes that a recorded rank's GPU needs for CUDA's context and NCCL's buffers, roughly.

        PyTorch's allocator does not see them, so no other figure counts them. 0 on processors.
        """
        return self._uncounted[rank]

    @cached_property
    def _uncounted(self) -> Mapping[int, int]:
        is_here = self.played.device.is_synchronous
        return {rank: 0 if is_here else _CONTEXT + self._of_nccl(rank) for rank in self}

    def _of_nccl(self, rank: int) -> int:
        trace, host_of = self.played.roles[rank].program.trace, self.played.cluster.host_of
        calls = {(each.group, each.kind) for each in trace.entries if isinstance(each, Collective | Message)}
        groups = {group for group, _ in calls if len(trace.groups[group].ranks) > 1}
        of_all_to_all = [trace.groups[group].ranks for group, kind in calls if kind == "all_to_all"]
        others = [other for ranks in of_all_to_all for other in ranks if other != rank]
        return _OF_GROUP * len(groups) + _OF_PEER * sum(host_of(other) == host_of(rank) for other in others)

    def left(self, rank: int) -> int:
        """Returns the bytes of a recorded rank's device that PyTorch's allocator leaves free."""
        return self.played.device.memory_bytes - self[rank].needed_peak

    @property
    def tightest(self) -> int:
        """Rank of the role with the least room beside the memory that is not counted."""
        return min(self, key=lambda rank: (self.left(rank) - self.uncounted(rank), rank))

    @property
    def fits_narrowly(self) -> bool:
        """Whether every rank fits, and one of them leaves less room than the memory that is not counted needs."""
        return self.fits and self.left(self.tightest) < self.uncounted(self.tightest)

    @cached_property
    def retries_beside_uncounted(self) -> int | None:
        """Most times in a step that a rank empties its cache, beside CUDA's context and NCCL's buffers.

        None if a rank does not fit then. 0 if all have more room than that.
        """
        limit, retries = self.played.device.memory_bytes, 0
        for rank in self:
            if self.left(rank) < self.uncounted(rank):
                memory = memory_of(self.played.roles[rank].program.trace, limit - self.uncounted(rank))
                if not memory.fits:
                    return None
                retries = max(retries, memory.retries)
        return retries

    @property
    def fitting_share(self) -> float:
        """Share of the fullest role's activations that would fit: 1 or more if all do, 0 if nothing else fits either.

        Roughly the share of the batch. Parameters, gradients, the optimizer's state and buffers of communication stay.
        """
        rank = self.fullest
        kinds = self[rank].kinds_at_peak
        scaling = sum(kinds.get(kind, 0) for kind in ("activations", "other"))
        room = self.played.device.memory_bytes - self.uncounted(rank) - (sum(kinds.values()) - scaling)
        return max(0.0, room / scaling) if scaling else float(room >= 0)

    def curve(self, rank: int | None = None, points: int = POINTS) -> Curve:
        """Returns the memory of a rank over the step.

        The clock is that of the kernels: a tensor is allocated when the kernel before it has ended. The host, which
        calls the allocator, is ahead of them by a time that the program cannot see.

        Args:
            rank: any rank. None: the fullest role.
            points: intervals of time, each with at most two points.

        Raises:
            LaunchError: there is no such rank.
        """
        role = self.fullest if rank is None else self._role_of(rank)
        return _curve(self.played.roles[role], self.memories[role], points)

    def draw(self, path: str | os.PathLike[str], rank: int | None = None) -> None:
        """Draws the memory of a rank over the step into a file, as SVG, PNG or PDF by its suffix.

        Args:
            path: file to write.
            rank: any rank. None: the fullest role.

        Raises:
            LaunchError: there is no such rank.
            EchelonError: matplotlib is not installed, or the suffix is none of .svg, .png and .pdf.
            FileError: the file cannot be written.
        """
        from echelon.timeline.drawing import save

        role = self.fullest if rank is None else self._role_of(rank)
        device = self.played.device
        title = f"memory of rank {role if rank is None else rank} on {device.name}"
        save(lambda: _figure_of(self.curve(role), self.memories[role], device.memory_bytes, title), path)

    def _role_of(self, rank: int) -> int:
        if type(rank) is not int or not 0 <= rank < self.played.world_size:
            raise LaunchError(f"rank={rank!r}: give a rank below {self.played.world_size}")
        return self.played.classes[rank]


def highest(curve: Curve, limit: int) -> float:
    """Returns the bytes at the upper edge of a picture. The limit is left out where it would make the rest flat."""
    most = max(*curve.reserved, *map(sum, zip(*curve.kinds.values(), strict=True)))
    return 1.08 * (most if limit > 2 * most else max(most, limit)) or 1.0


def limit_text(curve: Curve, limit: int) -> str:
    """Returns the name of the limit in a legend."""
    return f"limit, {limit / GIB:.1f} GiB{' (above)' if limit > highest(curve, limit) else ''}"


class _Moment(NamedTuple):
    """Bytes from a point in time on."""

    seconds: float
    reserved: int
    kinds: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.kinds)


def _curve(role: PlayedRole, memory: Memory, points: int) -> Curve:
    moments = _moments(role, memory)
    # A step that launches no kernel takes no time.
    width = role.seconds / points or 1.0
    kept = [moments[0]]
    # Of each interval the fullest moment is kept, so that no peak is lost, and the last one, which lasts.
    for _, interval in groupby(moments[1:], lambda moment: int(moment.seconds / width)):
        changes = list(interval)
        fullest = max(range(len(changes)), key=lambda index: changes[index].total)
        # The stride takes two moments, or one if the fullest is the last.
        kept += changes[fullest :: len(changes) - 1 - fullest or 1]
    # The last moment lasts until the end of the step.
    kept.append(kept[-1]._replace(seconds=role.seconds))
    times, reserved, samples = zip(*kept, strict=True)
    stack = zip(KINDS, zip(*samples, strict=True), strict=True)
    return Curve(times, {kind: sizes for kind, sizes in stack if any(sizes)}, reserved)


def _moments(role: PlayedRole, memory: Memory) -> list[_Moment]:
    """Returns the memory after each allocation and each free."""
    trace = role.program.trace
    ends = {kernel.entry: kernel.end for kernel in role.kernel_times() if kernel.stream == DEFAULT_STREAM}
    sizes: dict[MemoryKind, int] = dict.fromkeys(KINDS, 0)
    alive: dict[int, Allocate] = {}
    for state in trace.live:
        if not state.on_host:
            alive[state.storage] = state
            sizes[state.kind] += state.num_bytes
    reserved = dict(memory.reserved)
    moments = [_Moment(0.0, reserved[-1], tuple(sizes.values()))]
    time, held = 0.0, reserved[-1]
    for index, entry in enumerate(trace.entries):
        time = max(time, ends.get(index, 0.0))
        held = reserved.get(index, held)
        if isinstance(entry, Allocate) and not entry.on_host:
            alive[entry.storage] = entry
            sizes[entry.kind] += entry.num_bytes
        elif isinstance(entry, Free) and (gone := alive.pop(entry.storage, None)) is not None:
            sizes[gone.kind] -= gone.num_bytes
        else:
            continue
        moments.append(_Moment(time, held, tuple(sizes.values())))
    return moments


# Figure. It needs matplotlib.

_LIGHT = THEMES["light"]
_INK, _FAINT, _LIMIT = _LIGHT.ink, _LIGHT.faint, COLORS["exposed"]


def _figure_of(curve: Curve, memory: Memory, limit: int, title: str) -> Figure:
    """Returns the picture as a matplotlib figure.

    Args:
        curve: memory over the step.
        memory: figures of the same rank.
        limit: bytes of the device.
        title: name of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    times = [1e3 * time for time in curve.seconds]
    stack = [[size / GIB for size in sizes] for sizes in curve.kinds.values()]
    axes.stackplot(
        times,
        stack,
        labels=[NAMES.get(kind, kind) for kind in curve.kinds],
        colors=[COLORS[TONES[kind]] for kind in curve.kinds],
        linewidth=0,
        step="post",
    )
    reserved = [size / GIB for size in curve.reserved]
    axes.plot(
        times, reserved, color=_INK, linewidth=1.0, linestyle=(0, (1, 1.5)), drawstyle="steps-post", label="reserved"
    )
    axes.axhline(limit / GIB, color=_LIMIT, linewidth=1.2, label=limit_text(curve, limit))
    _mark_peak(axes, times, stack, memory)
    axes.set_xlim(0, times[-1] or 1)
    axes.set_ylim(0, highest(curve, limit) / GIB)
    axes.set_xlabel("ms", fontsize=9, color=_INK)
    axes.set_ylabel("GiB", fontsize=9, color=_INK)
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.tick_params(labelsize=8, color=_FAINT, labelcolor=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    # The legend's order is that of the stack, the top first.
    handles, labels = axes.get_legend_handles_labels()
    lines, kinds = slice(len(stack), None), slice(len(stack) - 1, None, -1)
    figure.legend(
        handles[lines] + handles[kinds],
        labels[lines] + labels[kinds],
        loc="outside right upper",
        fontsize=8,
        frameon=False,
    )
    return figure


def _mark_peak(axes: Axes, times: list[float], stack: list[list[float]], memory: Memory) -> None:
    totals = list(map(sum, zip(*stack, strict=True)))
    if not totals:
        return
    peak = max(range(len(totals)), key=totals.__getitem__)
    # The text would end outside of the picture.
    is_late = times[peak] > 0.6 * times[-1]
    axes.plot(times[peak], totals[peak], marker="o", markersize=3.5, color=_INK)
    axes.annotate(
        f"{memory.live_peak / GIB:.2f} GiB",
        (times[peak], totals[peak]),
        xytext=(-5 if is_late else 5, 5),
        textcoords="offset points",
        ha="right" if is_late else "left",
        fontsize=8,
        color=_INK,
    )
