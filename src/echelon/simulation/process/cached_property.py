"""Cached properties without a lock, so that a rank may wait inside of one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any


@contextmanager
def without_locks() -> Iterator[None]:
    """Inside, `functools.cached_property` computes without its lock.

    Python 3.11 has one lock for a property of all objects of a class. A rank that communicates in the property, as
    Transformers' `TrainingArguments` does, would hold it over its wait. Python 3.12 has none.
    """
    if sys.version_info >= (3, 12):
        yield
        return
    # A property of the class comes before the attribute of the same name that each cached property has.
    functools.cached_property.lock = property(lambda _: nullcontext(), _keep)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del functools.cached_property.lock  # type: ignore[attr-defined]


def _keep(cached: Any, lock: object) -> None:
    cached.__dict__["lock"] = lock
