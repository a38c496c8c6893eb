"""Timings and bandwidths of benchmarks as nccl-tests defines them, and the table that `echelon bench` prints.

The size S is that of the whole array: the array that every rank reduces or broadcasts, the result of an all-gather or
gather, the array that a reduce-scatter, scatter or all-to-all splits. algbw is S / time. busbw is algbw times the
fraction of S that must cross the busiest link, so that it compares with the hardware's peak for every operation and
number of ranks: 2 (n - 1) / n for an all-reduce, (n - 1) / n for the operations on parts, 1 for broadcast, reduce and
messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from echelon.bench.request import OF_PARTS, REDUCTIONS, ROOTED, Case


def bus_factor(operation: str, num_ranks: int) -> Fraction:
    """Returns the ratio of busbw to algbw."""
    if operation in OF_PARTS or operation == "all_reduce":
        # An all-reduce moves as much as a reduce-scatter with an all-gather.
        return Fraction((2 if operation == "all_reduce" else 1) * (num_ranks - 1), num_ranks)
    return Fraction(0 if operation == "barrier" else 1)


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
        # Simulated ranks may take no time at all.
        return self.case.size / measured.seconds / 1e9 if measured.seconds > 0 else 0.0

    def bus_bandwidth(self, measured: Measured) -> float:
        """Returns busbw, in GB/s."""
        return self.algorithm_bandwidth(measured) * float(bus_factor(self.case.operation, self.case.num_ranks))

    @property
    def ratio(self) -> float:
        """Time of the last subject divided by Echelon's: above 1, Echelon is faster."""
        return self.measured[-1].seconds / self.measured[0].seconds if self.measured[0].seconds > 0 else 0.0


# Columns of nccl-tests, once for each subject.
_OURS = ("time", "algbw", "busbw", "wrong")
_WIDTHS = (9, 8, 8, 6)
_CASE_WIDTHS = (11, 11, 11, 8, 5)


def titles(subjects: Sequence[str]) -> str:
    """Returns the three header lines of the table."""
    # The widths are fixed, since each line is printed before the next one is measured.
    case = ("size", "count", "type", "op", "root")
    lines = [_cells(cells, _CASE_WIDTHS) for cells in (("",) * 5, case, ("(B)", "(elements)", "", "", ""))]
    for subject in subjects:
        lines[0] += "  " + subject.center(sum(_WIDTHS))
        lines[1] += "  " + _cells(_OURS, _WIDTHS)
        lines[2] += "  " + _cells(("(us)", "(GB/s)", "(GB/s)", ""), _WIDTHS)
    lines[1] += "  ratio" if len(subjects) > 1 else ""
    return "\n".join(f"#{line}".rstrip() for line in lines)


def line(row: Row) -> str:
    """Returns the table's line for a row."""
    case = row.case
    op = case.op if case.operation in REDUCTIONS else "-"
    root = str(case.root) if case.operation in ROOTED else "-"
    text = " " + _cells((str(case.size), str(case.num_elements), case.dtype, op, root), _CASE_WIDTHS)
    for measured in row.measured:
        bandwidths = (f"{row.algorithm_bandwidth(measured):.3f}", f"{row.bus_bandwidth(measured):.3f}")
        text += "  " + _cells((_microseconds(measured), *bandwidths, str(measured.wrong)), _WIDTHS)
    if len(row.measured) == 1:
        return text
    return text + f"  {row.ratio:5.{1 if row.ratio >= 10 else 2}f}"


def _microseconds(measured: Measured) -> str:
    value = measured.seconds * 1e6
    # nccl-tests prints about 5 digits, too; later ones are noise.
    return f"{value:.{2 if value < 1000 else 1 if value < 10000 else 0}f}"


def _cells(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


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


def to_json(head: dict[str, Any], rows: Sequence[Row]) -> str:
    """Returns the whole measurement as one JSON object."""
    return json.dumps({**head, "rows": list(map(_as_values, rows))}, indent=2)


def _as_values(row: Row) -> dict[str, Any]:
    case = row.case
    return {
        "size": case.size,
        "count": case.num_elements,
        "type": case.dtype,
        "op": case.op if case.operation in REDUCTIONS else "-",
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
