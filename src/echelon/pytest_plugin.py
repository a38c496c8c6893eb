"""Plugin of pytest: the fixture `simulated`.

pytest imports it at every start, in each environment that has Echelon. So torch is imported when a test uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

import echelon

if TYPE_CHECKING:
    from echelon.simulation import Simulation


@pytest.fixture(scope="session")
def simulated() -> Callable[..., Simulation]:
    """Simulates ranks: `simulated(fn, world_size=4)` is `echelon.simulate`, with all its options."""
    return echelon.simulate
