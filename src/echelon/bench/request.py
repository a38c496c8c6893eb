"""Requests of `echelon bench` and `echelon tune`: sizes, dtypes, operations and their checks. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from echelon.arguments import choices
from echelon.bench.figures import OPERATIONS, ROOTED, Case
from echelon.collectives.plans.algorithms import find
from echelon.errors import InvalidRank, LaunchError

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_LARGEST = 1 << 42  # 4 TiB
_MOST_SIZES = 1000


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
    """Returns the sizes from `smallest` to `largest`, each `factor` times the one before.

    Raises:
        LaunchError: there are no such sizes, or `factor` is below 2.
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
"""Bytes of an element by dtype."""
OPERATORS = ("sum", "mean", "product", "min", "max", "band", "bor", "bxor")
PEERS = ("gloo", "mpi")
MOST_ITERATIONS = 1000


@dataclass(frozen=True)
class Request:
    """Measurement of one operation on arrays of many sizes.

    turns: turns of each subject, whose median counts. iterations: calls in a turn; None: as many as take 50 ms, at most
    `MOST_ITERATIONS`. algorithm: name of one of this operation's; None: the group's choice. vs: a second subject, one
    of `PEERS`. network: description of the simulated network.
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
        """Checks the request, before any rank is started.

        Raises:
            LaunchError: an unknown operation, dtype, op or peer, or a number that is too small.
            InvalidRank: the root is not a rank.
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
        """Returns the backend to use when `name` is given. An algorithm needs messages, so auto becomes tcp.

        Raises:
            LaunchError: an algorithm together with shared memory.
        """
        if self.algorithm is None or name not in ("auto", "shm"):
            return name
        if name == "shm":
            raise LaunchError(
                f"--algorithm {self.algorithm}: algorithms are for messages, not for shared memory; leave out "
                "--backend shm"
            )
        return "tcp"

    def cases(self, num_ranks: int) -> tuple[Case, ...]:
        """Returns the cases to measure on `num_ranks` ranks, each size once."""
        size_of = DTYPES[self.dtype]
        cases = (
            Case.of(self.operation, num_ranks, size, self.dtype, size_of, self.op, self.root) for size in self.sizes
        )
        return tuple(dict.fromkeys(cases))  # sizes below one element per part round up to the same case
