"""What a message is for: the group, the operation and the step that it belongs to."""

from __future__ import annotations

from typing import NamedTuple

from echelon.backends.wire import MAX_STEP
from echelon.errors import SizeMismatch


class Tag(NamedTuple):
    """What a message is for. Two messages meet only if all three numbers are equal.

    context: the group, 0 for a backend used directly (64 bits). sequence: the operation within the group, 0 for point
    to point (64 bits). step: the user's tag; 0 in collectives (32 bits).
    """

    context: int = 0
    sequence: int = 0
    step: int = 0

    @classmethod
    def of(cls, tag: int | Tag) -> Tag:
        """Returns `tag` itself, or the point-to-point tag of that number.

        Raises:
            SizeMismatch: a number outside 0 to 2**32 - 1.
        """
        if isinstance(tag, Tag):
            return tag
        if not 0 <= tag <= MAX_STEP:
            raise SizeMismatch(f"a tag from 0 to {MAX_STEP}", tag, advice="choose another")
        return cls(step=tag)

    def is_collective_of(self, context: int) -> bool:
        """Says whether this is the tag of a collective, not of a message, in that group."""
        return self.context == context and self.sequence > 0

    def __str__(self) -> str:
        if self.context == 0 and self.sequence == 0:
            return f"tag {self.step}"
        return f"tag {self.step} of operation {self.sequence} in context {self.context:x}"
