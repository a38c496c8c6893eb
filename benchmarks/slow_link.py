"""Joins two processes of this machine by a link that is as slow as one asks for, both ways.

    try:
        with slow_link(bits_per_second=1e9, delay=1e-3) as ends:
            outputs = run_ranks(ends, [sys.executable, __file__, "--rank"])
    except Unavailable as error:
        print(error)

Each end is a network namespace, so this takes root (or CAP_NET_ADMIN and CAP_SYS_ADMIN) and `ip`. Where the kernel has
netem, that makes the link. Where it has not, a process does (slow_link.c, which takes a C compiler): it takes packets
from a TUN device in one namespace and, when the last of their bits would have left and the delay is over, puts them
into that in the other. It computes on a core that the ranks use too, so a step of theirs takes a little longer than
over a real card; `ends.made_by` says which, and `ends.busy_seconds()` how much. As over a real card, TCP hands packets
over 64 KiB at a time and knows segments of 1448 bytes: its slow start is real. Not counted are the headers that
Ethernet and TCP add to every 1448 bytes, 6 percent.

Strategy of that process: it alone holds both devices. While packets are under way it looks every 250 us what has come
and what is due, so each is up to 125 us early or late; else it sleeps until one comes. It ends when its standard input
does, that is, with whoever started it; the devices are gone with it. The link itself holds at most 50 ms of packets, as
a switch does; what comes then is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shlex
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ADDRESSES = ("10.231.77.1", "10.231.77.2")
SOURCE = Path(__file__).with_suffix(".c")
"""Of the process that is the link where netem is not."""
SET_INTERFACE, SET_OFFLOAD = 0x4004_54CA, 0x4004_54D0
"""Calls to a TUN device, and the flags below: linux/if_tun.h."""
PACKETS_ONLY, NO_INFORMATION, WITH_HEADER = 0x0001, 0x1000, 0x4000
LEAVES_SUMS, LEAVES_CUTTING = 0x01, 0x02


class Unavailable(Exception):
    """Why this machine has no slow link."""


class Ends(NamedTuple):
    """Ends of a link between two processes."""

    prefixes: tuple[Sequence[str], Sequence[str]]
    """What comes before the command of each."""
    address: str
    """Of the first."""
    made_by: str
    """What makes the link between them."""
    process: int | None = None
    """The process that does, if one does."""

    def busy_seconds(self) -> float:
        """Returns the processor time that the link itself has taken so far."""
        if self.process is None:
            return 0.0
        fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


LOCAL = Ends(((), ()), "127.0.0.1", "the kernel")
"""Both in the namespace of this process."""


@contextlib.contextmanager
def slow_link(bits_per_second: float = 1e9, delay: float = 1e-3) -> Iterator[Ends]:
    """Makes two network namespaces joined by a slow link, and removes them.

    Args:
        bits_per_second: that either end can send, whatever the other does.
        delay: seconds from the end of a packet's leaving to its arrival.

    Raises:
        Unavailable: no right to make namespaces or devices, or no `ip`.
    """
    _remove_left_over()
    names = (f"slow{os.getpid()}a", f"slow{os.getpid()}b")
    with contextlib.ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False, timeout=10)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        prefixes = (["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]])
        try:
            _join_by_netem(names, bits_per_second, delay)
            ends = Ends(prefixes, ADDRESSES[0], "netem")
        except Unavailable:
            process = _join_by_process(names, bits_per_second, delay, stack)
            ends = Ends(prefixes, ADDRESSES[0], "a process between two TUN devices", process)
        yield ends


def run_ranks(
    ends: Ends, command: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = 300.0
) -> tuple[str, str]:
    """Runs a command as both ranks of a world of two, one at each end, and returns their outputs.

    Args:
        ends: of their link.
        command: calls `echelon.init()`, or what else goes by torchrun's variables.
        environment: further variables.
        timeout: seconds.

    Raises:
        RuntimeError: a rank failed; its last words went to standard error.
        subprocess.TimeoutExpired: they took too long.
    """
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": ends.address,
        "MASTER_PORT": str(_free_port()),
        "ECHELON_SECRET": secrets.token_hex(16),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [*prefix, *command],
            env={**os.environ, **common, **(environment or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, prefix in enumerate(ends.prefixes)
    ]
    try:
        first, second = (rank.communicate(timeout=timeout)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    codes = [rank.returncode for rank in ranks]
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}: {shlex.join(command)}")
    return first, second


def _run(*command: str) -> str:
    """Runs a command and returns its output."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout
    except OSError as error:
        raise Unavailable(f"no slow link: {command[0]}: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"no slow link: {shlex.join(command)}: {error.stderr.strip()}") from error


def _remove_left_over() -> None:
    """Removes the namespaces of processes that were killed before they could."""
    for name in re.findall(r"^slow\d+[ab]\b", _run("ip", "netns", "list"), re.MULTILINE):
        if not os.path.exists(f"/proc/{name[4:-1]}"):
            _run("ip", "netns", "delete", name)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _join_by_netem(names: Sequence[str], bits_per_second: float, delay: float) -> None:
    peer = ("peer", "name", "slow", "netns", names[1])
    _run("ip", "link", "add", "slow", "netns", names[0], "type", "veth", *peer)
    try:
        for name in names:
            shape = ("delay", f"{delay * 1e6:.0f}us", "rate", f"{bits_per_second:.0f}bit", "limit", "10000")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "slow", "root", "netem", *shape)
        _set_up(names)
    except Unavailable:
        _run("ip", "-n", names[0], "link", "delete", "slow")
        raise


def _join_by_process(names: Sequence[str], bits_per_second: float, delay: float, stack: contextlib.ExitStack) -> int:
    """Returns the number of the process."""
    devices = []
    for name in names:
        devices.append(_tun_device(name))
        stack.callback(os.close, devices[-1])
        _run("ip", "link", "set", name, "netns", name, "name", "slow")
    _set_up(names)
    program = os.path.join(stack.enter_context(tempfile.TemporaryDirectory()), "slow_link")
    _run("cc", "-O2", "-o", program, str(SOURCE))
    command = [program, *map(str, devices), str(8 / bits_per_second), str(delay)]
    forwarder = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=devices)
    stack.callback(forwarder.communicate, timeout=10)
    return forwarder.pid


def _set_up(names: Sequence[str]) -> None:
    for name, address in zip(names, ADDRESSES, strict=True):
        _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "slow")
        _run("ip", "-n", name, "link", "set", "slow", "up")


def _tun_device(name: str) -> int:
    """Makes a TUN device and returns its file descriptor."""
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise Unavailable(f"no slow link: the kernel has no netem, and /dev/net/tun: {error.strerror}") from error
    try:
        flags = PACKETS_ONLY | NO_INFORMATION | WITH_HEADER
        fcntl.ioctl(device, SET_INTERFACE, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(device, SET_OFFLOAD, LEAVES_SUMS | LEAVES_CUTTING)
    except OSError as error:
        os.close(device)
        raise Unavailable(f"no slow link: cannot make a TUN device: {error.strerror}") from error
    return device
