"""Cases, timings and bandwidths of benchmarks as nccl-tests defines them, and the table that `echelon bench` prints.

The size S is that of the whole array: the array that every rank reduces or broadcasts, the result of an all-gather or
gather, the array that a reduce-scatter, scatter or all-to-all splits. algbw is S / time. busbw is algbw times the
fraction of S that must cross the busiest link, so that it compares with the hardware's peak for every operation and
number of ranks: 2 (n - 1) / n for an all-reduce, (n - 1) / n for the operations on parts, 1 for broadcast, reduce and
messages.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from echelon.collectives.plans.algorithms import OPERATIONS as COLLECTIVES

# Columns of nccl-tests, once for each subject.
_OURS = ("time", "algbw", "busbw", "wrong")
_WIDTHS = (9, 8, 8, 6)
_CASE_WIDTHS = (11, 11, 11, 8, 5)


def titles(subjects: Sequence[str]) -> str:
    """Returns the three header lines of the table."""
    case = ("size", "count", "type", "op", "root")
    units = ("(B)", "(elements)", "", "", "")
    lines = [_cells(("", "", "", "", ""), _CASE_WIDTHS), _cells(case, _CASE_WIDTHS), _cells(units, _CASE_WIDTHS)]
    for subject in subjects:
        lines[0] += "  " + subject.center(sum(_WIDTHS))
        lines[1] += "  " + _cells(_OURS, _WIDTHS)
        lines[2] += "  " + _cells(("(us)", "(GB/s)", "(GB/s)", ""), _WIDTHS)
    if len(subjects) > 1:
        lines[1] += "  ratio"
    return "\n".join(f"#{line}".rstrip() for line in lines)


def line(row: Row) -> str:
    """Returns the table's line for a row."""
    case = row.case
    op, root = _op(case), str(case.root) if case.operation in ROOTED else "-"
    text = " " + _cells((str(case.size), str(case.num_elements), case.dtype, op, root), _CASE_WIDTHS)
    for measured in row.measured:
        bandwidths = (f"{row.algorithm_bandwidth(measured):.3f}", f"{row.bus_bandwidth(measured):.3f}")
        text += "  " + _cells((_microseconds(measured), *bandwidths, str(measured.wrong)), _WIDTHS)
    return text + (f"  {_ratio(row.ratio)}" if len(row.measured) > 1 else "")


def summary(rows: Sequence[Row]) -> str:
    """Returns the lines below the table: wrong values, and Echelon's mean bus bandwidth."""
    wrong = wrong_values(rows)
    mean = sum(row.bus_bandwidth(row.measured[0]) for row in rows) / max(1, len(rows))
    lines = [f"# wrong values: {wrong}, {'FAILED' if wrong else 'OK'}", f"# mean bus bandwidth: {mean:.3f} GB/s"]
    if rows and len(rows[0].measured) > 1:
        lines.append(f"# ratio: the time of {rows[0].measured[-1].subject} over ours")
    return "\n".join(lines)


def wrong_values(rows: Sequence[Row]) -> int:
    """Returns the number of wrong elements in all rows, of all subjects."""
    return sum(measured.wrong for row in rows for measured in row.measured)


def as_values(row: Row) -> dict[str, Any]:
    """Returns a row, ready for JSON."""
    case = row.case
    return {
        "size": case.size,
        "count": case.num_elements,
        "type": case.dtype,
        "op": _op(case),
        "root": case.root if case.operation in ROOTED else None,
        "subjects": {
            measured.subject: {
                "seconds": measured.seconds,
                "algbw": row.algorithm_bandwidth(measured),
                "busbw": row.bus_bandwidth(measured),
                "wrong": measured.wrong,
            }
            for measured in row.measured
        },
    }


def to_json(head: dict[str, Any], rows: Sequence[Row]) -> str:
    """Returns the whole measurement as one JSON object."""
    return json.dumps({**head, "rows": [as_values(row) for row in rows]}, indent=2)


def _op(case: Case) -> str:
    return case.op if case.operation in REDUCTIONS else "-"


def _microseconds(measured: Measured) -> str:
    value = measured.seconds * 1e6
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}" if value < 10000 else f"{value:.0f}"


def _ratio(value: float) -> str:
    return f"{value:5.1f}" if value >= 10 else f"{value:5.2f}"


def _cells(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


OPERATIONS = (*COLLECTIVES, "send_recv")
"""A send_recv is a ping-pong between rank 0 and the last rank; its time is half a round trip."""
REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
ROOTED = frozenset({"reduce", "broadcast", "gather", "scatter"})
OF_PARTS = frozenset({"all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"})
"""Operations on one part per rank; their count is that of a part."""

_FACTORS: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    **dict.fromkeys(OF_PARTS, lambda n: Fraction(n - 1, n)),
    **dict.fromkeys(("broadcast", "reduce", "send_recv"), lambda _: Fraction(1)),
    "barrier": lambda _: Fraction(0),
}


def bus_factor(operation: str, num_ranks: int) -> Fraction:
    """Returns the ratio of busbw to algbw."""
    return _FACTORS[operation](num_ranks)


class Case(NamedTuple):
    """One call to measure."""

    operation: str
    num_ranks: int
    num_elements: int
    """Elements of the whole array; for operations on parts, of one rank's part."""
    dtype: str
    itemsize: int
    op: str
    root: int

    @classmethod
    def of(cls, operation: str, num_ranks: int, size: int, dtype: str, itemsize: int, op: str, root: int) -> Case:
        """Returns the case with the largest array of at most `size` bytes, and at least one element per part."""
        parts = num_ranks if operation in OF_PARTS else 1
        num_elements = 0 if operation == "barrier" else max(1, size // (itemsize * parts))
        return cls(operation, num_ranks, num_elements, dtype, itemsize, op, root)

    @property
    def size(self) -> int:
        """Bytes of the whole array."""
        return self.num_elements * self.itemsize * (self.num_ranks if self.operation in OF_PARTS else 1)


class Measured(NamedTuple):
    """Time and wrong elements of one subject for a case."""

    subject: str
    seconds: float
    wrong: int
    """Wrong elements in the results of all ranks."""


class Row(NamedTuple):
    """Case with the measurement of each subject, Echelon's first."""

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
        """Time of the last subject divided by Echelon's: above 1, Echelon is faster."""
        return self.measured[-1].seconds / self.measured[0].seconds if self.measured[0].seconds > 0 else 0.0
