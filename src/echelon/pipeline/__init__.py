"""Pipeline parallelism: schedules as data, and the runtime that runs them.

`Schedule`, `Costs` and `schedules` need no torch; `Pipeline`, which does, is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.pipeline import schedules
from echelon.pipeline.cost import Costs
from echelon.pipeline.schedule import Schedule

if TYPE_CHECKING:
    from echelon.pipeline.outcome import StepOutput
    from echelon.pipeline.pipeline import Pipeline

__all__ = ["Costs", "Pipeline", "Schedule", "StepOutput", "schedules"]


def __getattr__(name: str) -> object:
    if name not in ("Pipeline", "StepOutput"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from echelon.pipeline import pipeline

    value: object = getattr(pipeline, name)
    globals()[name] = value
    return value
