"""A script foreseen on a cluster, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from echelon.foresight.run import Foreseen, foresee
from echelon.launch.run import Console, Program
from echelon.simulation.script.run import Failure, failure_of
from echelon.simulation.script.script import Script


@dataclass(frozen=True)
class Outcome:
    """Outcome of a script: its step on the cluster, or its failure."""

    foreseen: Foreseen | None
    failure: Failure | None = None


def foresee_script(program: Program, world_size: int, console: Console, **options: Any) -> Outcome:
    """Foresees a step of a script. Blocks until it is recorded and played.

    Args:
        program: script or module.
        world_size: number of ranks.
        console: destination of the output of recorded ranks.
        options: further arguments of `foresee`.

    Raises:
        EchelonError: an argument is invalid. No rank has begun.
        KeyboardInterrupt: Ctrl-C.
    """
    script = Script(program, console)
    try:
        with script.installed():
            foreseen = foresee(script, world_size, **options)
    except Exception as error:
        if not script.has_begun:
            raise
        return Outcome(None, failure_of(error, script))
    return Outcome(foreseen)
