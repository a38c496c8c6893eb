"""Pipeline parallelism: schedules as data, and the runtime that runs them.

`Schedule`, `Costs` and `schedules` need no torch. `Pipeline` needs it, and is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from echelon.arguments import no_attribute
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

_MEANT = {
    "ScheduleGPipe": " give its name, as Pipeline(model, group, 'gpipe')",
    "Schedule1F1B": " give its name, as Pipeline(model, group, '1f1b')",
    "ScheduleInterleaved1F1B": " give its name, as Pipeline(model, group, 'interleaved-1f1b')",
    "SplitPoint": " name the layers, as in Pipeline(at=)",
    **{"PipelineStage": "Pipeline", "PipelineModule": "Pipeline"},
    "pipeline": "split",
}
"""Names that torch and DeepSpeed have in their modules of pipelines."""


def __getattr__(name: str) -> object:
    if name not in _NEED_TORCH:
        # Python probes a module for names such as __path__.
        raise no_attribute(f"module {__name__!r}", name, () if name.startswith("__") else __all__, _MEANT)
    value: object = getattr(importlib.import_module(_NEED_TORCH[name]), name)
    globals()[name] = value  # the next access does not come here
    return value
