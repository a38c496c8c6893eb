"""Named pipeline schedules, one file for each family, and the search for a schedule tailored to given costs.

To add one: write a function that takes num_ranks, num_microbatches (and num_chunks) and returns a `Schedule` of
`Action`s. docs/tutorials/write_a_schedule.md shows one in 20 lines.

Pure.
"""

from __future__ import annotations

import difflib
from typing import NoReturn

from echelon.arguments import no_attribute
from echelon.pipeline.plan.action import Action, Overlapped, loop, vee
from echelon.pipeline.schedules.recommendation import recommend
from echelon.pipeline.schedules.registry import build, names
from echelon.pipeline.search.engine import search


def __getattr__(name: str) -> NoReturn:
    near = difflib.get_close_matches(name.replace("_", "-").lower(), names(), n=1)
    meant = {name: f" write build({near[0]!r}, num_ranks, num_microbatches)"} if near else {}
    # Python probes a module for names such as __path__.
    raise no_attribute(f"module {__name__!r}", name, () if name.startswith("__") else __all__, meant)


__all__ = ["Action", "Overlapped", "build", "loop", "names", "recommend", "search", "vee"]
