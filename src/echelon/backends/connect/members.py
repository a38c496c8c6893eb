"""Hello and table of members: descriptions that the ranks of a job exchange, and their validation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from echelon.errors import ConnectError, ProtocolError

_MAX_NAME = 256
"""Characters of the name of a host or machine. A machine's has about 55, a host's at most 253."""
_MAX_SHOWN = 100
"""Characters of a peer's value that an error repeats."""


@dataclass(frozen=True, slots=True)
class Job:
    """Job of this process: its rank, and the facts that all ranks of one world must agree on."""

    rank: int
    world_size: int
    secret: bytes = field(repr=False)  # must not show in errors and logs
    run_id: str = ""
    restart: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"

    def hello(self, port: int) -> dict[str, Any]:
        """Returns the greeting of this rank, which listens on `port` (0: not at all)."""
        # Without a host: the receiver takes it from the connection.
        here = Member(self.rank, "", port, os.getpid(), machine_id())
        return asdict(here) | {"world_size": self.world_size, "run_id": self.run_id, "restart": self.restart}

    def objection(self, hello: Mapping[str, Any]) -> str | None:
        """Returns why the sender of a greeting is not of this job; None if it is."""
        theirs = tuple(hello.get(key) for key in ("world_size", "run_id", "restart"))
        if theirs == (self.world_size, self.run_id, self.restart):
            return None
        world_size, run_id, restart = (repr(value)[:_MAX_SHOWN] for value in theirs)
        return (
            f"it belongs to run {run_id}, restart {restart}, of {world_size} ranks; "
            f"this is run {self.run_id!r}, restart {self.restart}, of {self.world_size}"
        )


@dataclass(frozen=True, slots=True)
class Member:
    """Address and process of a rank. `machine` is equal for ranks that see each other's processes."""

    rank: int
    host: str
    port: int
    pid: int
    machine: str

    @classmethod
    def read(cls, entry: object, world_size: int) -> Member:
        """Reads and validates the entry of a rank, as a peer sent it.

        Raises:
            ProtocolError: something is missing, of the wrong type or out of range.
        """
        if not isinstance(entry, Mapping):
            raise ProtocolError("an entry about a rank that is not an object")
        rank, port, pid = (_number(entry, key) for key in ("rank", "port", "pid"))
        host, machine = entry.get("host"), entry.get("machine")
        if not isinstance(host, str) or not isinstance(machine, str):
            raise ProtocolError("an entry about a rank without host or machine")
        if len(host) > _MAX_NAME or len(machine) > _MAX_NAME:
            raise ProtocolError(f"an entry about a rank with a host or machine of over {_MAX_NAME} characters")
        if not 0 <= rank < world_size:
            raise ProtocolError(f"there is no rank {str(rank)[:_MAX_SHOWN]} in a world of {world_size}")
        # Linux's ranges. Larger numbers would fail later, in the calls of the system that take them.
        if port >= 1 << 16 or not 0 < pid < 1 << 31:
            numbers = f"port {str(port)[:_MAX_SHOWN]} and process {str(pid)[:_MAX_SHOWN]}"
            raise ProtocolError(f"rank {rank} with {numbers}: no such numbers")
        return cls(rank, host, port, pid, machine)


def _number(entry: Mapping[str, object], key: str) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or value < 0:
        raise ProtocolError(
            f"an entry about a rank with {key}={repr(value)[:_MAX_SHOWN]}, which is no number from 0 on"
        )
    return value


def read_table(entries: object, world_size: int) -> tuple[Member, ...]:
    """Reads the members of a world, one for every rank in order.

    Raises:
        ProtocolError: the table has another form.
    """
    if not isinstance(entries, list) or len(entries) != world_size:
        raise ProtocolError(f"the table of members does not have {world_size} entries")
    members = tuple(Member.read(entry, world_size) for entry in entries)
    # Ranks look members up by index.
    if [member.rank for member in members] != list(range(world_size)):
        raise ProtocolError("the table of members does not have every rank once, in order")
    return members


def machine_id() -> str:
    """Returns a name for the set of processes that can watch each other by process number."""
    # Containers of one machine share the boot's name. The PID namespace tells whether they share process numbers.
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def split_address(address: str) -> tuple[str, int]:
    """Reads "host:port" or "[v6]:port".

    Raises:
        ConnectError: it is neither.
    """
    # The last colon: an IPv6 address has more of them.
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConnectError(f'master address {address!r} is not "host:port": use for example "127.0.0.1:29500"')
    return host.strip("[]") or "127.0.0.1", int(port)


def join_address(host: str, port: int) -> str:
    """Returns "host:port"; an IPv6 address is put in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
