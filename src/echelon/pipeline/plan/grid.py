"""Places in the orders of a schedule, problems at these places, and the orders as a grid of text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

Place: TypeAlias = tuple[int, int]
"""A rank and the index of one of its steps. The index after the last step stands for a missing step."""


class Problem(NamedTuple):
    """Mistake in the orders and its places. A missing step is at the index after its rank's last step."""

    text: str
    places: tuple[Place, ...]


def where(step: object, place: Place) -> str:
    """Returns the text of a step with its place, such as "2F0 (rank 2, step 5)"."""
    return f"{step} (rank {place[0]}, step {place[1]})"


_MOST_COLUMNS = 24
_MOST_ROWS = 24
_AROUND = 3


def grid(orders: Sequence[Sequence[object]], marked: Collection[Place] = ()) -> str:
    """Returns the orders as text, a row per rank and a column per step, with marked places as >2F0<.

    More than 24 rows or columns are cut to the surroundings of the marked places.
    """
    most_steps = max(map(len, orders), default=0)
    # One column more than there are steps: a missing step is marked after the last one.
    columns = _selected({step for _, step in marked}, most_steps + 1, _MOST_COLUMNS)
    rows = _selected({rank for rank, _ in marked}, len(orders), _MOST_ROWS)
    table = [["", *(str(column) for column in columns)]]
    table += [[f"rank {rank}", *(_cell(orders[rank], rank, step, marked) for step in columns)] for rank in rows]
    if not any(row[-1] for row in table[1:]):  # nothing is missing at the end
        table = [row[:-1] for row in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [_line(row, widths, [-1, *columns]) for row in table]
    left_out = len(orders) - len(rows)
    return "\n".join([*lines, f"({left_out} more ranks)"] if left_out else lines)


def _selected(marked: set[int], count: int, most: int) -> list[int]:
    """Returns the indices to show: all, or the marked ones with their neighbours, or the first if none is marked."""
    if count <= most:
        return list(range(count))
    near: list[int] = []
    for index in sorted(marked) or [0]:
        around = range(max(0, index - _AROUND), min(count, index + _AROUND + 1))
        near += [other for other in around if other not in near]
        if len(near) >= most:
            break
    return sorted(near[:most])


def _cell(order: Sequence[object], rank: int, step: int, marked: Collection[Place]) -> str:
    text = str(order[step]) if step < len(order) else ""
    if (rank, step) in marked:
        return f">{text or '?'}<"
    return f" {text} " if text else ""


def _line(row: list[str], widths: list[int], columns: list[int]) -> str:
    """Joins a row, with dots in place of omitted columns."""
    cells = [row[0].ljust(widths[0])]
    for index in range(1, len(row)):
        gap = " " if columns[index] == columns[index - 1] + 1 else " .. "
        cells.append(gap + row[index].ljust(widths[index]))
    return "".join(cells).rstrip()
