"""How fast are collectives and messages between ranks of one host, beside Gloo, Open MPI and the memory itself?

    python benchmarks/shared_memory/run.py all_reduce --ranks 2
    python benchmarks/shared_memory/run.py all_reduce --ranks 4
    python benchmarks/shared_memory/run.py send_recv
    python benchmarks/shared_memory/run.py others --ranks 2
    python benchmarks/shared_memory/run.py others --ranks 4
    python benchmarks/shared_memory/run.py busy
    python benchmarks/shared_memory/run.py crowded

Each takes less than a minute and a half on 2 cores. All contestants are in the same processes and take turns. A turn is
calls in a row, and counts as their mean, of the slowest rank; the table shows medians over the turns, and ratios of
medians: above 1 where Echelon is faster. All results but those of the limit are compared with the right ones.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from subjects import LimitSubject, SymmetricSubject

import echelon
from echelon.bench.measure import measure_case
from echelon.bench.mpi import has_mpi4py, join, run_under_mpi
from echelon.bench.request import Case, read_size
from echelon.bench.subject import EchelonSubject, GlooSubject, MpiSubject, Subject

sys.path.append(str(Path(__file__).parents[1]))
from harness import options_of, print_environment, print_head, print_row

KIB, MIB = 1 << 10, 1 << 20
OTHERS = ("reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all", "barrier")
BESIDE = ("nothing", "python", "matmul")


class Question(NamedTuple):
    """Defaults of the options."""

    ranks: int
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    beside: tuple[str, ...] = BESIDE[:1]


QUESTIONS = {
    "all_reduce": Question(2, ("all_reduce",), (8, KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)),
    "send_recv": Question(2, ("send_recv",), (8, KIB, 16 * KIB, 256 * KIB, MIB, 16 * MIB, 64 * MIB)),
    "others": Question(2, OTHERS, (KIB, MIB, 64 * MIB)),
    "busy": Question(2, ("all_reduce",), (8, MIB), BESIDE),
    "crowded": Question(8, ("all_reduce",), (8, KIB, 256 * KIB, MIB, 16 * MIB)),
}


class Found(NamedTuple):
    """Seconds of each contestant for one case."""

    num_ranks: int
    operation: str
    size: int
    seconds: dict[str, float]


class Goal(NamedTuple):
    """At least `least` times as fast as `peer`, or at most so many microseconds if that is None; for some cases."""

    contestant: str
    peer: str | None
    least: float
    num_ranks: tuple[int, ...]
    operations: tuple[str, ...]
    sizes: range
    which: str

    def value(self, found: Found) -> float | None:
        """Returns the ratio or the microseconds of a case. None if the goal is not about it."""
        wanted = found.num_ranks in self.num_ranks and found.operation in self.operations and found.size in self.sizes
        if not wanted or not {self.contestant, self.peer or self.contestant} <= set(found.seconds):
            return None
        ours = found.seconds[self.contestant]
        return ours * 1e6 if self.peer is None else found.seconds[self.peer] / ours

    def print(self, rows: Sequence[Found]) -> None:
        """Prints the least favourable case. Nothing if no case was measured."""
        # Of microseconds less is better, of ratios more: the sign makes the worst value the least in both.
        sign = -1 if self.peer is None else 1
        values = [(sign * value, row) for row in rows if (value := self.value(row)) is not None]
        if not values:
            return
        worst, where = min(values, key=lambda pair: pair[0])
        missed = sum(value < sign * self.least for value, _ in values)
        print_row(
            f"{'/'.join(map(str, self.num_ranks))} ranks, {self.which}, {self.contestant}",
            f"{self.least:g} us" if self.peer is None else f"{self.least:g} times {self.peer}",
            f"{abs(worst):.3g} ({where.operation}, {where.num_ranks} ranks, {where.size} B)",
            f"**missed** in {missed} of {len(values)}" if missed else "met",
        )


def _from(smallest: int, largest: int = 1 << 62) -> range:
    return range(smallest, largest + 1)


_REDUCE, _SEND = ("all_reduce",), ("send_recv",)
GOALS = (
    Goal("any tensor", "Gloo", 5, (2,), _REDUCE, _from(0), "all_reduce of every size"),
    Goal("any tensor", "Gloo", 3, (4,), _REDUCE, _from(0), "all_reduce of every size"),
    Goal("symmetric", "Gloo", 8, (2, 4), _REDUCE, _from(64 * MIB, 64 * MIB), "all_reduce of 64 MiB"),
    Goal("symmetric", "Gloo", 15, (2, 4), _REDUCE, _from(MIB, MIB), "all_reduce of 1 MiB"),
    Goal("any tensor", "Open MPI", 1, (2, 4), _REDUCE, _from(16 * KIB), "all_reduce from 16 KiB"),
    Goal("symmetric", "Open MPI", 1, (2, 4), _REDUCE, _from(256 * KIB), "all_reduce from 256 KiB"),
    Goal("symmetric", "Open MPI", 4, (2, 4), _REDUCE, _from(64 * MIB, 64 * MIB), "all_reduce of 64 MiB"),
    Goal("any tensor", None, 12, (2,), _REDUCE, _from(8, 8), "all_reduce of 8 B"),
    Goal("any tensor", None, 60, (4,), _REDUCE, _from(8, 8), "all_reduce of 8 B"),
    Goal("any tensor", None, 5, (2,), _SEND, _from(8, 8), "send_recv of 8 B, one way"),
    Goal("any tensor", "Open MPI", 1.5, (2,), _SEND, _from(16 * MIB, 16 * MIB), "send_recv of 16 MiB"),
    Goal("symmetric", "limit", 0.75, (2, 4), _REDUCE, _from(16 * MIB), "all_reduce from 16 MiB"),
    Goal("any tensor", "Gloo", 3, (2, 4), OTHERS, _from(0), "all other collectives"),
)


def contestants(group: echelon.ProcessGroup, world: object, symmetric: bool) -> list[Subject]:
    """Returns the contestants. `world`: COMM_WORLD of an MPI program; None without MPI."""
    found: list[Subject] = [EchelonSubject(group, "any tensor")]
    if symmetric:
        found += [SymmetricSubject(group), LimitSubject(group)]
    gloo = GlooSubject(group)
    gloo.name = "Gloo"
    found.append(gloo)
    if world is not None:
        from mpi4py import MPI

        found.append(MpiSubject(world, MPI))
        found[-1].name = "Open MPI"
    return found


@contextlib.contextmanager
def busy_with(what: str) -> Iterator[None]:
    """Has a thread of this rank do something else all the time."""
    stop = threading.Event()
    square = torch.rand(512, 512)
    work: dict[str, Callable[[], object]] = {"python": int, "matmul": lambda: torch.mm(square, square)}

    def run() -> None:
        while what in work and not stop.is_set():
            work[what]()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure(group: echelon.ProcessGroup, options: argparse.Namespace, world: object = None) -> int:
    """Measures as one rank, the first one prints; returns how many values were wrong."""
    torch.set_num_threads(1)
    sys.setswitchinterval(options.switch_interval or sys.getswitchinterval())
    question = QUESTIONS[options.question]
    subjects = contestants(group, world, options.question in ("all_reduce", "others"))
    names = [subject.name for subject in subjects]
    prints = group.rank == 0
    if prints:
        times, ratios = (f"{name}, us" for name in names), (f"{peer} / {own}" for own, peer in pairs(names))
        print_head(" | ".join(["ranks", "operation", "bytes", "beside", *times, *ratios]))
    rows, wrong = [], 0
    for beside in options.beside or question.beside:
        for operation in options.operations or question.operations:
            for size in (0,) if operation == "barrier" else options.sizes or question.sizes:
                case = Case.of(operation, group.world_size, size)
                with busy_with(beside):
                    row = measure_case(group, case, subjects, options.turns, seconds=options.seconds)
                wrong += sum(each.wrong for each in row.measured if each.subject != "limit")
                found = Found(group.world_size, operation, size, {each.subject: each.seconds for each in row.measured})
                if prints:
                    taken = found.seconds
                    cells = [f"{seconds * 1e6:.{1 if seconds < 1e-3 else 0}f}" for seconds in taken.values()]
                    cells += [f"{taken[peer] / taken[own]:.2f}" for own, peer in pairs(names)]
                    print_row(group.world_size, operation, size, beside, *cells)
                if beside == BESIDE[0]:
                    rows.append(found)
    if prints:
        print()
        print_head("goal | at least, as fast as | least favourable | ")
        for goal in GOALS:
            goal.print(rows)
        print(f"\nwrong values: {wrong}", flush=True)
    for subject in subjects:
        subject.close()
    return wrong


def pairs(names: list[str]) -> list[tuple[str, str]]:
    """Returns the compared names: ours, then the peer's."""
    ours = [name for name in names if name in ("any tensor", "symmetric")]
    return [
        (own, peer) for own in ours for peer in names if peer not in ours and (peer != "limit" or own == "symmetric")
    ]


def why_without_mpi() -> str | None:
    """Returns why Open MPI is not measured, None if it is."""
    if shutil.which("mpirun") is None:
        return "there is no mpirun: apt-get install openmpi-bin"
    return None if has_mpi4py() else "there is no mpi4py: pip install mpi4py"


def read_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = options_of(__doc__)
    parser.add_argument("question", choices=tuple(QUESTIONS))
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--sizes", type=lambda text: read_size("--sizes", text), nargs="+", help="as 8 16K 1M")
    parser.add_argument("--operations", nargs="+", choices=OTHERS)
    parser.add_argument("--beside", nargs="+", choices=BESIDE, help="what a thread of each rank does meanwhile")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=0.02, help="about how long a turn takes")
    parser.add_argument("--switch-interval", type=float, help="seconds, see sys.setswitchinterval")
    parser.add_argument("--without-mpi", action="store_true")
    parser.add_argument("--mpi-rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = read_options()
    if options.mpi_rank:
        from mpi4py import MPI

        with join(MPI.COMM_WORLD, "shm") as group:
            return 1 if measure(group, options, MPI.COMM_WORLD) else 0
    ranks = options.ranks or QUESTIONS[options.question].ranks
    print_environment(f"{ranks} ranks, 1 thread each, float32, medians of {options.turns} turns")
    why = "it is not wanted" if options.without_mpi else why_without_mpi()
    if why is None:
        return run_under_mpi([*sys.argv, "--mpi-rank"], ranks)
    print(f"without Open MPI: {why}\n", flush=True)
    return 1 if echelon.spawn(measure, ranks, (options,), backend="shm")[0] else 0


if __name__ == "__main__":
    sys.exit(main())
