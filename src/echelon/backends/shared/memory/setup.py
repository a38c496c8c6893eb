"""How the ranks of one host come to share a segment, or agree that they cannot.

Strategy. Over the connections that the ranks have already, the first local rank offers the segment that it made, the
others dial its Unix socket, and it gives them the files. After each of these steps the others tell the first whether it
worked, and the first tells all; if it failed anywhere, no rank of this host shares memory. So all end with one answer.
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

_SEQUENCE = (1 << 64) - 1
"""What keeps these messages apart from operations, of which there are never so many."""


class Unshared(Exception):
    """Why the ranks of this host do not share memory; the same text on all of them."""


class Common(NamedTuple):
    """What the ranks of a host share."""

    segment: Segment
    doorbells: tuple[int, ...]
    """An eventfd for each rank, by which the others wake it."""


def meet(backend: Backend, local_ranks: Sequence[int], pids: Sequence[int], timeout: float) -> Common:
    """Returns what this host's ranks share; all local ranks call it.

    Args:
        backend: connects the ranks.
        local_ranks: the ranks of this host, in order, this one included; at least 2.
        pids: their processes.
        timeout: seconds for each step.

    Raises:
        Unshared: it is not possible on one of the ranks; all raise this.
        PeerFailed, Timeout: a rank died, or does not take part.
    """
    meeting = _Meeting(backend, local_ranks, timeout)
    with contextlib.ExitStack() as stack:
        common = meeting.as_first(pids[1:], stack) if meeting.is_first else meeting.as_other(pids[0], stack)
        stack.pop_all()
        return common


class _Meeting:
    """One rank's part in it. What it opens is given to a stack that closes it if the ranks do not agree."""

    def __init__(self, backend: Backend, local_ranks: Sequence[int], timeout: float) -> None:
        self._backend = backend
        self._ranks = local_ranks
        self._first = local_ranks[0]
        self._timeout = timeout

    @property
    def is_first(self) -> bool:
        """Whether this rank makes the segment."""
        return self._backend.rank == self._first

    def as_first(self, pids: Sequence[int], stack: contextlib.ExitStack) -> Common:
        """Makes it and gives it to the others, whose processes are `pids`."""
        with self._agreed():
            self._check_system()
            segment = Segment.create(len(self._ranks))
            stack.callback(segment.close)
            doorbells = tuple(_doorbell(stack) for _ in self._ranks)
            giver = fd_passing.FdServer([segment.fd, *doorbells], len(pids))
            stack.callback(giver.close)
        for rank in self._ranks[1:]:
            self._tell(rank, {"name": giver.name, "token": giver.token.hex()})
        with self._agreed():
            pass  # the others dial
        with self._agreed(), contextlib.closing(giver):  # who still waits for the file then hears the end
            giver.give(pids, self._timeout)
        return Common(segment, doorbells)

    def as_other(self, pid: int, stack: contextlib.ExitStack) -> Common:
        """Gets it from the first, whose process is `pid`."""
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
        """Has all ranks learn whether the step inside worked on all of them; raises Unshared if it did not."""
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
        self._backend.send(data, rank, Tag(0, _SEQUENCE), self._timeout)

    def _hear(self, rank: int) -> dict[str, Any]:
        data = self._backend.recv(rank, Tag(0, _SEQUENCE), timeout=self._timeout)
        try:
            return dict(json.loads(bytes(data.numpy())))
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"rank {rank} sent {data.nbytes} bytes that are no offer of shared memory") from error


def _doorbell(stack: contextlib.ExitStack) -> int:
    doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    stack.callback(os.close, doorbell)
    return doorbell
