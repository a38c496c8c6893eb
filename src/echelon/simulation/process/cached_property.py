"""Cached properties without a lock, so that a rank may wait inside of one."""

from __future__ import annotations

import functools
import sys
from contextlib import nullcontext
from typing import Any

from echelon.replacements import Replacement


def without_locks() -> list[Replacement]:
    """Lets `functools.cached_property` compute without its lock.

    Python 3.11 has one lock for a property of all objects of a class. A rank that communicates in the property, as
    Transformers' `TrainingArguments` does, would hold it over its wait. Python 3.12 has none.
    """
    if sys.version_info >= (3, 12):
        return []
    # A property of the class comes before the attribute of the same name that each cached property has.
    lock = property(lambda _: nullcontext(), _keep)
    return [Replacement(functools.cached_property, "lock", lambda _: lock, may_be_missing=True)]


def _keep(cached: Any, lock: object) -> None:
    cached.__dict__["lock"] = lock
