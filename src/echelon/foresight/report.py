"""Report of a foreseen step: a table for the terminal, and the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from echelon.foresight.memory_curves import MemoryCurves
from echelon.foresight.play.played import Played, PlayedRole
from echelon.foresight.trace import CONVOLUTIONS, GIB, Kernel
from echelon.wording import counted

_MIB = 1 << 20
_WIDTH = 80
"""Columns of the report."""
_LEAST_SHARE = 5e-4
"""Share of the step from which on copies and work of the CPU have a line of their own: less reads 0.0 %."""
_MOST_OPERATORS = 3
"""Operators among the other kernels that are named."""
_LEAST_OPERATOR = 5e-3
"""Least share of the step of such an operator: less reads 0 %."""
_MOST_LINES = 6
"""Lines of communication that the table shows. The rest is one line."""


class Accuracy(NamedTuple):
    """Errors of step times on published rows that a device was not fitted on."""

    num_rows: int
    median: float
    largest_of_nine_in_ten: float
    """Error that nine rows of ten stay below."""
    fitted: str
    """Rows that its constants were fitted on."""
    shortest: float
    """Seconds of the shortest published step."""
    programs: str = "with FSDP in bfloat16"


ACCURACY: Mapping[str, Accuracy] = {
    "h100": Accuracy(37, 0.022, 0.049, "2 rows of MPT 7B on 8 GPUs", 0.578),
    "h100-500w": Accuracy(3, 0.030, 0.039, "1 row of Llama 3 8B on 8 GPUs", 2.457),
    "a100": Accuracy(38, 0.038, 0.073, "2 rows of MPT 7B and 1 of Llama 2 13B", 0.838),
    "a100-40g": Accuracy(37, 0.020, 0.115, "2 rows of MPT 7B and 1B on 8 GPUs", 0.408),
}
"""From benchmarks/foresee: dense models in bfloat16 with FSDP, 8 to 512 GPUs."""

LAYOUTS = Accuracy(24, 0.044, 0.124, "rows with FSDP", 1.42, "of A100 in float16 with tensor parallelism and pipelines")
"""From benchmarks/foresee/layouts.md, for steps with more communication or waiting than those with FSDP have."""

B200 = Accuracy(
    10, 0.013, 0.184, "2 of its steps with tensor parallelism of 2", 0.2588, "of Llama 3 with tensor parallelism"
)
"""From benchmarks/foresee/blackwell.md: all published steps of this device."""

_LEAST_OFFLOADED = 0.01
"""Share of the step from which on copies or work of the CPU make it unlike the published ones.

Copies of a batch take less. A CPU that is slower by several times then adds less than the published errors.
"""

_NARROW = "published steps with as little room took 11 to 14 % longer than foreseen"
"""MPT 13B on 8 A100 with 40 GB, benchmarks/foresee/full_gpus.py. A forecast counts no time for emptying the cache."""

_MOST_EXPOSED = 0.07
"""Largest share of exposed communication in the published steps with FSDP."""


class AccuracyHere(NamedTuple):
    """Errors of real steps on processors, whose ranks were timed with real tensors."""

    num_rows: int
    median: float
    worst: float


HERE = AccuracyHere(34, 0.067, 0.176)
"""From benchmarks/foresee/here.py: DDP, FSDP2, tensor parallelism and pipelines on 1 to 8 ranks."""

_NOT_MODELLED = ("jitter", "other jobs on the network", "data loading")
"""Parts of a real run that the model leaves out."""


@dataclass(frozen=True)
class Report:
    """Figures of a foreseen step.

    Args:
        played: The step.
        tokens: Tokens of all ranks in a step. None: not known.
        problems: Problems that checks found, as sentences.
        assumptions: Assumed values and approximations.
        title: Name of the program.
        what_ifs: Forecasts of the step with a change, as text after "what if".
        network: Name of the network between the hosts.
        skipped: Writes to files and processes that were skipped, each with its line.
    """

    played: Played
    tokens: int | None = None
    problems: Sequence[str] = ()
    assumptions: Sequence[str] = ()
    title: str = ""
    what_ifs: Sequence[str] = ()
    network: str = ""
    skipped: Sequence[str] = ()
    _memory: MemoryCurves | None = field(default=None, repr=False, compare=False)

    @cached_property
    def memory(self) -> MemoryCurves:
        """Memory of each role."""
        return MemoryCurves(self.played, self.played.memory()) if self._memory is None else self._memory

    @property
    def fullest(self) -> int:
        """Role with the highest peak."""
        return self.memory.fullest

    @property
    def fits(self) -> bool:
        """Whether every rank's memory is enough."""
        return self.memory.fits

    @property
    def fits_narrowly(self) -> bool:
        """Whether every rank fits, with less room than the uncounted CUDA context and NCCL buffers need."""
        return self.memory.fits_narrowly

    @property
    def verdict(self) -> str:
        """Whether the step fits, as "fits", "fits narrowly" or "does not fit"."""
        return ("fits narrowly" if self.fits_narrowly else "fits") if self.fits else "does not fit"

    def to_json(self) -> dict[str, object]:
        """Returns the figures as plain values: seconds, bytes, and shares from 0 to 1."""
        played, ranks = self.played, range(self.played.world_size)
        accuracy = accuracy_of(played)
        return {
            "title": self.title,
            "gpu": played.device.name,
            "world_size": played.world_size,
            "hosts": list(played.cluster.hosts),
            "network": self.network,
            "roles": {str(rank): sum(played.classes[each] == rank for each in ranks) for rank in played.roles},
            **self._json_of_time(),
            "exposed": self._json_of_exposed(),
            "memory": self._json_of_memory(),
            "problems": list(self.problems),
            "assumptions": list(self.assumptions),
            "skipped": list(self.skipped),
            "what_if": list(self.what_ifs),
            "not_modelled": not_modelled(played),
            "accuracy": None if accuracy is None else accuracy._asdict() | {"unlike": unlike(played, accuracy)},
        }

    def _json_of_time(self) -> dict[str, object]:
        played = self.played
        return {
            "step_seconds": played.seconds,
            "tokens_per_second": self.tokens / played.seconds if self.tokens and played.seconds else None,
            "mfu": played.mfu,
            "bubble": played.bubble if played.bubbles else None,
            "kernel_seconds": dict(played.slowest.kernel_seconds),
            "other_kernel_seconds": dict(played.slowest.other_seconds),
            "shares": played.slowest.shares._asdict(),
        }

    def _json_of_exposed(self) -> list[dict[str, object]]:
        return [
            {
                "group": name.group,
                "place": name.place,
                "modules": list(self.played.exposed_modules.get(name, ())),
                "seconds": seconds,
            }
            for name, seconds in self.played.exposed.items()
        ]

    def _json_of_memory(self) -> dict[str, object]:
        rank = self.fullest
        memory = self.memory[rank]
        return {
            "rank": rank,
            "live_peak": memory.live_peak,
            "reserved_peak": memory.reserved_peak,
            "needed_peak": memory.needed_peak,
            "limit": self.played.device.memory_bytes,
            "kinds": dict(memory.kinds_at_peak),
            "uncounted": self.memory.uncounted(rank),
            "fits": self.fits,
            "fits_narrowly": self.fits_narrowly,
            "retries": memory.retries,
            "hosts": list(self.memory.of_hosts),
        }

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [self._head(), self.figures_table()]
        # A step of one rank has no communication.
        if self.played.exposed:
            parts.append(self._communication())
        parts += [self.memory_table(), self._notes()]
        return Group(*parts)

    def __str__(self) -> str:
        # The same text wherever it is printed: on a terminal, in a file, in a notebook.
        return self.text(_WIDTH)

    def text(self, width: int) -> str:
        """Returns the report as lines of at most `width` columns."""
        console = Console(width=width, force_terminal=False, color_system=None, highlight=False)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"

    def _head(self) -> Text:
        played = self.played
        where = f"{played.world_size} x {played.device.name} on {counted(len(played.cluster.hosts), 'host')}"
        title = f"{self.title}: " if self.title else ""
        return Text(f"{title}{where}, {counted(len(played.roles), 'role')} recorded")

    @property
    def band(self) -> str:
        """Error that nine of ten published steps stay below, as "+- 6%". Empty if none of them is like this step."""
        accuracy = accuracy_of(self.played)
        if accuracy is None or unlike(self.played, accuracy):
            return ""
        return f"+- {accuracy.largest_of_nine_in_ten:.0%}"

    def figures_table(self) -> Table:
        """Returns the figures of the whole step."""
        played = self.played
        table = _table("", "")
        if self.network:
            table.add_row("network", _network_text(self.network, played))
        table.add_row("step", f"{seconds_text(played.seconds)} {self.band}".rstrip())
        if self.tokens and played.seconds:
            table.add_row("tokens per second", f"{self.tokens / played.seconds:,.0f}")
        table.add_row("MFU", f"{played.mfu:.1%}")
        # Without messages of a pipeline nothing is a bubble.
        if played.bubbles:
            table.add_row("bubble", f"{played.bubble:.1%}")
        shares = self.played.slowest.shares
        table.add_row("kernels", ", ".join(f"{kind} {share:.0%}" for kind, share in shares.kernels.items()))
        if others := self._longest_others():
            table.add_row("other, by operator", others)
        table.add_row("contention", f"{shares.contention:.1%}")
        table.add_row("exposed communication", f"{shares.exposed:.1%}")
        table.add_row("waiting for ranks", f"{shares.waiting:.1%}")
        # Programs without offloading need not read about it.
        if shares.copies >= _LEAST_SHARE:
            table.add_row("exposed copies", f"{shares.copies:.1%}")
        if shares.host >= _LEAST_SHARE:
            table.add_row("computing on the CPU", f"{shares.host:.1%}")
        table.add_row("idle otherwise", f"{shares.idle:.1%}")
        return table

    def _longest_others(self) -> str:
        """Returns the longest operators of kind "other" with their shares of the step. Empty if all are short."""
        whole, others = self.played.slowest.seconds or 1.0, self.played.slowest.other_seconds
        longest = {name: seconds / whole for name, seconds in islice(others.items(), _MOST_OPERATORS)}
        shown = [f"{_short(name, 48)} {share:.0%}" for name, share in longest.items() if share >= _LEAST_OPERATOR]
        return ", ".join([*shown, *["..."] * (0 < len(shown) < len(others))])

    def _communication(self) -> Table:
        table = _table("exposed communication", "modules", "group", "time", "share")
        rows = list(self.played.exposed.items())
        for name, seconds in rows[:_MOST_LINES]:
            share = f"{seconds / self.played.seconds:.1%}"
            first, *others = self.played.exposed_modules.get(name, ("",))
            all_of_them = ", ".join((first, *others))
            modules = all_of_them if len(all_of_them) <= 24 else f"{_short(first, 24)}{', ...' * bool(others)}"
            table.add_row(_short(name.place or "unknown line", 40), modules, name.group, seconds_text(seconds), share)
        # All lines add up to the share in the table of figures.
        rest = sum(seconds for _, seconds in rows[_MOST_LINES:])
        if rest:
            left = f"{len(rows) - _MOST_LINES} other lines"
            table.add_row(left, "", "", seconds_text(rest), f"{rest / self.played.seconds:.1%}")
        return table

    def memory_table(self) -> Table:
        """Returns the memory of the fullest role at its peak."""
        rank = self.fullest
        memory, limit = self.memory[rank], self.played.device.memory_bytes
        unit, name = (GIB, "GiB") if memory.reserved_peak >= GIB / 10 else (_MIB, "MiB")
        table = _table(f"memory of rank {rank} at its peak", name)
        for kind, size in memory.kinds_at_peak.items():
            table.add_row(kind, f"{size / unit:.2f}")
        table.add_row("tensors", f"{memory.live_peak / unit:.2f}")
        table.add_row("reserved", f"{memory.reserved_peak / unit:.2f}")
        # What a step that does not fit reserves is the limit, which says nothing.
        if not memory.fits:
            table.add_row("needed, at least", f"{memory.needed_peak / unit:.2f}")
        verdict = self.verdict if self.fits else self.verdict.upper()
        table.add_row(f"{verdict} into", f"{limit / unit:.2f}" if unit == GIB else size_text(limit))
        if memory.host_peak >= unit / 10:
            table.add_row("tensors on the CPU, of all ranks of a host", f"{max(self.memory.of_hosts) / unit:.2f}")
        if memory.retries:
            table.add_row("times that the allocator emptied its cache", str(memory.retries))
        return table

    def _notes(self) -> RenderableType:
        lines = [self.narrow_text] if self.fits_narrowly else []
        if self.problems:
            lines += ["problems:", *(f"- {problem}" for problem in self.problems)]
        if self.assumptions:
            lines += ["assumed:", *(f"- {assumption}" for assumption in self.assumptions)]
        if self.skipped:
            lines += ["skipped:", *(f"- {each}" for each in self.skipped)]
        if self.what_ifs:
            lines += ["what if", *(f"- {what_if}" for what_if in self.what_ifs)]
        lines.append(f"accuracy: {accuracy_text(self.played)}")
        if (uncounted := self.uncounted_text) and not self.fits_narrowly:
            lines.append(f"not counted: {uncounted}")
        lines.append(f"not modelled: {', '.join(not_modelled(self.played))}")
        return Text("\n".join(lines))

    @property
    def narrow_text(self) -> str:
        """Sentence on a step that fits narrowly."""
        rank = self.memory.tightest
        left, uncounted = (size_text(size) for size in (self.memory.left(rank), self.memory.uncounted(rank)))
        retries = self.memory.retries_beside_uncounted
        if retries is None:
            outlook = "a real run may run out of memory"
        else:
            room = size_text(self.played.device.memory_bytes - self.memory[rank].live_peak)
            times = f"{counted(retries, 'time')} a step" if retries else "at first"
            outlook = (
                f"tensors leave {room}, so a real run should empty the allocator's cache ({times}) rather than run out "
                f"of memory; {_NARROW}"
            )
        return (
            f"fits narrowly: rank {rank} has {left} left, but CUDA's context and NCCL's buffers, which are not "
            f"counted, need about {uncounted}: {outlook}"
        )

    @property
    def uncounted_text(self) -> str:
        """Memory that no figure counts, with its rough size. Empty on processors."""
        size = self.memory.uncounted(self.fullest)
        return f"memory of CUDA's context and NCCL's buffers, about {size_text(size)} of each GPU" if size else ""


def not_modelled(played: Played) -> list[str]:
    """Returns the parts of a real step that a forecast leaves out."""
    kernels = (each for role in played.roles.values() for each in role.program.trace.entries if type(each) is Kernel)
    uses_cudnn = not played.device.is_synchronous and any(each.name in CONVOLUTIONS for each in kernels)
    return [*_NOT_MODELLED, *["memory of cuDNN while it computes a convolution"] * uses_cudnn]


def accuracy_of(played: Played) -> Accuracy | None:
    """Returns the errors of the published steps that are most like a step. None if its device has no such steps."""
    if played.device.name == "b200":
        return B200
    accuracy = ACCURACY.get(played.device.name)
    if accuracy is None:
        return None
    return LAYOUTS if _most_waiting(played) else accuracy


def _most_waiting(played: Played) -> str:
    """Returns the share by which a step is unlike published ones with FSDP: communication or waiting.

    Empty if none does.
    """
    shares = played.slowest.shares
    if max(shares.exposed + shares.waiting, played.bubble) <= _MOST_EXPOSED:
        return ""
    if shares.exposed > _MOST_EXPOSED:
        return "exposed communication"
    return "bubble" if played.bubble > _MOST_EXPOSED else "exposed communication and waiting for ranks"


def unlike(played: Played, accuracy: Accuracy) -> str:
    """Returns the reasons why a step is unlike all published ones. Empty if it is like them."""
    reasons = []
    if played.seconds < accuracy.shortest:
        reasons.append(f"the shortest took {seconds_text(accuracy.shortest)}")
    kernels = [each for role in played.roles.values() for each in role.program.trace.entries if type(each) is Kernel]
    narrow = sum(each.flops for each in kernels if each.dtype in ("bfloat16", "float16"))
    # Most of the work, because programs in 16 bits have operators in float32, such as the loss.
    # Errors were measured on language models, whose work is products of matrices in 16 bits.
    whole = sum(each.flops for each in kernels)
    if 2 * narrow < whole:
        reasons.append("they compute in 16 bits")
    if 2 * sum(each.flops for each in kernels if each.name in CONVOLUTIONS) > whole:
        reasons.append("they have no convolutions")
    # A step with few copies, as of its batch, is like the published ones.
    if any(_offloaded(role) >= _LEAST_OFFLOADED * played.seconds for role in played.roles.values()):
        reasons.append("they neither copy from and to the CPU nor compute there")
    # Each reason is a clause, so that a comma comes before "and".
    *first, last = reasons or [""]
    return f"{', '.join(first)}, and {last}" if first else last


def _offloaded(role: PlayedRole) -> float:
    """Returns the seconds of copies, also of hidden ones, or of operators of the CPU if these take longer."""
    copies = sum(span.end - span.start for span in role.copies)
    return max(copies, sum(end - start for start, end in role.computed))


def accuracy_text(played: Played) -> str:
    """Returns the errors that step times on a device had, and the rows that its constants were fitted on."""
    if played.device.name == "cpu":
        if all(role.program.trace.measured for role in played.roles.values()):
            return (
                f"median error {HERE.median:.0%} of {HERE.num_rows} real steps on one machine, worst {HERE.worst:.0%}. "
                "See benchmarks/foresee"
            )
        return "real steps took 2 to 3 times as long on one machine. See benchmarks/foresee"
    accuracy = accuracy_of(played)
    if accuracy is None:
        return "not compared with published runs on this device"
    reason = unlike(played, accuracy)
    unlike_all = f" This step is like none of them ({reason}): expect a larger error." if reason else ""
    waiting = _most_waiting(played) if accuracy is LAYOUTS else ""
    why = f", as more than {_MOST_EXPOSED:.0%} of this step is {waiting}" if waiting else ""
    return (
        f"median error {accuracy.median:.1%} on {accuracy.num_rows} published steps {accuracy.programs} that were "
        f"not fitted, 9 of 10 within {accuracy.largest_of_nine_in_ten:.0%}{why}. Constants fitted on "
        f"{accuracy.fitted}. See benchmarks/foresee.{unlike_all}"
    )


def _network_text(name: str, played: Played) -> str:
    """Returns a network with the NICs of its hosts, as "infiniband-400g, a NIC for each GPU"."""
    cluster = played.cluster
    if played.device.is_synchronous:
        return name
    if len(cluster.hosts) == 1:
        return "not used: all ranks are on one host"
    ratio = cluster.oversubscription
    rails = f", {cluster.rails} rails" if cluster.rails else ""
    if ratio > 1 and set(cluster.hosts) == {ratio} and not cluster.rails:
        return f"{name}, a NIC for each host"
    return f"{name}, a NIC for each GPU{rails}{f', oversubscription {ratio:g}' if ratio > 1 else ''}"


def seconds_text(seconds: float) -> str:
    """Returns a time with its unit, such as "1.23 s" or "4.5 ms"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def size_text(num_bytes: float) -> str:
    """Returns a size with its unit, such as "8.5 GiB" or "2.0 MiB"."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / _MIB:.1f} MiB"


def _table(*titles: str) -> Table:
    table = Table(box=None, show_header=any(titles), pad_edge=False, padding=(0, 2, 0, 0))
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index == 0 or not any(titles) else "right", overflow="fold")
    return table


def _short(text: str, most: int) -> str:
    """Returns the end of a text that is too long."""
    return text if len(text) <= most else "..." + text[3 - most :]
