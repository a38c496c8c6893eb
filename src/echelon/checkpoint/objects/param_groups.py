"""Param groups of an optimizer by the names of their parameters, merged over ranks and compared with saved ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from echelon.checkpoint.state import Json
from echelon.errors import InvalidArgument


class ParamGroup(NamedTuple):
    """Parameters with the same options."""

    names: tuple[str, ...]
    options: Json


def merge(by_rank: Sequence[Sequence[ParamGroup]], section: str) -> list[ParamGroup]:
    """Returns the groups of the unsplit model, made from the groups of all ranks.

    A rank of a pipeline has the parameters of its stages only. Groups are paired by their place if every rank has the
    same number with the same options, else by their options.

    Raises:
        InvalidArgument: the groups of two ranks cannot be paired.
    """
    first = by_rank[0]
    if all([each.options for each in groups] == [each.options for each in first] for groups in by_rank):
        columns = [[groups[index] for groups in by_rank] for index in range(len(first))]
    else:
        columns = []
        for groups in by_rank:
            for group in groups:
                same = [column for column in columns if column[0].options == group.options]
                if len(same) > 1 or [each.options for each in groups].count(group.options) > 1:
                    raise InvalidArgument(
                        f"the {section} has other param groups on other ranks, and some have equal options, so they "
                        "cannot be paired: give every rank the same groups, with an empty one where it has no parameter"
                    )
                if same:
                    same[0].append(group)
                else:
                    columns.append([group])
    return [
        # Replicas give the same names.
        ParamGroup(tuple(dict.fromkeys(name for group in column for name in group.names)), column[0].options)
        for column in columns
    ]


def match(saved: Sequence[ParamGroup], live: Sequence[ParamGroup], section: str, *, strict: bool) -> list[int | None]:
    """Returns the index of the saved group for each live one.

    None for an empty group, and without `strict` for one whose parameters were not saved.

    Raises:
        InvalidArgument: a group has other parameters, or with `strict` not all groups are found.
    """
    found: list[int | None] = []
    for number, group in enumerate(live):
        names = set(group.names)
        having = [index for index, each in enumerate(saved) if names & set(each.names)]
        if not names or (not having and not strict):
            found.append(None)
        elif not having:
            raise InvalidArgument(
                f"param group {number} of the {section} has {_shown(names)}, which the checkpoint's {section} does not "
                "have: make the optimizer with the parameters that were saved, or pass strict=False"
            )
        elif len(having) > 1:
            raise InvalidArgument(
                f"param group {number} of the {section} has the parameters of the saved groups "
                f"{' and '.join(map(str, having))}: make the optimizer with the {len(saved)} groups that were saved"
            )
        elif strict and names != set(saved[having[0]].names):
            other = set(saved[having[0]].names)
            raise InvalidArgument(
                f"param group {number} of the {section} has {len(names)} parameters and the saved one {len(other)}, "
                f"which differ in {_shown(names ^ other)}: make the optimizer with the groups that were saved"
            )
        else:
            found.append(having[0])
    missing = [index for index, each in enumerate(saved) if each.names and index not in found]
    if strict and missing:
        raise InvalidArgument(
            f"the {section} has no group for the saved group {missing[0]} with {_shown(saved[missing[0]].names)}: "
            f"make the optimizer with the {len(saved)} groups that were saved, or pass strict=False"
        )
    return found


def _shown(names: Sequence[str] | set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
