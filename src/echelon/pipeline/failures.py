"""What becomes of a pipeline when a step fails on one rank: all others are told why, and none goes on.

A step that failed has left some gradients and not others, and messages that nobody will take. So a pipeline ends with
it: whatever is asked of it afterwards is refused at once, and a new one is made from weights that were saved.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from echelon.errors import Closed, CollectiveMismatch, Failure, PeerFailed, Timeout, failure_of
from echelon.group import ProcessGroup
from echelon.pipeline.action import Action

_MOST_BYTES = 900
"""Of the reason that other ranks are told; a message's note holds some more."""
_WORDS = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights"}


class Failures:
    """The failures of one rank's part of a pipeline."""

    def __init__(self, group: ProcessGroup, replicas: Sequence[ProcessGroup], forget: Callable[[], None]) -> None:
        """Looks out for them.

        Args:
            group: the ranks of the pipeline.
            replicas: groups whose ranks wait for this one in a step as well.
            forget: lets go of what an unfinished step holds.
        """
        self._group = group
        self._replicas = replicas
        self._forget = forget
        self._first: Failure | None = None

    @contextmanager
    def told(self, current: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Tells the other ranks of an exception inside, so that none waits for this one; then lets it pass.

        Args:
            current: says what is being done, for the message.

        Raises:
            Closed: at once, if the pipeline has ended with an earlier failure.
            PeerFailed: another rank failed; with the first cause.
        """
        if self._first is not None:
            raise Closed(
                f"this pipeline ended in an earlier step ({_first_line(self._first)}): make a new Pipeline, and load "
                "weights that were saved before"
            ) from self._first
        try:
            yield
        except BaseException as error:
            self._forget()
            place = _place(current())
            if place and not isinstance(error, PeerFailed):
                error.add_note(f"on rank {self._group.backend.rank}{place}")
            mine = PeerFailed(self._group.backend.rank, _reason(error, place))
            if isinstance(error, Timeout):  # this rank has not failed, but one that it waited for
                mine = failure_of(error, self._group.backend.rank)
            self._first = self._revoke(error if isinstance(error, PeerFailed | CollectiveMismatch) else mine)
            if isinstance(error, PeerFailed):
                raise self._first.noticed_by(error.operation) from error
            raise

    def _revoke(self, failure: Failure) -> Failure:
        """Ends what the ranks of the pipeline wait for, and its replicas; returns the first cause that is known."""
        for group in (*self._replicas, self._group):
            failure = group.backend.revoke(group.context, group.ranks, failure)
        return failure


def _place(current: object) -> str:
    """Says where, as the end of a sentence."""
    if isinstance(current, Action):
        return f" in {current}, {_WORDS[current.kind]} of microbatch {current.microbatch} in stage {current.stage}"
    return "" if current is None else f" in {current}"


def _reason(error: BaseException, place: str) -> str:
    """Writes what happened: type, where, message, and as much of the traceback as fits, from the inside out."""
    text = f"{type(error).__name__}{place}: {error}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        line = f"\n  from {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
        if len((text + line).encode()) > _MOST_BYTES:
            break
        text += line
    return text


def _first_line(failure: Failure) -> str:
    return str(failure).splitlines()[0]
