"""Wording of counts, of ranks and of lists of problems in messages. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def counted(number: int, what: str) -> str:
    """Returns "1 rank" or "2 ranks", "1 microbatch" or "2 microbatches"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"


def with_article(name: str) -> str:
    """Returns a name after its article, as it is spoken: "an a100-40g", "an h100", "a v100", "a cpu"."""
    is_spelled = name[1:2].isdigit()
    return f"{'an' if name[:1].lower() in set('aefhilmnorsx' if is_spelled else 'aeiou') else 'a'} {name}"


def in_words(names: Sequence[str]) -> str:
    """Returns names as they are spoken: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


_MOST_LISTED = 8
"""Most ranges of ranks that are written out."""


def listed(ranks: Iterable[int]) -> str:
    """Returns ranks as text, neighbours as a range: "rank 3", "ranks 1-7, 9 and 65,520 more"; "no rank" for none."""
    ordered = sorted(ranks)
    if not ordered:
        return "no rank"
    ranges: list[str] = []
    begin = number = 0
    while begin < len(ordered) and len(ranges) < _MOST_LISTED:
        end = begin
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        if end - begin < 2:  # "3, 4" is as clear as "3-4"
            end = begin
        ranges.append(f"{ordered[begin]}-{ordered[end]}" if end > begin else f"{ordered[begin]}")
        begin = number = end + 1
    left = len(ordered) - number
    if left:
        ranges.append(f"{left:,} more")
    noun = "rank" if len(ordered) == 1 else "ranks"
    return f"{noun} {ranges[0]}" if len(ranges) == 1 else f"{noun} {', '.join(ranges[:-1])} and {ranges[-1]}"


_MOST_PROBLEMS = 8
"""Most problems that are all written out."""
_OF_A_KIND = 3
"""Problems of a kind that are written out in a longer list."""
_MOST_LINES = 20
"""Most problems that are written out in any list."""
# An action such as 2F0, or a number: the texts of problems of one kind differ in these alone.
_VARIES = re.compile(r"\d+[FIWB]?\d*")


def itemized(problems: Sequence[str]) -> list[str]:
    """Returns problems as lines of a list. Of a long list, the first of each kind, and the numbers of the others."""
    if len(problems) <= _MOST_PROBLEMS:
        return [f"  - {problem}" for problem in problems]
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(_VARIES.sub("#", problem), []).append(problem)
    lines, num_left = list[str](), len(problems)
    for alike in kinds.values():
        shown = alike[:_OF_A_KIND]
        if len(lines) + len(shown) > _MOST_LINES:
            return [*lines, f"  - and {num_left} more"]
        lines += [f"  - {problem}" for problem in shown]
        if left := len(alike) - len(shown):
            lines.append(f"  - and {left} more of this kind")
        num_left -= len(alike)
    return lines
