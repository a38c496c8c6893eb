"""Agreement of one host's ranks to share a segment, or not to.

Strategy. It runs over the connections that the ranks already have. The first local rank creates the segment and tells
the others where to dial; they dial its Unix socket, and it sends them the files. After each step the others report to
the first whether it worked, and the first tells all. If it failed anywhere, no rank of this host shares memory. So all
ranks end with the same answer.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from echelon.backends.base import Backend
from echelon.backends.formats.wire import Tag
from echelon.backends.shared.memory import fd_passing, support
from echelon.backends.shared.memory.segment import Segment
from echelon.errors import EchelonError, ProtocolError

# Keeps these messages apart from operations, whose sequence numbers never get this far.
_SEQUENCE = (1 << 64) - 1


class Unshared(Exception):
    """Reason why the ranks of this host share no memory; the same text on all of them."""


class Common(NamedTuple):
    """Resources that the ranks of a host share."""

    segment: Segment
    doorbells: tuple[int, ...]
    """An eventfd per rank, with which the others wake it."""


def meet(backend: Backend, local_ranks: Sequence[int], pids: Sequence[int], timeout: float) -> Common:
    """Sets up the shared segment of this host; all local ranks call it. Blocks until all agree.

    Args:
        backend: connects the ranks.
        local_ranks: the ranks of this host, in order, this one included; at least 2.
        pids: their processes.
        timeout: in seconds, for each step.

    Raises:
        Unshared: a step failed on one of the ranks; all raise this.
        PeerFailed, Timeout: a rank died, or does not take part.
    """
    meeting = _Meeting(backend, local_ranks, timeout)
    with contextlib.ExitStack() as stack:
        common = meeting.as_first(pids[1:], stack) if meeting.is_first else meeting.as_other(pids[0], stack)
        # All have agreed: the resources now belong to `common`, so nothing is closed here.
        stack.pop_all()
        return common


class _Meeting:
    """One rank's part in the agreement. Opened files go onto a stack that closes them if the ranks do not agree."""

    def __init__(self, backend: Backend, local_ranks: Sequence[int], timeout: float) -> None:
        self._backend = backend
        self._ranks = local_ranks
        self._first = local_ranks[0]
        self._timeout = timeout

    @property
    def is_first(self) -> bool:
        """Whether this rank creates the segment."""
        return self._backend.rank == self._first

    def as_first(self, pids: Sequence[int], stack: contextlib.ExitStack) -> Common:
        """Creates the segment and sends it to the other ranks, whose processes are `pids`."""
        with self._agreed():
            self._check_system()
            segment = Segment.create(len(self._ranks))
            stack.callback(segment.close)
            doorbells = tuple(_doorbell(stack) for _ in self._ranks)
            giver = fd_passing.FdServer([segment.fd, *doorbells], len(pids))
            stack.callback(giver.close)
        for rank in self._ranks[1:]:
            self._tell(rank, {"name": giver.name, "token": giver.token.hex()})
        # The others dial in this step. `give` may accept only after all have: then their dials are in the backlog.
        with self._agreed():
            pass
        with self._agreed(), contextlib.closing(giver):  # closed first: ends the wait of a rank in `take`
            giver.give(pids, self._timeout)
        return Common(segment, doorbells)

    def as_other(self, pid: int, stack: contextlib.ExitStack) -> Common:
        """Receives the segment from the first rank, whose process is `pid`."""
        with self._agreed():
            self._check_system()
        offer = self._hear(self._first)
        with self._agreed():
            connection = fd_passing.dial(str(offer["name"]), bytes.fromhex(offer["token"]), pid, self._timeout)
            stack.callback(connection.close)
        with self._agreed():
            number = self._ranks.index(self._backend.rank)
            fd, *doorbells = fd_passing.take(connection, 1 + len(self._ranks))
            for doorbell in doorbells:
                stack.callback(os.close, doorbell)
            segment = Segment(fd, len(self._ranks), number)
            stack.callback(segment.close)
        return Common(segment, tuple(doorbells))

    def _check_system(self) -> None:
        if why := support.obstacle():
            raise OSError(why)

    @contextlib.contextmanager
    def _agreed(self) -> Iterator[None]:
        """Runs one step, then has all ranks learn whether it worked everywhere. Raises Unshared if it did not."""
        problem = ""
        try:
            yield
        except (OSError, EchelonError) as error:
            problem = f"rank {self._backend.rank}: {error}"
        if self.is_first:
            for rank in self._ranks[1:]:
                theirs = str(self._hear(rank)["problem"])
                problem = problem or theirs
            for rank in self._ranks[1:]:
                self._tell(rank, {"problem": problem})
        else:
            self._tell(self._first, {"problem": problem})
            problem = str(self._hear(self._first)["problem"])
        if problem:
            raise Unshared(problem)

    def _tell(self, rank: int, value: dict[str, str]) -> None:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        self._backend.messages.send(data, rank, Tag(0, _SEQUENCE), self._timeout)

    def _hear(self, rank: int) -> dict[str, Any]:
        data = self._backend.messages.recv(rank, Tag(0, _SEQUENCE), timeout=self._timeout)
        try:
            return dict(json.loads(bytes(data.numpy())))
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(
                f"rank {rank} sent {data.nbytes} bytes that are not valid JSON for the set-up of shared memory"
            ) from error


def _doorbell(stack: contextlib.ExitStack) -> int:
    doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    stack.callback(os.close, doorbell)
    return doorbell
