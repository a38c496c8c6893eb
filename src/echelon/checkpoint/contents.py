"""Check of the values in a manifest, before they are used. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from echelon.errors import CheckpointError

_OF_DICTS: dict[str, tuple[type, ...]] = {
    "aliases": (str,),
    "models": (list,),
    "progress": (dict,),
    "kinds": (str,),
    "groups": (list,),
    "values": (object,),
    "shared": (object,),
    "extra_state": (object,),
}
"""Sections that are dicts, and the types of their values."""


def check_contents(step: int, data: Mapping[str, Any], num_ranks: int) -> None:
    """Checks the form of the values that all ranks share.

    Raises:
        CheckpointError: no program of this library can have written them.
    """
    for name, types in _OF_DICTS.items():
        section = data.get(name)
        if not isinstance(section, dict) or not all(isinstance(value, types) for value in section.values()):
            raise _strange(step, name)
    places = data.get("places")
    if not isinstance(places, list) or len(places) != num_ranks or not all(map(_is_place, places)):
        raise _strange(step, "places")
    if not all(_are_names(names) for names in data["models"].values()):
        raise _strange(step, "models")
    for groups in data["groups"].values():
        if not all(isinstance(one, dict) and _are_names(one.get("params")) and "options" in one for one in groups):
            raise _strange(step, "groups")
    for values in data["progress"].values():
        is_mean = _is_mean(values.get("usual_samples", 1.0))
        if not (_is_count(values.get("num_steps", 0)) and _are_names(values.get("order") or []) and is_mean):
            raise _strange(step, "progress")


def _strange(step: int, name: str) -> CheckpointError:
    return CheckpointError(f"the manifest of step {step} has {name!r} in a form that no save writes: it is damaged")


def _is_place(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) == 4 and all(map(_is_count, value))


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_mean(value: object) -> bool:
    return type(value) is float and 0 < value < math.inf


def _is_count(value: object) -> bool:
    # True and False are ints, too.
    return type(value) is int and value >= 0
