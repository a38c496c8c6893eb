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


class _Column(NamedTuple):
    """Column of the table."""

    title: str
    unit: str
    width: int


# Columns of nccl-tests. Two subjects share 80 characters, so `echelon bench` prints type, op and root above the table.
_SIZE, _COUNT = _Column("size", "(B)", 11), _Column("count", "(elements)", 11)
_ONCE = (_SIZE, _COUNT, _Column("type", "", 11), _Column("op", "", 8), _Column("root", "", 5))
_TIME, _WRONG = _Column("time", "(us)", 9), _Column("wrong", "", 6)
_BUS_BANDWIDTH = _Column("busbw", "(GB/s)", 8)
_ALONE = (_TIME, _Column("algbw", "(GB/s)", 8), _BUS_BANDWIDTH, _WRONG)
_BESIDE = (_TIME, _BUS_BANDWIDTH, _WRONG)


def titles(subjects: Sequence[str]) -> str:
    """Returns the three header lines of the table."""
    # The widths are fixed, since each line is printed before the next one is measured.
    of_case, of_subject = _columns(len(subjects))
    lines = [_cells(each, of_case) for each in (("",) * len(of_case), _titles(of_case), _units(of_case))]
    for subject in subjects:
        lines[0] += "  " + subject.center(sum(column.width for column in of_subject))
        lines[1] += "  " + _cells(_titles(of_subject), of_subject)
        lines[2] += "  " + _cells(_units(of_subject), of_subject)
    lines[1] += "  ratio" if len(subjects) > 1 else ""
    return "\n".join(f"#{line}".rstrip() for line in lines)


def line(row: Row) -> str:
    """Returns the table's line for a row."""
    of_case, of_subject = _columns(len(row.measured))
    text = " " + _cells((str(row.case.size), str(row.case.num_elements), *_call(row.case))[: len(of_case)], of_case)
    for measured in row.measured:
        cells = {
            "time": _microseconds(measured),
            "algbw": f"{row.algorithm_bandwidth(measured):.3f}",
            "busbw": f"{row.bus_bandwidth(measured):.3f}",
            "wrong": str(measured.wrong),
        }
        text += "  " + _cells([cells[column.title] for column in of_subject], of_subject)
    if len(row.measured) == 1:
        return text
    return text + f"  {row.ratio:5.{1 if row.ratio >= 10 else 2}f}"


def _columns(num_subjects: int) -> tuple[Sequence[_Column], Sequence[_Column]]:
    """Returns the columns of a case and of each subject."""
    return (_ONCE, _ALONE) if num_subjects == 1 else (_ONCE[:2], _BESIDE)


def _call(case: Case) -> tuple[str, str, str]:
    """Returns type, op and root as text, "-" where the operation has none."""
    op = case.op if case.operation in REDUCTIONS else "-"
    return case.dtype, op, str(case.root) if case.operation in ROOTED else "-"


def _titles(columns: Sequence[_Column]) -> list[str]:
    return [column.title for column in columns]


def _units(columns: Sequence[_Column]) -> list[str]:
    return [column.unit for column in columns]


def _microseconds(measured: Measured) -> str:
    value = measured.seconds * 1e6
    # nccl-tests prints about 5 digits, too; later ones are noise.
    return f"{value:.{2 if value < 1000 else 1 if value < 10000 else 0}f}"


def _cells(cells: Sequence[str], columns: Sequence[_Column]) -> str:
    return "".join(cell.rjust(column.width) for cell, column in zip(cells, columns, strict=True))


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
