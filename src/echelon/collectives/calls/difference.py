"""Difference of two ranks in one collective, as advice: from the texts that the ranks compare. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

SAME_CALLS = "every rank must call the same operations in the same order"
_OPERATION = re.compile(
    r"(?P<name>\w+)(?:\((?P<arguments>[^()]*)\))?(?: of (?P<rows>rows of )?(?P<dtype>\w+)(?P<shape>\[.*\]))?"
)
"""Text of a collective, as `Collective.note` writes it."""


def advice_on(mine: str, theirs: str) -> str:
    """Returns the arguments to make equal, if two ranks differ in these alone. Empty if they differ in more.

    Args:
        mine, theirs: operations of both ranks as text, with number, group and line.
    """
    here, there = mine.partition(", #"), theirs.partition(", #")
    one, other = _OPERATION.fullmatch(here[0]), _OPERATION.fullmatch(there[0])
    if here[2] != there[2] or one is None or other is None:
        return ""
    if any(one[part] != other[part] for part in ("name", "rows")) or (one["shape"] is None) != (other["shape"] is None):
        return ""
    of_tensors = [part for part in ("shape", "dtype") if one[part] != other[part]]
    arguments = [(match["arguments"] or "").split(", ") for match in (one, other)]
    names = [a.partition("=")[0] if "=" in a else "op" for a, b in zip(*arguments, strict=False) if a != b]
    what = f"{'rows' if one['rows'] else 'tensors'} of the same {' and '.join(of_tensors)}" if of_tensors else ""
    same = f"the same {' and '.join(names)}" if names else ""
    return f"give {' and '.join(filter(None, (what, same)))} on every rank" if what or same else ""


def lone(texts: Mapping[int, str]) -> str:
    """Returns a sentence on the only rank that calls another operation than all others. Empty if there is none.

    Args:
        texts: the operation of each rank of the group, as text.
    """
    counts = Counter(texts.values())
    if len(counts) != 2 or len(texts) < 3 or 1 not in counts.values():
        return ""
    others, odd = (text for text, _ in counts.most_common())
    rank = next(rank for rank, text in texts.items() if text == odd)
    mine, theirs = _name(odd), _name(others)
    return "" if mine == theirs else f"rank {rank} alone calls {mine} where all others call {theirs}"


def _name(text: str) -> str:
    return re.split(r" of |[,(]", text, maxsplit=1)[0].strip()
