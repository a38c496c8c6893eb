"""Handshake of a new connection: mutual authentication by the job's secret, then JSON messages of limited size.

Nothing is parsed before both ends have proved that they know the job's secret:

    acceptor  -> connector   magic, version, 32 random bytes A
    connector -> acceptor    magic, version, 32 random bytes C, HMAC-SHA256(secret, "connector" A C)
    acceptor  -> connector   1 and HMAC-SHA256(secret, "acceptor" C A), or 0 and nothing

Only fixed sizes are read until then; afterwards messages are JSON of a limited length. Later traffic on the connection
is neither encrypted nor signed: the secret keeps strangers out, it does not hide data from readers of the network.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
from contextlib import suppress
from typing import Any

from echelon.errors import AuthenticationError, ProtocolError

VERSION = 2
_MAGIC = b"ECHELON" + bytes([VERSION])
_NONCE_BYTES = 32
_PROOF_BYTES = 32
MAX_HELLO_BYTES = 1 << 14
"""Limit on a rank's hello, which holds the name of the run, and on its answer."""
MAX_ENTRY_BYTES = 1 << 10
"""Limit on a rank's entry in the table of members."""


class HungUp(ConnectionError):
    """The other end closed the connection in the middle of the handshake."""

    def __init__(self) -> None:
        super().__init__("the other end closed the connection")


async def prove_as_connector(connection: socket.socket, secret: bytes, rank: int) -> None:
    """Proves that this end, which dialled `rank`, knows the secret, and has the other end prove it.

    Raises:
        AuthenticationError: one of the two does not know it.
        ProtocolError: the other end speaks something else.
    """
    challenge = await _receive_exactly(connection, len(_MAGIC) + _NONCE_BYTES)
    _check_magic(challenge)
    theirs, ours = challenge[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, _MAGIC + ours + _proof(secret, b"connector", theirs, ours))
    if await _receive_exactly(connection, 1) != b"\x01":
        raise AuthenticationError(f"rank {rank} refused our secret: give every rank the same ECHELON_SECRET")
    answer = await _receive_exactly(connection, _PROOF_BYTES)
    # Compares in constant time, so the duration does not tell how much of a guess was right.
    if not hmac.compare_digest(answer, _proof(secret, b"acceptor", ours, theirs)):
        raise AuthenticationError(
            f"the process that listens as rank {rank} does not know the secret: check address and port"
        )


async def prove_as_acceptor(connection: socket.socket, secret: bytes) -> None:
    """Has the end that dialled prove the secret, then proves it too; raises as `prove_as_connector`."""
    loop = asyncio.get_running_loop()
    ours = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(connection, _MAGIC + ours)
    answer = await _receive_exactly(connection, len(_MAGIC) + _NONCE_BYTES + _PROOF_BYTES)
    _check_magic(answer)
    theirs, proof = answer[len(_MAGIC) : -_PROOF_BYTES], answer[-_PROOF_BYTES:]
    # The connector proves first, so a stranger that dials gets no proof from which to guess the secret.
    if not hmac.compare_digest(proof, _proof(secret, b"connector", ours, theirs)):
        await loop.sock_sendall(connection, b"\x00")
        raise AuthenticationError("wrong secret")
    await loop.sock_sendall(connection, b"\x01" + _proof(secret, b"acceptor", theirs, ours))
    # A small message must not wait until the one before is acknowledged (Nagle's algorithm).
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    # The role is part of it, so an end cannot be given its own proof back.
    return hmac.new(secret, role + first + second, hashlib.sha256).digest()


def _check_magic(data: bytes) -> None:
    # The last byte is the version: another version of Echelon gets its own advice.
    if data[: len(_MAGIC) - 1] != _MAGIC[:-1]:
        raise ProtocolError("the other end does not speak Echelon's protocol: check address and port")
    if data[: len(_MAGIC)] != _MAGIC:
        raise ProtocolError(
            f"the other end speaks version {data[len(_MAGIC) - 1]} of the protocol, this one {VERSION}: "
            "install the same Echelon everywhere"
        )


async def send_json(connection: socket.socket, value: dict[str, Any]) -> None:
    """Sends a JSON object, preceded by its length in 4 bytes."""
    data = json.dumps(value).encode()
    await asyncio.get_running_loop().sock_sendall(connection, len(data).to_bytes(4, "little") + data)


async def tell(connection: socket.socket, value: dict[str, Any]) -> None:
    """Sends a JSON object to an end that may be gone; a broken connection is ignored."""
    with suppress(OSError):
        await send_json(connection, value)


async def receive_json(connection: socket.socket, max_bytes: int) -> dict[str, Any]:
    """Receives a JSON object of at most `max_bytes` bytes; raises ProtocolError for anything else."""
    size = int.from_bytes(await _receive_exactly(connection, 4), "little")
    # The peer chose the length: it is checked before memory is allocated for it.
    if size > max_bytes:
        raise ProtocolError(f"a hello of {size} bytes exceeds the limit of {max_bytes}")
    try:
        value = json.loads(await _receive_exactly(connection, size))
    except (ValueError, RecursionError) as error:  # the latter for a million brackets
        raise ProtocolError("a hello that is not JSON") from error
    if not isinstance(value, dict):
        raise ProtocolError("a hello that is not a JSON object")
    return value


async def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        part = await loop.sock_recv(connection, size - len(data))
        if not part:
            raise HungUp()
        data += part
    return bytes(data)
