"""The table that `echelon bench` prints: the columns of nccl-tests, once for each subject."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from echelon.bench.figures import REDUCTIONS, ROOTED, Case, Measured, Row

_OURS = ("time", "algbw", "busbw", "wrong")
_WIDTHS = (9, 8, 8, 6)
_CASE_WIDTHS = (11, 11, 11, 8, 5)


def titles(subjects: Sequence[str]) -> str:
    """Returns the three lines above the rows."""
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
    """Returns the line of a row."""
    case = row.case
    op, root = _op(case), str(case.root) if case.operation in ROOTED else "-"
    text = " " + _cells((str(case.size), str(case.num_elements), case.dtype, op, root), _CASE_WIDTHS)
    for measured in row.measured:
        bandwidths = (f"{row.algorithm_bandwidth(measured):.3f}", f"{row.bus_bandwidth(measured):.3f}")
        text += "  " + _cells((_microseconds(measured), *bandwidths, str(measured.wrong)), _WIDTHS)
    return text + (f"  {_ratio(row.ratio)}" if len(row.measured) > 1 else "")


def summary(rows: Sequence[Row]) -> str:
    """Returns what is said below the rows: how much was wrong, and the mean bus bandwidth of ours."""
    wrong = wrong_values(rows)
    mean = sum(row.bus_bandwidth(row.measured[0]) for row in rows) / max(1, len(rows))
    lines = [f"# wrong values: {wrong}, {'FAILED' if wrong else 'OK'}", f"# mean bus bandwidth: {mean:.3f} GB/s"]
    if rows and len(rows[0].measured) > 1:
        lines.append(f"# ratio: the time of {rows[0].measured[-1].subject} over ours")
    return "\n".join(lines)


def wrong_values(rows: Sequence[Row]) -> int:
    """Returns how many elements were not right, of all rows and subjects."""
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
    """Writes everything as one JSON object."""
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
