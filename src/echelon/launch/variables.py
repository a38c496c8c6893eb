"""Reads numbers out of environment variables, and says under which name a wrong one was set."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from echelon.arguments import MAX_WORLD_SIZE, check_world_size
from echelon.backends.connect.interfaces import family_of
from echelon.backends.connect.members import join_address
from echelon.errors import InvalidRank, InvalidWorldSize, LaunchError

# What a launcher that has variables of its own told a rank, in the words of torchrun.

PORTS = range(20000, 30000)
"""Those that Linux gives to nobody by itself: it takes them from 32768 on."""


@dataclass(frozen=True)
class Translation:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of a rank, and what is known of where ranks can meet.

    launcher: as users know it. variables: the four; MASTER_ADDR, where the launcher says on which other host rank 0
    may be; RESTART, which attempt at the job this is. job: a name that all ranks of this job have and no other job;
    empty if the launcher gives none. is_one_host: it is certain that all ranks are on this host.
    """

    launcher: str
    variables: Variables
    job: str
    is_one_host: bool

    @property
    def port(self) -> int | None:
        """A port that follows from the name of the job, so that no rank has to be told; None without a name."""
        return PORTS[zlib.crc32(self.job.encode()) % len(PORTS)] if self.job else None


def renamed(environ: Mapping[str, str], names: Mapping[str, str]) -> Variables:
    """Returns the variables that are torchrun's keys of `names`, as their values of `names` are set in `environ`."""
    return Variables({common: environ.get(own, "") for common, own in names.items()}, names)


# What this host gives to the ranks that are started on it: a free port and a share of the cores.

LOOPBACK, LOOPBACK_V6 = "127.0.0.1", "::1"


def loopback() -> str:
    """Returns the address by which ranks of this host reach each other: IPv4's; IPv6's on a host that has only that.

    Raises:
        LaunchError: the host has neither.
    """
    problems = []
    for address in (LOOPBACK, LOOPBACK_V6):
        try:
            with socket.socket(family_of(address), socket.SOCK_STREAM) as probe:
                probe.bind((address, 0))
        except OSError as error:
            problems.append(f"{address}: {os.strerror(error.errno) if error.errno else error}")
        else:
            return address
    raise LaunchError(
        f"this host has no loopback address ({'; '.join(problems)}), by which its ranks reach each other: set the "
        "interface up with `ip link set lo up`"
    )


class ReservedPort:
    """Keeps a free TCP port on the loopback address for a rank that will listen on it.

    The socket is bound but never listens, so it takes no connection; with SO_REUSEPORT on both sides the rank can
    bind the same port while this one is held, and nobody else gets it in between.
    """

    def __init__(self) -> None:
        self.host = loopback()
        """The loopback address."""
        self._socket = socket.socket(family_of(self.host), socket.SOCK_STREAM)
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        self._socket.bind((self.host, 0))
        self.port: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """The address as "host:port"; an IPv6 address is put in brackets."""
        return join_address(self.host, self.port)

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def threads_per_rank(num_ranks: int) -> int:
    """Returns how many threads each of `num_ranks` ranks may use without competing for the cores of this host."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


@dataclass(frozen=True)
class Variables:
    """Variables by the names that torchrun uses, whoever set them.

    values: the text of each by that name; empty counts as not set. aliases: the name under which it was really set,
    where that is another one; errors use it.
    """

    values: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Returns what `name` is set to; an empty text if it is not."""
        return self.values.get(name, "")

    def world_size(self, name: str, default: int | None = None, maximum: int = MAX_WORLD_SIZE) -> int:
        """Returns a number of ranks. Raises InvalidWorldSize if it is none, or above `maximum`."""
        text = self.text(name)
        if not text and default is not None:
            return default
        value = parse(text)
        if value is None or value < 1 or (value > maximum and value <= MAX_WORLD_SIZE):
            upper = "or more" if maximum == MAX_WORLD_SIZE else f"to {maximum}"
            raise InvalidWorldSize(f"{self.alias(name)}={text[:40]!r}: set it to a number of ranks, 1 {upper}")
        check_world_size(value, self.alias(name))
        return value

    def rank(self, name: str, world_size: int, default: int | None = None) -> int:
        """Returns a rank. Raises InvalidRank if it is none of `world_size`."""
        text = self.text(name)
        if not text and default is not None:
            return default
        value = parse(text)
        if value is None:
            raise InvalidRank(text, world_size, self.alias(name))
        if not 0 <= value < world_size:
            raise InvalidRank(value, world_size, self.alias(name))
        return value

    def number(
        self, name: str, what: str, *, default: int | None = None, minimum: int = 0, maximum: int | None = None
    ) -> int:
        """Returns a whole number. Raises LaunchError that says it is not `what` if it is none, or out of range."""
        text = self.text(name)
        if not text and default is not None:
            return default
        value = parse(text)
        if value is None or value < minimum or (maximum is not None and value > maximum):
            raise LaunchError(f"{self.alias(name)}={text!r} is not {what}: correct it")
        return value

    def alias(self, name: str) -> str:
        """Returns the name under which `name` was really set."""
        return self.aliases.get(name, name)


def parse(text: str) -> int | None:
    """Returns the whole number that a text is, None if it is none."""
    try:
        return int(text)
    except ValueError:
        return None
