"""What numbers a simulation can be given."""

from __future__ import annotations

import math
from numbers import Real


def is_amount(value: object) -> bool:
    """Says whether a value is a number, at least 0 and finite: seconds, say."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf


def is_factor(value: object) -> bool:
    """Says whether a value is a number above 0, and finite."""
    return is_amount(value) and value != 0


def is_count(value: object, least: int = 0) -> bool:
    """Says whether a value is a whole number, at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
