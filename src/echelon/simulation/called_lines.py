"""Lines of the program at which ranks called the same collective, to find calls in another order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from echelon.backends.collective import Collective
from echelon.call_site import Place, line_of
from echelon.operation_records import OperationRecord

_MOST_PARTINGS = 10_000
"""Most pairs of lines and ranks that are kept, so that a program with generated code needs no more memory."""
_NAMED = 3
"""Number of pairs of lines that notes describe."""
_WITHOUT_VALUES = frozenset({"barrier", "empty"})
"""Collectives that cannot mix up values."""

_Line: TypeAlias = tuple[str, int, int]
"""File, first line of the function, and index of the instruction: equal on ranks with modules of their own."""


class _Call(NamedTuple):
    rank: int
    """Rank in the group."""
    place: Place
    line: _Line


class _Parting(NamedTuple):
    group: str
    sequence: int
    calls: tuple[_Call, _Call]


@dataclass(slots=True)
class _Open:
    """Collective that some ranks have not called yet."""

    num_left: int
    first: _Call | None = None


class CalledLines:
    """Lines at which the ranks of one group called its collectives."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Starts without calls. `ranks`: the world's rank of each member."""
        self._ranks = ranks
        self._open: dict[int, _Open] = {}
        self._lines: list[set[_Line]] = [set() for _ in ranks]
        self._partings: dict[tuple[_Line, _Line, int, int], _Parting] = {}

    def add(self, rank: int, collective: Collective, record: OperationRecord) -> None:
        """Adds the call of a rank of the group, and compares its line with that of the first caller."""
        call = self._call(rank, collective, record)
        sequence = record.sequence
        seen = self._open.get(sequence)
        if seen is None:
            seen = self._open[sequence] = _Open(len(self._ranks))
        seen.num_left -= 1
        if not seen.num_left:
            del self._open[sequence]
        if call is None:
            return
        if seen.first is None:
            seen.first = call
        elif seen.first.line != call.line and len(self._partings) < _MOST_PARTINGS:
            one, other = sorted((seen.first, call), key=lambda each: each.rank)
            key = one.line, other.line, one.rank, other.rank
            if key not in self._partings:
                self._partings[key] = _Parting(record.group, sequence, (one, other))

    def _call(self, rank: int, collective: Collective, record: OperationRecord) -> _Call | None:
        # The root of a broadcast has a line of its own by right, also where the ranks take turns as the root.
        if record.place is None or collective.kind in _WITHOUT_VALUES or collective.root == rank:
            return None
        code, instruction, _ = record.place
        line = code.co_filename, code.co_firstlineno, instruction
        self._lines[rank].add(line)
        return _Call(rank, record.place, line)

    def swapped(self) -> list[tuple[int, str]]:
        """Returns calls that look swapped, one for each pair of lines: the number of the call, and a sentence.

        Two ranks were at two lines, in two functions, and each of them also calls at the other line. Branches of one
        function are left out, since ranks may take turns in them.
        """
        found: dict[frozenset[_Line], _Parting] = {}
        for parting in self._partings.values():
            one, other = parting.calls
            in_one_function = one.line[:2] == other.line[:2]
            if in_one_function or other.line not in self._lines[one.rank] or one.line not in self._lines[other.rank]:
                continue
            pair = frozenset((one.line, other.line))
            earlier = found.get(pair)
            if earlier is None or parting.sequence < earlier.sequence:
                found[pair] = parting
        return [(parting.sequence, self._text(parting)) for parting in found.values()]

    def _text(self, parting: _Parting) -> str:
        one, other = (f"at {line_of(call.place)} on rank {self._ranks[call.rank]}" for call in parting.calls)
        return f"#{parting.sequence} of group {parting.group!r} was called {one} and {other}"


def notes_of(groups: Iterable[CalledLines]) -> tuple[str, ...]:
    """Returns sentences about swapped calls of all groups, the earliest call first."""
    found = [text for _, text in sorted(each for lines in groups for each in lines.swapped())]
    rest = len(found) - _NAMED
    return (*found[:_NAMED], f"{rest} more pairs of lines differ so") if rest > 0 else tuple(found)
