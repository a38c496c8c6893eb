"""Steps of a pipeline and their text form ("2F0" is stage 2, forward, microbatch 0), and placements of stages."""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias, cast, final

from echelon.errors import ScheduleError
from echelon.timeline.timeline import Kind, Part

__all__ = ["Action", "Handover", "Kind", "Overlapped", "Place", "Step", "actions_of", "loop", "parse", "vee"]


def loop(num_ranks: int, num_chunks: int = 1) -> tuple[int, ...]:
    """Returns the placement that goes round the ranks: stage s is on rank s mod num_ranks.

    3 ranks x 2 chunks: 0 1 2 0 1 2.

    Args:
        num_ranks: number of ranks.
        num_chunks: number of stages of each rank.
    """
    return tuple(range(num_ranks)) * num_chunks


def vee(num_ranks: int) -> tuple[int, ...]:
    """Returns the placement that goes down the ranks and back up, 2 stages on each: 0 1 2 2 1 0.

    The first and the last stage share rank 0.

    Args:
        num_ranks: number of ranks.
    """
    down = tuple(range(num_ranks))
    return down + down[::-1]


@final
class Action(NamedTuple):
    """Computation of one stage on one microbatch: forward, input gradient, weight gradient or both gradients.

    Args:
        stage: number of the stage, from 0.
        kind: "F" (forward), "I" (input gradient), "W" (weight gradient) or "B" (both gradients).
        microbatch: number of the microbatch, from 0.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def parts(self) -> tuple[Part, ...]:
        """Returns the action as the one part of a drawn step."""
        details = {"stage": self.stage, "microbatch": self.microbatch}
        return (Part(self.kind, self.microbatch, str(self), details),)


@final
class Overlapped(NamedTuple):
    """Forward and backward that a rank runs as one step. Each has its own stage and microbatch.

    Args:
        forward, backward: the two actions.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    def parts(self) -> tuple[Part, ...]:
        """Returns both actions as the parts of a drawn step, the forward first."""
        return (*self.forward.parts(), *self.backward.parts())


Step: TypeAlias = Action | Overlapped
"""Element of a rank's order."""


def actions_of(step: Step) -> tuple[Action, ...]:
    """Returns the actions of a step: one action, or the two of an overlapped step, the forward first."""
    return (step,) if isinstance(step, Action) else tuple(step)


@final
class Handover(NamedTuple):
    """Value that a stage gets from its neighbour for a microbatch: its input, or the gradient of its output."""

    stage: int
    """The receiving stage."""
    microbatch: int
    backward: bool

    @property
    def source(self) -> int:
        """The sending stage."""
        return self.stage + 1 if self.backward else self.stage - 1

    @property
    def letter(self) -> str:
        """The direction: F or B."""
        return "B" if self.backward else "F"


class Place(NamedTuple):
    """Place of a step in the orders. The index after the last step stands for a missing step."""

    rank: int
    position: int


# ASCII: \d alone would also match digits of other scripts. Python converts no text of more than 4300 digits.
_ACTION = re.compile(r"(\d{1,18})([FIWB])(\d{1,18})", re.ASCII)
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
