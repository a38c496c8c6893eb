"""One step of one rank in a pipeline, and its text form: "2F0" is stage 2, forward, microbatch 0."""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias, cast, final

from echelon.errors import ScheduleError
from echelon.timeline.timeline import Kind, Part

__all__ = ["Action", "Kind", "Overlapped", "Step", "actions_of", "loop", "parse", "vee"]

# Which rank holds which stage.


def loop(num_ranks: int, num_chunks: int = 1) -> tuple[int, ...]:
    """Goes round the ranks: stage s is on rank s mod num_ranks. 3 ranks x 2 chunks: 0 1 2 0 1 2."""
    return tuple(range(num_ranks)) * num_chunks


def vee(num_ranks: int) -> tuple[int, ...]:
    """Goes down the ranks and back up, 2 stages on each: 0 1 2 2 1 0. The first and the last stage share rank 0."""
    down = tuple(range(num_ranks))
    return down + down[::-1]


@final
class Action(NamedTuple):
    """What one stage does with one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def parts(self) -> tuple[Part, ...]:
        """Returns itself, as a timeline draws it."""
        details = {"stage": self.stage, "microbatch": self.microbatch}
        return (Part(self.kind, self.microbatch, str(self), details),)


@final
class Overlapped(NamedTuple):
    """A forward and a backward that a rank runs as one step, each of its own stage and microbatch."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    def parts(self) -> tuple[Part, ...]:
        """Returns both actions, as a timeline draws them."""
        return (*self.forward.parts(), *self.backward.parts())


Step: TypeAlias = Action | Overlapped
"""What stands in a rank's order."""


def actions_of(step: Step) -> tuple[Action, ...]:
    """Returns the actions of a step: itself, or the two that overlap, the forward first."""
    return (step,) if isinstance(step, Action) else tuple(step)


_ACTION = re.compile(r"(\d+)([FIWB])(\d+)", re.ASCII)
_OVERLAPPED = re.compile(r"\((\d+F\d+);(\d+[BI]\d+)\)OVERLAP_F_B", re.ASCII)


def parse(text: str) -> Step:
    """Reads the text form of a step.

    Raises:
        ScheduleError: the text is not a step.
    """
    text = text.strip()
    if match := _OVERLAPPED.fullmatch(text):
        return Overlapped(_action(match[1]), _action(match[2]))
    return _action(text)


def _action(text: str) -> Action:
    if match := _ACTION.fullmatch(text):
        return Action(int(match[1]), cast(Kind, match[2]), int(match[3]))
    raise ScheduleError(
        f'{text[:40]!r} is not an action: write stage, kind (F, I, W or B) and microbatch, such as "2F0"'
    )
