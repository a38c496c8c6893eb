"""Launcher variables under torchrun's names, and this host's resources for ranks: loopback address, port, threads."""

from __future__ import annotations

import contextlib
import os
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from echelon.arguments import MAX_WORLD_SIZE, check_world_size
from echelon.backends.connect.interfaces import family_of
from echelon.backends.connect.members import join_address
from echelon.cores import num_cores
from echelon.errors import InvalidRank, InvalidWorldSize, LaunchError

PORTS = range(20000, 30000)
"""Ports for the rendezvous. Linux hands out none of them by itself: its ephemeral ports start at 32768."""


@dataclass(frozen=True)
class Translation:
    """Variables of a launcher other than torchrun, under torchrun's names.

    launcher: its name for users. variables: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; MASTER_ADDR, if the
    launcher names the host of rank 0; RESTART, the number of the attempt at the job. job: name of the job, the same on
    all of its ranks and different from any other job's; empty if the launcher gives none. is_one_host: all ranks are
    certainly on this host.
    """

    launcher: str
    variables: Variables
    job: str
    is_one_host: bool

    @property
    def port(self) -> int | None:
        """Port computed from the job's name, so ranks need not exchange it. None without a name."""
        # Not hash(), which differs between processes.
        return PORTS[zlib.crc32(self.job.encode()) % len(PORTS)] if self.job else None


def renamed(environ: Mapping[str, str], names: Mapping[str, str]) -> Variables:
    """Returns `environ` under torchrun's names. `names` maps torchrun's name to the launcher's."""
    return Variables({common: environ.get(own, "") for common, own in names.items()}, names)


LOOPBACK, LOOPBACK_V6 = "127.0.0.1", "::1"


def loopback() -> str:
    """Returns the loopback address: 127.0.0.1, or ::1 on a host without IPv4.

    Raises:
        LaunchError: the host has neither.
    """
    problems = []
    for address in (LOOPBACK, LOOPBACK_V6):
        # Bound to find out: the interface can be down, or the kernel have only one of the two families.
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
    """Free TCP port on the loopback address, reserved for a rank that will listen on it.

    The socket is bound but never listens, so it accepts no connection. With SO_REUSEPORT on both sides the rank can
    bind the port while it is reserved, and no other program gets it in between.
    """

    def __init__(self) -> None:
        self.host = loopback()
        """The loopback address."""
        # The launcher takes a connection with the port for one of the ranks. An earlier one may linger for a minute.
        for is_last in (*[False] * 9, True):
            self._socket = socket.socket(family_of(self.host), socket.SOCK_STREAM)
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
            self._socket.bind((self.host, 0))
            self.port: int = self._socket.getsockname()[1]
            if is_last or not is_in_use(self.port):
                break
            self._socket.close()

    @property
    def address(self) -> str:
        """Address as "host:port". An IPv6 address is put in brackets."""
        return join_address(self.host, self.port)

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def is_in_use(port: int) -> bool:
    """Whether a TCP connection of this host has a port at either end, or somebody listens there."""
    for name in ("tcp", "tcp6"):
        # Linux alone has the file. Ports are hexadecimal there, after the address. A socket that is only bound is not
        # listed.
        with contextlib.suppress(OSError), open(f"/proc/net/{name}", encoding="ascii") as file:
            if f":{port:04X} " in file.read():
                return True
    return False


def threads_per_rank(num_ranks: int) -> int:
    """Returns the number of threads that each of `num_ranks` ranks may use without competing for cores."""
    return max(1, num_cores() // num_ranks)


@dataclass(frozen=True)
class Variables:
    """Variables of any launcher, under torchrun's names.

    values: text of each variable; an empty text counts as not set. aliases: the launcher's own name of a variable, if
    it differs; errors use it.
    """

    values: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Returns the text of `name`. Empty if it is not set."""
        return self.values.get(name, "")

    def world_size(self, name: str, default: int | None = None, maximum: int = MAX_WORLD_SIZE) -> int:
        """Returns a number of ranks. Raises InvalidWorldSize if the text is no number from 1 to `maximum`."""
        text = self.text(name)
        if not text and default is not None:
            return default
        value = parse(text)
        if value is None or value < 1 or (value > maximum and value <= MAX_WORLD_SIZE):
            # An environment variable may be long, so the error shows only its start.
            upper = "or more" if maximum == MAX_WORLD_SIZE else f"to {maximum}"
            raise InvalidWorldSize(f"{self.alias(name)}={text[:40]!r}: set it to a number of ranks, 1 {upper}")
        check_world_size(value, self.alias(name))
        return value

    def rank(self, name: str, world_size: int, default: int | None = None) -> int:
        """Returns a rank. Raises InvalidRank if the text is no number from 0 to `world_size` - 1."""
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
        """Returns an integer.

        Args:
            name: torchrun's name of the variable.
            what: description of a valid value, for the error, such as "a port, 1 to 65535".
            default: result if the variable is not set. None: it has to be set.
            minimum, maximum: valid range, both included.

        Raises:
            LaunchError: the text is no integer, or out of range.
        """
        text = self.text(name)
        if not text and default is not None:
            return default
        value = parse(text)
        if value is None or value < minimum or (maximum is not None and value > maximum):
            raise LaunchError(f"{self.alias(name)}={text!r} is not {what}: correct it")
        return value

    def alias(self, name: str) -> str:
        """Returns the launcher's own name of `name`."""
        return self.aliases.get(name, name)


def parse(text: str) -> int | None:
    """Returns a text as an integer. None if it is none."""
    try:
        return int(text)
    except ValueError:
        return None
