"""Who is where: how the ranks of a world find each other, prove who they are and connect.

Strategy. Every rank first learns the table of members, from rank 0 (which listens at the master address) or from a
store that exists already (torchrun's). Then every pair connects once, the higher rank dialling the lower. Everything is
retried until one deadline; at the deadline the missing ranks are named, on every rank that came.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from echelon.backends.handshake import (
    HungUp,
    prove_as_acceptor,
    prove_as_connector,
    receive_json,
    send_json,
    tell,
)
from echelon.errors import AuthenticationError, ConnectError, EchelonError, ProtocolError

T = TypeVar("T")
logger = logging.getLogger("echelon")

_STRANGER_SECONDS = 10.0
"""How long a connection may take to prove itself."""
_GRACE_SECONDS = 5.0
"""How much longer than rank 0 the others wait, so that they hear from it who is missing."""


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks of one world must agree on, and the rank that this process is."""

    rank: int
    world_size: int
    secret: bytes
    run_id: str = ""
    restart: int = 0

    def named(self, what: str = "rank") -> str:
        """Returns "rank 2 of 4"."""
        return f"{what} {self.rank} of {self.world_size}"


@dataclass(frozen=True, slots=True)
class Member:
    """Where a rank is. `machine` is equal for ranks that see each other's processes."""

    rank: int
    host: str
    port: int
    pid: int
    machine: str


class Store(Protocol):
    """The part of torch.distributed.Store that is used."""

    def set(self, key: str, value: str) -> None: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class World:
    """The result: the members by rank, and one connected socket for every other rank."""

    members: tuple[Member, ...]
    sockets: dict[int, socket.socket]


def machine_id() -> str:
    """Returns a name for the set of processes that can watch each other by process number."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def split_address(address: str) -> tuple[str, int]:
    """Reads "host:port" or "[v6]:port".

    Raises:
        ConnectError: it is neither.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConnectError(f'master address {address!r} is not "host:port": use for example "127.0.0.1:29500"')
    return host.strip("[]") or "127.0.0.1", int(port)


def meet(job: Job, master_addr: str, timeout: float) -> World:
    """Connects all ranks of a world whose rank 0 listens at `master_addr`. Blocks at most `timeout` seconds.

    Raises:
        ConnectError: ranks are missing at the deadline (they are named), or this rank was refused.
        AuthenticationError, ProtocolError: the other end is not of this job.
    """
    return _run(_meet(job, *split_address(master_addr), timeout))


def meet_through_store(job: Job, store: Store, store_host: str, timeout: float) -> World:
    """Connects all ranks through a store that all of them can reach; `store_host` is where it is."""
    return _run(_meet_through_store(job, store, store_host, timeout))


async def _meet(job: Job, host: str, port: int, timeout: float) -> World:
    deadline = asyncio.get_running_loop().time() + timeout
    if job.rank == 0:
        async with _Hall(job, await _listen(host, port, shared=True), greets=False) as hall:
            return await _gather_at_master(job, hall, deadline, timeout)
    return await _join_master(job, host, port, deadline, timeout)


async def _gather_at_master(job: Job, hall: _Hall, deadline: float, timeout: float) -> World:
    """Waits for every rank, then sends the table to all; the connections stay for use."""
    everyone = set(range(1, job.world_size))
    try:
        guests = await hall.wait_for(everyone, deadline)
    except TimeoutError:
        error = hall.missing(everyone, timeout)
        for guest in hall.guests.values():
            await tell(guest.connection, {"error": str(error)})
        raise error from None
    here = Member(0, hall.host, hall.port, os.getpid(), machine_id())
    members = (here, *(guests[rank].member for rank in sorted(guests)))
    table = {"members": [asdict(member) for member in members]}
    for guest in guests.values():
        await send_json(guest.connection, table)
    return World(members, {rank: guest.connection for rank, guest in guests.items()})


async def _join_master(job: Job, host: str, port: int, deadline: float, timeout: float) -> World:
    """Dials rank 0, is given the table, and connects to the other ranks."""
    try:
        async with asyncio.timeout_at(deadline):
            master = await _dial(job, 0, host, port)
    except TimeoutError:
        raise ConnectError(
            f"rank 0 did not answer at {host}:{port} within {timeout:.0f} s: is it running, and is that its address?"
        ) from None
    async with _Hall(job, await _listen(master.getsockname()[0], 0)) as hall:
        await send_json(master, _hello(job, hall.port))
        try:
            async with asyncio.timeout_at(deadline + _GRACE_SECONDS):
                answer = await receive_json(master)
        except (TimeoutError, HungUp):
            raise ConnectError(f"rank 0 at {host}:{port} answered but ended before all ranks had met") from None
        if "error" in answer:
            raise ConnectError(f"{job.named()} was turned away: {answer['error']}")
        members = _members(answer["members"], job, master.getpeername()[0])
        world = await _connect_pairs(job, members, hall, deadline, timeout, skip={0})
    return World(members, {0: master, **world.sockets})


async def _meet_through_store(job: Job, store: Store, store_host: str, timeout: float) -> World:
    deadline = asyncio.get_running_loop().time() + timeout
    prefix = f"echelon/{job.run_id}/{job.restart}"
    async with _Hall(job, await _listen(_local_address_towards(store_host), 0)) as hall:
        here = Member(job.rank, hall.host, hall.port, os.getpid(), machine_id())
        store.set(f"{prefix}/{job.rank}", json.dumps(asdict(here)))
        missing = set(range(job.world_size))
        while missing:
            missing = {rank for rank in missing if not store.check([f"{prefix}/{rank}"])}
            if missing and asyncio.get_running_loop().time() > deadline:
                raise hall.missing(missing, timeout)
            await asyncio.sleep(0.01 if missing else 0)
        entries = [json.loads(store.get(f"{prefix}/{rank}")) for rank in range(job.world_size)]
        return await _connect_pairs(job, _members(entries, job, None), hall, deadline, timeout, skip=set())


async def _connect_pairs(
    job: Job, members: tuple[Member, ...], hall: _Hall, deadline: float, timeout: float, skip: set[int]
) -> World:
    """Dials every lower rank and waits for every higher one."""

    async def dial(member: Member) -> tuple[int, socket.socket]:
        connection = await _dial(job, member.rank, member.host, member.port)
        await send_json(connection, _hello(job, 0))
        try:
            answer = await receive_json(connection)
        except HungUp:
            raise ConnectError(f"rank {member.rank} ended while this rank was connecting to it") from None
        if "error" in answer:
            raise ConnectError(f"rank {member.rank} turned {job.named()} away: {answer['error']}")
        return member.rank, connection

    lower = [member for member in members[: job.rank] if member.rank not in skip]
    higher = set(range(job.rank + 1, job.world_size))
    dialled: dict[int, socket.socket] = {}
    try:
        async with asyncio.timeout_at(deadline):
            for finished in asyncio.as_completed([dial(member) for member in lower]):
                rank, connection = await finished
                dialled[rank] = connection
    except TimeoutError:
        missing = sorted({member.rank for member in lower} - set(dialled))
        raise ConnectError(
            f"ranks {missing} could not be reached within {timeout:.0f} s: are they still alive?"
        ) from None
    try:
        guests = await hall.wait_for(higher, deadline)
    except TimeoutError:
        raise hall.missing(higher, timeout) from None
    return World(members, dialled | {rank: guest.connection for rank, guest in guests.items()})


@dataclass(frozen=True, slots=True)
class _Guest:
    member: Member
    connection: socket.socket


class _Hall:
    """Accepts connections on one listening socket and lets in who proves itself and is expected."""

    def __init__(self, job: Job, listener: socket.socket, *, greets: bool = True) -> None:
        self.guests: dict[int, _Guest] = {}
        self._greets = greets
        self._job = job
        self._listener = listener
        self._refused = 0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.host, self.port = listener.getsockname()[:2]

    async def __aenter__(self) -> _Hall:
        self._start(self._accept())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    async def wait_for(self, ranks: set[int], deadline: float) -> dict[int, _Guest]:
        """Returns the guests once all of `ranks` have come; raises TimeoutError at the deadline."""
        async with asyncio.timeout_at(deadline):
            while not ranks <= set(self.guests):
                self._changed.clear()
                await self._changed.wait()
        return {rank: self.guests[rank] for rank in ranks}

    def missing(self, ranks: set[int], timeout: float) -> ConnectError:
        """Makes the error that names who did not come."""
        absent = sorted(ranks - set(self.guests))
        present = sorted({self._job.rank, *self.guests})
        hint = f" ({self._refused} connections without the right secret were refused)" if self._refused else ""
        noun = "rank" if len(absent) == 1 else "ranks"
        return ConnectError(
            f"{noun} {', '.join(map(str, absent))} of {self._job.world_size} did not come within {timeout:.0f} s, "
            f"{present} did{hint}: start the missing ones, or give a longer connect_timeout"
        )

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            connection.setblocking(False)
            if len(self._tasks) > 64 + 2 * self._job.world_size:
                connection.close()  # a flood of strangers; ours retry
                continue
            self._start(self._receive_guest(connection))

    async def _receive_guest(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(_STRANGER_SECONDS):
                await prove_as_acceptor(connection, self._job.secret)
                hello = await receive_json(connection)
        except (OSError, EchelonError) as error:  # TimeoutError is an OSError
            self._refused += isinstance(error, AuthenticationError)
            logger.warning("%s refused a connection: %s", self._job.named(), error or type(error).__name__)
            connection.close()
            return
        if problem := self._problem(hello):
            await tell(connection, {"error": problem})
            connection.close()
            return
        member = Member(hello["rank"], connection.getpeername()[0], hello["port"], hello["pid"], str(hello["machine"]))
        self.guests[member.rank] = _Guest(member, connection)
        if self._greets:
            await tell(connection, {})
        self._changed.set()

    def _problem(self, hello: dict[str, Any]) -> str | None:
        """Returns why a connector that knows the secret is still not one of us."""
        job = self._job
        rank = hello.get("rank")
        if not all(isinstance(hello.get(key), int) for key in ("rank", "world_size", "restart", "port", "pid")):
            return "its greeting is incomplete"
        if (hello["world_size"], hello.get("run_id"), hello["restart"]) != (job.world_size, job.run_id, job.restart):
            return (
                f"it belongs to run {hello.get('run_id')!r}, restart {hello['restart']}, of {hello['world_size']} "
                f"ranks; this is run {job.run_id!r}, restart {job.restart}, of {job.world_size}"
            )
        if not isinstance(rank, int) or not 0 <= rank < job.world_size:
            return f"there is no rank {rank} in a world of {job.world_size}"
        if rank == job.rank or rank in self.guests:
            pid = os.getpid() if rank == job.rank else self.guests[rank].member.pid
            return f"rank {rank} is taken by process {pid}; give every process its own rank"
        return None


async def _listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Listens on exactly this address. `shared`: also when a launcher holds the port bound to keep it free for us."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    listener.setblocking(False)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConnectError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose a free port of this host"
        ) from error
    return listener


async def _dial(job: Job, rank: int, host: str, port: int) -> socket.socket:
    """Connects to a rank and proves the secret; retries for as long as nobody listens there."""
    loop = asyncio.get_running_loop()
    pause = 0.005
    while True:
        family, kind, proto, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        connection = socket.socket(family, kind, proto)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, address)
            if connection.getsockname() == connection.getpeername():  # TCP can connect a free port to itself
                raise ConnectionRefusedError
            await prove_as_connector(connection, job.secret, rank)
        except ConnectionError as error:
            connection.close()
            if isinstance(error, EchelonError):
                raise
        except BaseException:
            connection.close()
            raise
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.25)


def _hello(job: Job, port: int) -> dict[str, Any]:
    return {
        "rank": job.rank,
        "world_size": job.world_size,
        "run_id": job.run_id,
        "restart": job.restart,
        "port": port,
        "pid": os.getpid(),
        "machine": machine_id(),
    }


def _members(entries: object, job: Job, master_host: str | None) -> tuple[Member, ...]:
    """Reads the table of members; rank 0 is reached where it was reached already."""
    if not isinstance(entries, list) or len(entries) != job.world_size:
        raise ProtocolError(f"the table of members does not have {job.world_size} entries")
    try:
        members = tuple(
            Member(rank, str(entry["host"]), int(entry["port"]), int(entry["pid"]), str(entry["machine"]))
            for rank, entry in enumerate(entries)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError("the table of members has an entry that cannot be read") from error
    if master_host is not None:
        zero = members[0]
        members = (Member(0, master_host, zero.port, zero.pid, zero.machine), *members[1:])
    return members


def _local_address_towards(host: str) -> str:
    """Returns this host's address on the way to `host`; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end in a thread of its own, so that a caller's event loop does not matter."""
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
    if isinstance(result, BaseException):
        raise result
    return result
