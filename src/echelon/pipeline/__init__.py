"""Pipeline parallelism: schedules as data, and the runtime that runs them.

`Schedule`, `Costs` and `schedules` need no torch; `Pipeline`, which does, is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from echelon.pipeline import schedules
from echelon.pipeline.cost import Costs
from echelon.pipeline.schedule import Schedule

if TYPE_CHECKING:
    from echelon.pipeline.cut import Parts, split
    from echelon.pipeline.outcome import StepOutput
    from echelon.pipeline.pipeline import Pipeline
    from echelon.pipeline.randomness import keyed

_NEED_TORCH = {
    "Parts": "echelon.pipeline.cut",
    "Pipeline": "echelon.pipeline.pipeline",
    "StepOutput": "echelon.pipeline.outcome",
    "keyed": "echelon.pipeline.randomness",
    "split": "echelon.pipeline.cut",
}

__all__ = ["Costs", "Parts", "Pipeline", "Schedule", "StepOutput", "keyed", "schedules", "split"]


def __getattr__(name: str) -> object:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_NEED_TORCH[name]), name)
    globals()[name] = value
    return value
