"""Rendezvous: the ranks of a world find each other and connect every pair.

Strategy. Every rank first learns the table of members, from rank 0 (which listens at the master address) or from a
store that exists already (torchrun's). Then every pair connects once, the higher rank dialling the lower. Everything is
retried until one deadline; at the deadline the missing ranks are named, on every rank that came. All of it runs in a
thread and an event loop of its own, and every socket that it opened is closed if it fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Coroutine, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

from echelon.backends.connect.acceptor import Guest, PeerAcceptor
from echelon.backends.connect.handshake import (
    MAX_ENTRY_BYTES,
    MAX_HELLO_BYTES,
    HungUp,
    prove_as_connector,
    receive_json,
    send_json,
    tell,
)
from echelon.backends.connect.interfaces import address_towards
from echelon.backends.connect.members import Job, Member, join_address, machine_id, read_table, split_address
from echelon.backends.connect.sockets import Sockets
from echelon.errors import ConnectError, EchelonError, ProtocolError

_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.25


async def dial(job: Job, sockets: Sockets, member: Member, deadline: float, *, listens: bool = False) -> socket.socket:
    """Connects to a rank and proves the secret; retries until `deadline` for as long as nobody answers.

    Args:
        job: the one that both belong to.
        sockets: owns the connection.
        member: which rank, and where.
        deadline: in the event loop's time.
        listens: it is known to listen already, so if nobody does, it has ended.

    Raises:
        ConnectError: the rank did not answer in time, or has ended.
        AuthenticationError, ProtocolError: what answered is not of this job.
    """
    pause, problem = _FIRST_PAUSE, "it did not finish the handshake"
    try:
        async with asyncio.timeout_at(deadline):
            while True:
                try:
                    return await _attempt(job, sockets, member)
                except OSError as error:
                    # AuthenticationError and ProtocolError are OSErrors too, but another attempt would not help.
                    if isinstance(error, EchelonError):
                        raise
                    if listens and isinstance(error, ConnectionRefusedError):
                        raise ConnectError(f"rank {member.rank} ended before all ranks had met") from error
                    problem = _reason(error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
    except TimeoutError:
        raise ConnectError(
            f"rank {member.rank} did not answer at {join_address(member.host, member.port)} in time ({problem}): "
            "is it running, and is that its address?"
        ) from None


def _reason(error: OSError) -> str:
    """Returns the system's text for an error."""
    # asyncio puts a text of its own into `strerror`.
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


async def dial_pairs(
    job: Job, sockets: Sockets, members: Iterable[Member], deadline: float
) -> dict[int, socket.socket]:
    """Dials members that listen, all at once, and is let in by each; returns the connections by rank."""
    tasks = {member.rank: asyncio.create_task(_join(job, sockets, member, deadline)) for member in members}
    try:
        await asyncio.gather(*tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    return {rank: task.result() for rank, task in tasks.items()}


async def _attempt(job: Job, sockets: Sockets, member: Member) -> socket.socket:
    connection = await sockets.connect(member.host, member.port)
    try:
        await prove_as_connector(connection, job.secret, member.rank)
    except BaseException:
        sockets.close(connection)
        raise
    # A small message must not wait until the one before is acknowledged (Nagle's algorithm).
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


async def _join(job: Job, sockets: Sockets, member: Member, deadline: float) -> socket.socket:
    # It listens: it did so before it was put into the table.
    connection = await dial(job, sockets, member, deadline, listens=True)
    try:
        async with asyncio.timeout_at(deadline):
            await send_json(connection, job.hello(0))
            answer = await receive_json(connection, MAX_HELLO_BYTES)
    except (TimeoutError, HungUp) as error:
        raise ConnectError(f"rank {member.rank} answered but refused {job}: see its own error") from error
    if "error" in answer:
        raise ConnectError(f"rank {member.rank} refused {job}: {answer['error']}")
    return connection


T = TypeVar("T")

_GRACE_SECONDS = 5.0
"""Seconds that the others wait longer than rank 0, so that they hear from it which ranks are missing."""
_STORE_SECONDS = 0.01
"""Seconds between two polls of a store."""


class Store(Protocol):
    """The part of torch.distributed.Store that is used."""

    def set(self, key: str, value: str) -> None: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class ConnectedRanks:
    """Ranks of a world that have found each other: all members by rank, and a connected socket for every other rank."""

    members: tuple[Member, ...]
    sockets: dict[int, socket.socket]


def meet(job: Job, master_addr: str, timeout: float, local_address: str | None = None) -> ConnectedRanks:
    """Connects all ranks of a world whose rank 0 listens at `master_addr`. Blocks at most `timeout` seconds.

    Args:
        job: see `Job`.
        master_addr: "host:port" at which rank 0 is reached.
        timeout: seconds that the ranks have to find each other.
        local_address: of this host, to listen on and to dial from; None: rank 0 listens at `master_addr`, the others
            on their address on the way there.

    Raises:
        ConnectError: ranks are missing at the deadline (they are named), or this rank was refused.
        AuthenticationError, ProtocolError: the other end is not of this job.
    """
    host, port = split_address(master_addr)
    return _run(_Rendezvous(job, timeout, local_address).through_master(host, port))


def meet_through_store(
    job: Job, store: Store, store_host: str, timeout: float, local_address: str | None = None
) -> ConnectedRanks:
    """Connects all ranks through a store that all of them can reach; `store_host` is where it is."""
    return _run(_Rendezvous(job, timeout, local_address).through_store(store, store_host))


class _Rendezvous:
    """Rendezvous of one rank, through rank 0 or a store. Used once."""

    def __init__(self, job: Job, timeout: float, local_address: str | None) -> None:
        self._job = job
        self._timeout = timeout
        self._local_address = local_address
        self._sockets = Sockets(local_address)

    async def through_master(self, host: str, port: int) -> ConnectedRanks:
        deadline = asyncio.get_running_loop().time() + self._timeout
        with self._sockets:
            if self._job.rank == 0:
                connected = await self._receive_all(host, port, deadline)
            else:
                connected = await self._join(host, port, deadline)
            self._sockets.release(connected.sockets.values())
            return connected

    async def through_store(self, store: Store, store_host: str) -> ConnectedRanks:
        deadline = asyncio.get_running_loop().time() + self._timeout
        with self._sockets:
            listener = await self._sockets.listen(self._local_address or address_towards(store_host), 0)
            async with PeerAcceptor(self._job, self._sockets, listener) as acceptor:
                members = await self._exchange(store, acceptor, deadline)
                connected = ConnectedRanks(members, await self._connect(members, 0, acceptor, deadline))
            self._sockets.release(connected.sockets.values())
            return connected

    async def _receive_all(self, host: str, port: int, deadline: float) -> ConnectedRanks:
        """Rank 0: waits for every rank, then sends the table to all; the connections stay for use."""
        everyone = set(range(1, self._job.world_size))
        # Shared, as the launcher may hold the port bound to keep it free.
        listener = await self._sockets.listen(self._local_address or host, port, shared=True)
        async with PeerAcceptor(self._job, self._sockets, listener, greets=False) as acceptor:
            try:
                guests = await acceptor.wait_for(everyone, deadline)
            except TimeoutError:
                error = acceptor.missing(everyone, self._timeout)
                # The others wait for the table and do not know which ranks are missing.
                for guest in acceptor.guests.values():
                    await tell(guest.connection, {"error": str(error)})
                raise error from None
            here = Member(0, acceptor.host, acceptor.port, os.getpid(), machine_id())
        members = (here, *(guests[rank].member for rank in sorted(guests)))
        await _send_table(members, guests)
        return ConnectedRanks(members, {rank: guest.connection for rank, guest in guests.items()})

    async def _join(self, host: str, port: int, deadline: float) -> ConnectedRanks:
        """Another rank: dials rank 0, is given the table, and connects to the others."""
        master = await dial(self._job, self._sockets, Member(0, host, port, 0, ""), deadline)
        listener = await self._sockets.listen(self._local_address or master.getsockname()[0], 0)
        # It listens before it says hello: others dial it as soon as they have the table.
        async with PeerAcceptor(self._job, self._sockets, listener) as acceptor:
            await send_json(master, self._job.hello(acceptor.port))
            members = await self._await_table(master, deadline)
            # From rank 1 on: the connection to rank 0 stays in use.
            return ConnectedRanks(members, {0: master} | await self._connect(members, 1, acceptor, deadline))

    async def _await_table(self, master: socket.socket, deadline: float) -> tuple[Member, ...]:
        try:
            async with asyncio.timeout_at(deadline + _GRACE_SECONDS):
                answer = await receive_json(master, MAX_HELLO_BYTES + self._job.world_size * MAX_ENTRY_BYTES)
        except TimeoutError:
            raise ConnectError(
                f"rank 0 answered, but other ranks did not come within {self._timeout:g} s: start all ranks within "
                "that time"
            ) from None
        except OSError as error:
            if isinstance(error, EchelonError):
                raise
            raise ConnectError("rank 0 answered but ended before all ranks had met: its own error says why") from error
        if "error" in answer:
            raise ConnectError(f"{self._job} was refused: {answer['error']}")
        members = read_table(answer.get("members"), self._job.world_size)
        # Rank 0's own address may mean another host here, such as 127.0.1.1. The one that was dialled works.
        return (replace(members[0], host=master.getpeername()[0]), *members[1:])

    async def _exchange(self, store: Store, acceptor: PeerAcceptor, deadline: float) -> tuple[Member, ...]:
        """Puts this rank into the store and takes the others out."""
        job = self._job
        # The store may outlive an attempt: run and restart keep its entries apart.
        keys = {rank: f"echelon/{job.run_id}/{job.restart}/{rank}" for rank in range(job.world_size)}
        here = Member(job.rank, acceptor.host, acceptor.port, os.getpid(), machine_id())
        store.set(keys[job.rank], json.dumps(asdict(here)))
        missing = set(keys)
        # `check`, since `get` blocks until the key is there, and with it the event loop.
        while missing := {rank for rank in missing if not store.check([keys[rank]])}:
            if asyncio.get_running_loop().time() > deadline:
                raise acceptor.missing(missing, self._timeout)
            await asyncio.sleep(_STORE_SECONDS)
        try:
            entries = [json.loads(store.get(key)) for key in keys.values()]
        except (ValueError, RecursionError) as error:
            raise ProtocolError("an entry in the store that is not JSON") from error
        return read_table(entries, job.world_size)

    async def _connect(
        self, members: tuple[Member, ...], first: int, acceptor: PeerAcceptor, deadline: float
    ) -> dict[int, socket.socket]:
        """Dials every lower rank from `first` on, and waits for every higher one."""
        lower = await dial_pairs(self._job, self._sockets, members[first : self._job.rank], deadline)
        higher = set(range(self._job.rank + 1, self._job.world_size))
        try:
            guests = await acceptor.wait_for(higher, deadline)
        except TimeoutError:
            raise acceptor.missing(higher, self._timeout) from None
        return lower | {rank: guest.connection for rank, guest in guests.items()}


async def _send_table(members: tuple[Member, ...], guests: dict[int, Guest]) -> None:
    table = {"members": [asdict(member) for member in members]}
    for rank, guest in sorted(guests.items()):
        try:
            await send_json(guest.connection, table)
        except OSError as error:
            raise ConnectError(
                f"rank {rank} (process {guest.member.pid}) ended before all ranks had met: its own error says why"
            ) from error


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Blocks while a coroutine runs in a thread of its own, so that a caller's event loop does not matter."""
    outcome: list[T | BaseException] = []

    def target() -> None:
        try:
            outcome.append(asyncio.run(coroutine))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=target, name="echelon rendezvous", daemon=True)
    thread.start()
    thread.join()
    result = outcome[0]
    # The one edge at which errors of the system become Echelon's.
    if isinstance(result, OSError) and not isinstance(result, EchelonError):
        raise ConnectError(f"the ranks could not be connected ({result}): check addresses and network") from result
    if isinstance(result, BaseException):
        raise result
    return result
