"""One step of one rank in a pipeline, and its text form: "2F0" is stage 2, forward, microbatch 0."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias

from echelon.errors import ScheduleError

Kind: TypeAlias = Literal["F", "I", "W", "B"]
"""F: forward. I: backward for the input. W: backward for the weights. B: both at once."""


class Action(NamedTuple):
    """What one stage does with one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlapped(NamedTuple):
    """A forward and a backward that a rank runs as one step, each of its own stage and microbatch."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step: TypeAlias = Action | Overlapped
"""What stands in a rank's order."""

_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")
_OVERLAPPED = re.compile(r"\((\d+F\d+);(\d+[BI]\d+)\)OVERLAP_F_B")


def parse(text: str) -> Step:
    """Reads the text form of a step.

    Raises:
        ScheduleError: the text is not a step.
    """
    text = text.strip()
    if match := _ACTION.fullmatch(text):
        return Action(int(match[1]), match[2], int(match[3]))  # type: ignore[arg-type]
    if match := _OVERLAPPED.fullmatch(text):
        return Overlapped(parse(match[1]), parse(match[2]))  # type: ignore[arg-type]
    raise ScheduleError(f'{text!r} is not an action: write stage, kind (F, I, W or B) and microbatch, such as "2F0"')
