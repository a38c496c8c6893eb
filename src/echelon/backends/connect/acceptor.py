"""Acceptor of a job's ranks: accepts connections, authenticates them, and admits the expected ranks.

Strategy. One task accepts; each connection has a task of its own that authenticates it, with a timeout of its own. So a
stranger that sends nothing keeps no other connection out. The number of unauthenticated connections is limited; a new
one replaces the oldest, which has had the most time. So under a flood of strangers a rank of the job still has the time
in which that many others are accepted, several times as long as it needs; if it is dropped, it tries again. Leaving the
context ends all tasks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine
from typing import Any, NamedTuple

from echelon.backends.connect.handshake import MAX_HELLO_BYTES, prove_as_acceptor, receive_json, tell
from echelon.backends.connect.members import Job, Member
from echelon.backends.connect.sockets import Sockets
from echelon.errors import AuthenticationError, ConnectError, EchelonError, ProtocolError
from echelon.wording import listed

logger = logging.getLogger("echelon")

STRANGER_SECONDS = 10.0
"""Seconds that a connection may take to authenticate."""
_MAX_STRANGERS = 256
"""Number of connections, beyond one per rank, that may be unauthenticated at a time. As many may be authenticated and
still to send their hello."""


class Guest(NamedTuple):
    """A rank that came, and the connection it came on."""

    member: Member
    connection: socket.socket


class PeerAcceptor:
    """Admits the ranks of one job on one listening socket."""

    def __init__(self, job: Job, sockets: Sockets, listener: socket.socket, *, greets: bool = True) -> None:
        """Opens with `async with`.

        Args:
            job: its ranks are admitted.
            sockets: owns all connections.
            listener: where they arrive.
            greets: whether a guest gets an answer as soon as it is admitted.
        """
        self.guests: dict[int, Guest] = {}
        self.host, self.port = listener.getsockname()[:2]
        self._greets = greets
        self._job = job
        self._sockets = sockets
        self._listener = listener
        self._num_refused = 0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproven: dict[socket.socket, asyncio.Task[None]] = {}
        """Unauthenticated connections, the oldest first."""
        self._unnamed: dict[socket.socket, asyncio.Task[None]] = {}
        """Authenticated connections that have not said their rank yet, the oldest first."""

    async def __aenter__(self) -> PeerAcceptor:
        self._start(self._accept())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sockets.close(self._listener)

    async def wait_for(self, ranks: set[int], deadline: float) -> dict[int, Guest]:
        """Returns the guests once all of `ranks` have come; raises TimeoutError at the deadline."""
        async with asyncio.timeout_at(deadline):
            while not ranks <= set(self.guests):
                self._changed.clear()
                await self._changed.wait()
        return {rank: self.guests[rank] for rank in ranks}

    def missing(self, ranks: set[int], timeout: float) -> ConnectError:
        """Makes the error that names the missing ranks."""
        absent = sorted(ranks - set(self.guests))
        present = sorted({self._job.rank, *self.guests})
        hint = f" ({self._num_refused} connections without the right secret were refused)" if self._num_refused else ""
        return ConnectError(
            f"{listed(absent)} of {self._job.world_size} did not come within {timeout:g} s, "
            f"{listed(present)} did{hint}: start the missing ones within that time, or read in "
            "their output why they did not come"
        )

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        """Accepts connections until it is cancelled."""
        # Not `loop.sock_accept`: it would lose a connection that comes while this task is being cancelled.
        loop, coming = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._listener, coming.set)
        try:
            await self._accept_all(coming)
        finally:
            loop.remove_reader(self._listener)

    async def _accept_all(self, coming: asyncio.Event) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                coming.clear()
                await coming.wait()
                continue
            except OSError as error:  # such as too many open files
                logger.warning("%s cannot accept a connection: %s", self._job, error)
                await asyncio.sleep(0.05)  # the cause lasts a while: without a pause this loop would be busy
                continue
            self._sockets.own(connection)
            self._make_room(self._unproven)
            self._unproven[connection] = self._start(self._receive(connection))
            await asyncio.sleep(0)  # accept() of a waiting connection does not yield to the other tasks by itself

    def _make_room(self, waiting: dict[socket.socket, asyncio.Task[None]]) -> None:
        """Drops the oldest waiting connection if their number has reached the limit."""
        if len(waiting) >= _MAX_STRANGERS + self._job.world_size:
            waiting.pop(next(iter(waiting))).cancel()

    async def _receive(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(STRANGER_SECONDS):
                await prove_as_acceptor(connection, self._job.secret)
                # From here on the flood of strangers, who do not know the secret, cannot push it out.
                if task := self._unproven.pop(connection, None):
                    self._make_room(self._unnamed)
                    self._unnamed[connection] = task
                hello = await receive_json(connection, MAX_HELLO_BYTES)
        except asyncio.CancelledError:
            self._unnamed.pop(connection, None)
            self._sockets.close(connection)
            raise
        except (OSError, EchelonError) as error:  # TimeoutError is an OSError
            # For the error at the deadline: a wrong secret is often why a rank is missing.
            self._num_refused += isinstance(error, AuthenticationError)
            logger.warning("%s refused a connection: %s", self._job, error or type(error).__name__)
            self._unproven.pop(connection, None)
            self._unnamed.pop(connection, None)
            self._sockets.close(connection)
            return
        self._unnamed.pop(connection, None)
        try:
            guest = self._expect(hello, connection)
        except EchelonError as error:
            await tell(connection, {"error": str(error)})
            self._sockets.close(connection)
            return
        self.guests[guest.member.rank] = guest
        # Rank 0 does not: its answer to a hello is the table of members.
        if self._greets:
            await tell(connection, {})
        self._changed.set()

    def _expect(self, hello: dict[str, Any], connection: socket.socket) -> Guest:
        """Validates the hello of an authenticated peer. Raises ProtocolError if it is refused."""
        if objection := self._job.objection(hello):
            raise ProtocolError(objection)
        # A rank does not know under which address others reach it, so the connection tells.
        member = Member.read(hello | {"host": connection.getpeername()[0]}, self._job.world_size)
        if member.rank == self._job.rank or member.rank in self.guests:
            pid = os.getpid() if member.rank == self._job.rank else self.guests[member.rank].member.pid
            raise ProtocolError(f"rank {member.rank} is taken by process {pid}; give every process its own rank")
        return Guest(member, connection)
