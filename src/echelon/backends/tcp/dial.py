"""How a rank connects to another one: dials, proves the secret, says who it is."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable

from echelon.backends.tcp.handshake import MAX_HELLO_BYTES, HungUp, prove_as_connector, receive_json, send_json
from echelon.backends.tcp.members import Job, Member, join_address
from echelon.backends.tcp.sockets import Sockets
from echelon.errors import ConnectError, EchelonError

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
    """Returns what the system calls the error; asyncio puts words of its own in its place."""
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
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


async def _join(job: Job, sockets: Sockets, member: Member, deadline: float) -> socket.socket:
    connection = await dial(job, sockets, member, deadline, listens=True)
    try:
        async with asyncio.timeout_at(deadline):
            await send_json(connection, job.hello(0))
            answer = await receive_json(connection, MAX_HELLO_BYTES)
    except (TimeoutError, HungUp) as error:
        raise ConnectError(f"rank {member.rank} answered but did not let {job} in: its own error says why") from error
    if "error" in answer:
        raise ConnectError(f"rank {member.rank} turned {job} away: {answer['error']}")
    return connection
