"""Pipeline parallelism: schedules as data, and the runtime that runs them.

`Schedule`, `Costs` and `schedules` need no torch. `Pipeline` needs it, and is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from echelon.pipeline import schedules
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.plan.schedule import Schedule

if TYPE_CHECKING:
    from echelon.pipeline.cut.cut import Parts, split
    from echelon.pipeline.run.pipeline import Pipeline
    from echelon.pipeline.run.step import StepOutput
    from echelon.pipeline.stage.replay import keyed

# Importing torch takes seconds; planning and drawing a schedule do not need it.
_NEED_TORCH = {
    "Parts": "echelon.pipeline.cut.cut",
    "Pipeline": "echelon.pipeline.run.pipeline",
    "StepOutput": "echelon.pipeline.run.step",
    "keyed": "echelon.pipeline.stage.replay",
    "split": "echelon.pipeline.cut.cut",
}

__all__ = ["Costs", "Parts", "Pipeline", "Schedule", "StepOutput", "keyed", "schedules", "split"]


def __getattr__(name: str) -> object:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_NEED_TORCH[name]), name)
    globals()[name] = value  # the next access does not come here
    return value
