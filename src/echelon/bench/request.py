"""What a user asks to be measured. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from echelon.arguments import choices
from echelon.bench.figures import OPERATIONS, ROOTED, Case
from echelon.collectives.plans.algorithms import find
from echelon.errors import InvalidRank, LaunchError

# Numbers of bytes as people write them.

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_LARGEST = 1 << 42
_MOST_SIZES = 1000


def read_size(option: str, text: str) -> int:
    """Reads a number of bytes, such as "8", "64K" or "1MiB"; the units are powers of 1024.

    Raises:
        LaunchError: it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise LaunchError(f"{option} {text}: not a number of bytes; give one such as 8, 64K or 1M")
    size = int(found[1]) << _UNITS[found[2].upper()]
    if size > _LARGEST:
        raise LaunchError(f"{option} {text}: more than 4T bytes; give fewer")
    return size


def size_ladder(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """Returns the sizes from `smallest` to `largest`, each `factor` times the one before.

    Raises:
        LaunchError: there are none, or no end of them.
    """
    if not 1 <= smallest <= largest:
        raise LaunchError(f"--min {smallest} --max {largest}: give bytes from 1 on, the smallest first")
    if factor < 2:
        raise LaunchError(f"--factor {factor}: sizes would not grow; give 2 or more")
    sizes = [smallest]
    while sizes[-1] * factor <= largest and len(sizes) < _MOST_SIZES:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


DTYPES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""By name, their bytes."""
OPERATORS = ("sum", "mean", "product", "min", "max", "band", "bor", "bxor")
PEERS = ("gloo", "mpi")
MOST_ITERATIONS = 1000


@dataclass(frozen=True)
class Request:
    """What is measured: one operation with arrays of many sizes.

    turns: how often each subject takes its turn; the median of them counts. iterations: calls in a turn; None: as many
    as take 50 ms, at most `MOST_ITERATIONS`. algorithm: by name, of this operation; None: what the group would take.
    vs: what is measured as well, one of `PEERS`. network: between simulated ranks, in words.
    """

    operation: str
    sizes: tuple[int, ...]
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    algorithm: str | None = None
    turns: int = 5
    iterations: int | None = None
    vs: str | None = None
    as_json: bool = False
    network: str = ""

    def check(self, num_ranks: int) -> None:
        """Finds what cannot be measured, before anything starts.

        Raises:
            LaunchError: an unknown operation, dtype, op or peer, or a number that is too small.
            InvalidRank: a root that is no rank.
            PlanError: an unknown algorithm.
        """
        for what, value, known in (
            ("operation", self.operation, OPERATIONS),
            ("--dtype", self.dtype, tuple(DTYPES)),
            ("--op", self.op, OPERATORS),
            ("--vs", self.vs or PEERS[0], PEERS),
        ):
            if value not in known:
                raise LaunchError(f"{what} {value!r} is unknown: {choices(value, known, 'choose from')}")
        if self.operation in ROOTED and not 0 <= self.root < num_ranks:
            raise InvalidRank(self.root, num_ranks, "--root")
        if self.operation == "send_recv" and num_ranks < 2:
            raise LaunchError(f"send_recv with {num_ranks} rank: there is nobody to send to; give -n 2 or more")
        if self.turns < 1:
            raise LaunchError(f"--turns {self.turns}: nothing would be measured; give 1 or more")
        if self.iterations is not None and self.iterations < 1:
            raise LaunchError(f"--iterations {self.iterations}: nothing would be measured; give 1 or more")
        if self.algorithm is not None:
            if self.operation == "send_recv":
                raise LaunchError(f"--algorithm {self.algorithm}: a message needs none; leave --algorithm out")
            find(self.operation, self.algorithm)

    def backend(self, name: str) -> str:
        """Returns the backend to take where `name` is asked for: an algorithm is one of messages.

        Raises:
            LaunchError: an algorithm for ranks that share memory.
        """
        if self.algorithm is None or name not in ("auto", "shm"):
            return name
        if name == "shm":
            raise LaunchError(
                f"--algorithm {self.algorithm}: an algorithm is one of messages, not of shared memory; leave out "
                "--backend shm"
            )
        return "tcp"

    def cases(self, num_ranks: int) -> tuple[Case, ...]:
        """Returns what to measure on so many ranks, each size once."""
        size_of = DTYPES[self.dtype]
        cases = (
            Case.of(self.operation, num_ranks, size, self.dtype, size_of, self.op, self.root) for size in self.sizes
        )
        return tuple(dict.fromkeys(cases))
