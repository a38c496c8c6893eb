"""Requests of `echelon bench` and `echelon tune`: their options, the checks of them, and the cases to measure.

typer reads the options and their help from the fields. A launched rank gets the same request, so it is a value.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, TypeAlias

import typer

from echelon.arguments import choices
from echelon.backends.formats import wire
from echelon.collectives.plans.algorithms import OPERATIONS as COLLECTIVES
from echelon.collectives.plans.algorithms import find
from echelon.errors import InvalidRank, LaunchError, PlanError
from echelon.launch.environment import is_rank

# A send_recv is a ping-pong between rank 0 and the last rank; its time is half a round trip.
OPERATIONS = (*COLLECTIVES, "send_recv")
REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
ROOTED = frozenset({"reduce", "broadcast", "gather", "scatter"})
# Operations on one part per rank. nccl-tests gives their count per part, and their size for all parts.
OF_PARTS = frozenset({"all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"})
# Bytes of an element by dtype. torch knows them too, but importing it takes seconds; it computes little with the rest.
DTYPES = dict(wire.DTYPES[:14])
OPERATORS = ("sum", "mean", "product", "min", "max", "band", "bor", "bxor")
PEERS = ("gloo", "mpi")


class Case(NamedTuple):
    """One call to measure."""

    operation: str
    num_ranks: int
    num_elements: int
    """Elements of the whole array; for operations on parts, of one rank's part."""
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0

    @classmethod
    def of(
        cls, operation: str, num_ranks: int, size: int, dtype: str = "float32", op: str = "sum", root: int = 0
    ) -> Case:
        """Returns the case with the largest array of at most `size` bytes, and at least one element per part."""
        parts = num_ranks if operation in OF_PARTS else 1
        num_elements = 0 if operation == "barrier" else max(1, size // (DTYPES[dtype] * parts))
        return cls(operation, num_ranks, num_elements, dtype, op, root)

    @property
    def size(self) -> int:
        """Bytes of the whole array."""
        return self.num_elements * DTYPES[self.dtype] * (self.num_ranks if self.operation in OF_PARTS else 1)


_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_LARGEST = 1 << 42  # 4 TiB, above the memory of any host
_COUNTS = re.compile(r"(\d+)x(\d+)")


def read_size(option: str, text: str) -> int:
    """Returns the number of bytes in a text such as "8", "64K" or "1MiB". Units are powers of 1024.

    Raises:
        LaunchError: `text` is not a number of bytes, or more than 4T.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise LaunchError(f"{option} {text}: not a number of bytes; give one such as 8, 64K or 1M")
    size = int(found[1]) << _UNITS[found[2].upper()]
    if size > _LARGEST:
        raise LaunchError(f"{option} {text}: more than 4T bytes; give fewer")
    return size


def size_ladder(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """Returns the sizes from `smallest` to `largest`, each `factor` (at least 2) times the one before.

    Raises:
        LaunchError: there are no such sizes.
    """
    if not 1 <= smallest <= largest:
        raise LaunchError(f"--min {smallest} --max {largest}: give bytes from 1 on, the smallest first")
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def read_hosts(text: str, num_ranks: int | None) -> tuple[str, ...]:
    """Returns the host name of each rank, from a text that names the hosts or counts their ranks.

    2 hosts of 2 ranks each are "2x2", "2,2" (ranks of each host), "2" (equal hosts), or "a,a,b,b" (names).

    Raises:
        PlanError: the hosts do not have `num_ranks` ranks.
    """
    parts = [part.strip() for part in text.split(",")]
    if found := _COUNTS.fullmatch(text.strip()):
        counts = [(int(found[1]), int(found[2]))]
    elif len(parts) == num_ranks or not all(map(str.isdecimal, parts)):
        counts = []
    elif len(parts) == 1 and num_ranks and int(text) and num_ranks % int(text) == 0:
        counts = [(int(text), num_ranks // int(text))]
    else:
        counts = [(1, int(part)) for part in parts]
    # Counted before any name is made, so that a slip such as 99999x99999 takes no memory.
    count = sum(hosts * ranks for hosts, ranks in counts) if counts else len(parts)
    if count != num_ranks:
        ranks = "no number of" if num_ranks is None else str(num_ranks)
        raise PlanError(f"--hosts {text} is for {count}, not for {ranks} ranks: give as a,a,b,b or 2x2, with -n 4")
    if not counts:
        return tuple(parts)
    sizes = [ranks for hosts, ranks in counts for _ in range(hosts)]
    return tuple(str(host) for host, ranks in enumerate(sizes) for _ in range(ranks))


Hosts: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="HOSTS",
        help="Simulated hosts: 2x4 (2 hosts of 4 ranks), their number, ranks of each (4,4), or names (a,a,b,b).",
    ),
]
Largest: TypeAlias = Annotated[str, typer.Option("-e", "--max", metavar="BYTES", help="Largest array.")]
NetworkName: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME", help="Network between simulated ranks.  [default: 10GbE]")
]


@dataclass(frozen=True)
class Request:
    """Measurement of one operation on arrays of many sizes: the options of `echelon bench`."""

    operation: Annotated[
        str, typer.Argument(metavar="OPERATION", help="A collective such as all_reduce, or send_recv.")
    ]
    # A number above 1024 is a slip of the keyboard.
    num_ranks: Annotated[
        int | None,
        typer.Option(
            "-n", "--num-ranks", metavar="COUNT", min=1, max=1024, help="Number of ranks to start.  [default: 2]"
        ),
    ] = None
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="auto, shm, tcp, gloo, nccl, or simulated (virtual time).")
    ] = "auto"
    smallest: Annotated[str, typer.Option("-b", "--min", metavar="BYTES", help="Smallest array.")] = "8"
    largest: Largest = "64M"
    factor: Annotated[
        int, typer.Option("-f", "--factor", metavar="RATIO", min=2, help="Ratio of a size to the one before.")
    ] = 2
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Element type, such as bfloat16.")] = "float32"
    op: Annotated[str, typer.Option(metavar="NAME", help="Reduction, such as sum or max.")] = "sum"
    root: Annotated[
        int, typer.Option(metavar="RANK", help="Source of a broadcast or scatter, destination of a reduce or gather.")
    ] = 0
    algorithm: Annotated[
        str | None, typer.Option(metavar="NAME", help="Message-passing algorithm, such as ring.  [default: auto]")
    ] = None
    vs: Annotated[str | None, typer.Option(metavar="gloo|mpi", help="Also measure a peer, in turns with Echelon.")] = (
        None
    )
    turns: Annotated[
        int, typer.Option(metavar="COUNT", min=1, help="Timed runs per size and library; their median counts.")
    ] = 5
    iterations: Annotated[
        int | None, typer.Option(metavar="COUNT", min=1, help="Calls per turn.  [default: as many as take 50 ms]")
    ] = None
    network: NetworkName = None
    local_network: Annotated[
        str | None, typer.Option(metavar="NAME", help="Network inside a simulated host.  [default: shared-memory]")
    ] = None
    hosts: Hosts = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False

    def checked(self) -> Request:
        """Returns the request with names in their usual form, after all checks that need no rank.

        Raises:
            LaunchError: an unknown operation, dtype, op or peer, or options that do not go together.
            InvalidRank: the root is not a rank.
            PlanError: an unknown algorithm, or hosts for another number of ranks.
        """
        algorithm = self.algorithm and self.algorithm.replace("-", "_")
        # An algorithm needs messages, and ranks that share memory send none.
        backend = "tcp" if algorithm and self.backend == "auto" else self.backend
        named = replace(self, operation=self.operation.replace("-", "_"), algorithm=algorithm, backend=backend)
        named._check()
        return named

    def _check(self) -> None:
        # Choices are not typer's, which would not suggest the closest name.
        for what, value, known in (
            ("operation", self.operation, OPERATIONS),
            ("--dtype", self.dtype, tuple(DTYPES)),
            ("--op", self.op, OPERATORS),
            ("--vs", self.vs or PEERS[0], PEERS),
        ):
            if value not in known:
                raise LaunchError(f"{what} {value!r} is unknown: {choices(value, known, 'choose from')}")
        self.sizes()  # raises if they are wrong
        if self.algorithm is not None:
            if self.backend == "shm":
                raise LaunchError(
                    f"--algorithm {self.algorithm}: algorithms are for messages, not for shared memory; leave out "
                    "--backend shm"
                )
            if self.operation == "send_recv":
                raise LaunchError(f"--algorithm {self.algorithm}: a message needs none; leave --algorithm out")
            find(self.operation, self.algorithm)
        if self.local_network is not None and self.hosts is None:
            raise LaunchError(f"--local-network {self.local_network}: there are no hosts; add --hosts, as 2x2")
        if self.vs is not None and self.backend == "simulated":
            raise LaunchError(f"--vs {self.vs} needs processes: leave out --backend simulated")
        # A launched rank learns the number of ranks from its group, and checks it there.
        if is_launched(self):
            if self.vs == "mpi":
                raise LaunchError("--vs mpi starts its ranks by mpirun: run it without another launcher")
        else:
            self.check_num_ranks(self.num_ranks or DEFAULT_RANKS)

    def check_num_ranks(self, num_ranks: int) -> None:
        """Checks that the operation is possible on `num_ranks` ranks.

        Raises:
            InvalidRank: the root is not a rank.
            LaunchError: a message between fewer than 2 ranks.
        """
        if self.operation in ROOTED and not 0 <= self.root < num_ranks:
            raise InvalidRank(self.root, num_ranks, "root")
        if self.operation == "send_recv" and num_ranks < 2:
            raise LaunchError(f"send_recv with {num_ranks} rank: there is nobody to send to; give -n 2 or more")

    def sizes(self) -> tuple[int, ...]:
        """Returns the bytes of the arrays, growing. Raises LaunchError if there are none."""
        return size_ladder(read_size("--min", self.smallest), read_size("--max", self.largest), self.factor)

    def cases(self, num_ranks: int) -> tuple[Case, ...]:
        """Returns the cases to measure on `num_ranks` ranks, each size once."""
        cases = (Case.of(self.operation, num_ranks, size, self.dtype, self.op, self.root) for size in self.sizes())
        return tuple(dict.fromkeys(cases))  # sizes below one element per part round up to the same case


@dataclass(frozen=True)
class Tuning:
    """Measurement of all algorithms, and the file for its result: the options of `echelon tune`."""

    num_ranks: Annotated[
        int | None,
        typer.Option(
            "-n", "--num-ranks", metavar="COUNT", min=2, max=1024, help="Number of ranks to start.  [default: 2]"
        ),
    ] = None
    backend: Annotated[str, typer.Option(metavar="NAME", help="tcp, or simulated (virtual time).")] = "tcp"
    largest: Largest = "16M"
    turns: Annotated[
        int, typer.Option(metavar="COUNT", min=1, help="Timed runs per size and algorithm; their median counts.")
    ] = 5
    network: NetworkName = None
    hosts: Hosts = None
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Output file.  [default: $XDG_CONFIG_HOME/echelon/tuned.json]"),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False

    def check(self) -> None:
        """Checks the options, before any rank is started.

        Raises:
            LaunchError: options that do not go together, or a size that is none.
        """
        self.sizes()  # raises if they are wrong
        if self.backend not in ("tcp", "simulated"):
            raise LaunchError(f"--backend {self.backend}: algorithms are for messages; give tcp or simulated")
        is_launched(self)
        # The default file is read by every job of this user, and none has the simulated network.
        if self.backend == "simulated" and self.output is None:
            raise LaunchError("--backend simulated is not this system: name a file of its own, as --output tuned.json")

    def sizes(self) -> tuple[int, ...]:
        """Returns the bytes of the arrays, growing. Raises LaunchError if there are none."""
        # Steps of 8: a rule's boundary lies between two sizes, and each size costs seconds.
        return size_ladder(8, read_size("--max", self.largest), 8)


DEFAULT_RANKS = 2


def is_launched(options: Request | Tuning) -> bool:
    """Whether a launcher started this process as one of the ranks that measure.

    Raises:
        LaunchError: options that only new ranks, or only simulated ones have.
    """
    is_simulated = options.backend == "simulated"
    for option in ("network", "local_network", "hosts"):
        value = getattr(options, option, None)  # tuning has no local network
        if value is not None and not is_simulated:
            name = "--" + option.replace("_", "-")
            raise LaunchError(f"{name} {value}: only simulated ranks have that; add --backend simulated")
    # Under a launcher the number of ranks is the launcher's, and its processes are the ranks.
    if is_rank(os.environ) and (is_simulated or options.num_ranks is not None):
        raise LaunchError("this is a rank that a launcher started: leave out -n and --backend simulated")
    return is_rank(os.environ)
