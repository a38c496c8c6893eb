"""What is measured, and the figures that come of a time, as nccl-tests defines them.

The size S is that of the whole array: what every rank combines or broadcasts, what an all-gather or gather brings
together, what a reduce-scatter, scatter or all-to-all splits. algbw is S / time. busbw is algbw times what of S crosses
the busiest link at least, so that it compares with the speed of the hardware whatever the operation and the ranks:
2 (n - 1) / n for an all-reduce, (n - 1) / n for the operations on parts, 1 for broadcast, reduce and messages.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from echelon.collectives.algorithms import OPERATIONS as COLLECTIVES

OPERATIONS = (*COLLECTIVES, "send_recv")
"""A send_recv is a message from rank 0 to the last and one back; its time is half of that."""
REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
ROOTED = frozenset({"reduce", "broadcast", "gather", "scatter"})
OF_PARTS = frozenset({"all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"})
"""The operations on one part per rank; the count is that of a part."""

_FACTORS: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    **dict.fromkeys(OF_PARTS, lambda n: Fraction(n - 1, n)),
    **dict.fromkeys(("broadcast", "reduce", "send_recv"), lambda _: Fraction(1)),
    "barrier": lambda _: Fraction(0),
}


def bus_factor(operation: str, num_ranks: int) -> Fraction:
    """Returns what busbw is of algbw."""
    return _FACTORS[operation](num_ranks)


class Case(NamedTuple):
    """One call to measure."""

    operation: str
    num_ranks: int
    num_elements: int
    """Elements: of the whole array, or of the part of one rank for the operations on parts."""
    dtype: str
    itemsize: int
    op: str
    root: int

    @classmethod
    def of(cls, operation: str, num_ranks: int, size: int, dtype: str, itemsize: int, op: str, root: int) -> Case:
        """Returns the case whose array is as near to `size` bytes as whole elements can come from below, but one."""
        parts = num_ranks if operation in OF_PARTS else 1
        num_elements = 0 if operation == "barrier" else max(1, size // (itemsize * parts))
        return cls(operation, num_ranks, num_elements, dtype, itemsize, op, root)

    @property
    def size(self) -> int:
        """The bytes of the whole array."""
        return self.num_elements * self.itemsize * (self.num_ranks if self.operation in OF_PARTS else 1)


class Measured(NamedTuple):
    """What one subject took for a case."""

    subject: str
    seconds: float
    wrong: int
    """Elements of the results of all ranks that were not right."""


class Row(NamedTuple):
    """A case, and what each subject took for it; ours is the first."""

    case: Case
    measured: tuple[Measured, ...]

    def algorithm_bandwidth(self, measured: Measured) -> float:
        """Returns algbw, in GB/s."""
        return self.case.size / measured.seconds / 1e9 if measured.seconds > 0 else 0.0

    def bus_bandwidth(self, measured: Measured) -> float:
        """Returns busbw, in GB/s."""
        return self.algorithm_bandwidth(measured) * float(bus_factor(self.case.operation, self.case.num_ranks))

    @property
    def ratio(self) -> float:
        """How many times as long as ours the last subject took."""
        return self.measured[-1].seconds / self.measured[0].seconds if self.measured[0].seconds > 0 else 0.0
