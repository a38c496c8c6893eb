"""The collectives of one group, as one rank calls them: numbered, run, and given up on all ranks if they fail on one.

Strategy. A collective takes the next sequence number of its group in the caller's thread, so ranks that make the same
calls in the same order meet, whatever runs beside. Blocking ones run in the caller's thread, asynchronous ones in the
group's own lane. When a collective fails on one rank, the group is revoked on all: no rank waits for one that has given
up.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from echelon.backends.base import Backend, Work
from echelon.collectives.operations import Operation, write_out
from echelon.collectives.run import Channel
from echelon.collectives.select import Selector
from echelon.errors import Closed, CollectiveMismatch, PeerFailed, SizeMismatch, Timeout

T = TypeVar("T")


class Caller:
    """Calls the collectives of one group on one rank."""

    def __init__(self, backend: Backend, ranks: Sequence[int], context: int, name: str, selector: Selector) -> None:
        """Starts at operation 1.

        Args:
            backend: what moves the bytes.
            ranks: the backend's rank of each member.
            context: what keeps this group's messages apart from those of others.
            name: the group's, shown in errors.
            selector: what chooses the algorithms.
        """
        self._backend = backend
        self._ranks = ranks
        self._rank = ranks.index(backend.rank)
        self._context = context
        self._name = name
        self._selector = selector
        self._sequences = itertools.count(1)
        self._native = backend.native_collectives(context, ranks)

    def call(self, operation: Operation[T], async_op: bool, timeout: float, out: Tensor | None = None) -> T | Work[T]:
        """Runs a collective here or in the group's lane; where it cannot be finished, it fails on all ranks.

        Args:
            operation: what to do.
            async_op: return a Work at once.
            timeout: seconds for the whole operation, from when it begins to run.
            out: written with the result and returned; None: the result itself.

        Raises:
            CollectiveMismatch, PeerFailed, Timeout, Closed: it could not be finished; the group cannot go on.
            SizeMismatch: `out` does not fit the result; the group stays usable.
        """
        sequence = next(self._sequences)
        note = f"{operation.note}, #{sequence}"
        native = self._native

        def attempt() -> T:
            deadline = self._backend.now() + timeout
            channel = Channel(
                self._backend, self._ranks, self._rank, self._context, sequence, note, deadline, self._selector, native
            )
            with torch.no_grad():
                try:
                    result = operation.act(channel)
                except Exception as error:
                    told = self._give_up(error, f"rank {self._backend.rank} in {note} of group {self._name!r}")
                    if told is error:
                        raise
                    raise told from error
                return result if out is None else cast("T", write_out(out, cast("Tensor", result), note))

        if async_op:
            return self._backend.start(attempt, f"{note} of group {self._name!r}", self._context)
        return attempt()

    def _give_up(self, error: Exception, operation: str) -> Exception:
        """Ends the group's collectives on all ranks, and returns the error with the operation's name in it."""
        if isinstance(error, Closed):
            return error
        if isinstance(error, PeerFailed):
            first = self._backend.revoke(self._context, self._ranks, error)
            return PeerFailed(first.rank, first.reason, operation)
        told: Exception = error
        if isinstance(error, Timeout):
            told = Timeout(f"{operation}: {error}")
        elif isinstance(error, CollectiveMismatch | SizeMismatch):
            told = CollectiveMismatch(f"{operation}: {error}")
        failure = PeerFailed(self._backend.rank, f"{type(told).__name__}: {told}")
        self._backend.revoke(self._context, self._ranks, failure)
        return told
