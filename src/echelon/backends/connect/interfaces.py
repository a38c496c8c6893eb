"""Network interfaces of this host, as reported by Linux."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_GET_ADDRESS, _GET_FLAGS, _GET_MTU = 0x8915, 0x8913, 0x8921
"""SIOCGIFADDR, SIOCGIFFLAGS and SIOCGIFMTU, which Python has no names for."""
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40
_NAME_BYTES = 16
_REQUEST_BYTES = 40
_LINK_LOCAL = 0x20
_TENTATIVE = 0x40
_NOWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that are kept for documents (RFC 5737, RFC 3849): the way there is the way to everywhere."""


@dataclass(frozen=True)
class Interface:
    """Network interface: its addresses that other hosts can reach, IPv4 before IPv6, and its MTU in bytes."""

    name: str
    addresses: tuple[str, ...]
    mtu: int
    is_up: bool
    is_loopback: bool

    def address(self, family: int) -> str | None:
        """Returns its first address of AF_INET or AF_INET6, None if it has none."""
        return next((address for address in self.addresses if family_of(address) == family), None)


def interfaces() -> tuple[Interface, ...]:
    """Returns the interfaces of this host, in the order of their index."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in sorted(socket.if_nameindex()):
            with suppress(OSError):  # it has just gone
                found.append(_read(probe, name))
    return tuple(found)


def family_of(address: str) -> int:
    """Returns AF_INET6 for an IPv6 address, else AF_INET."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(address: str) -> bool:
    """Whether an IP address is a loopback address. False for host names."""
    with suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False


def address_towards(host: str) -> str:
    """Returns this host's address on the way to `host`; nothing is sent. Raises OSError if there is no way."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # On a datagram socket this sends nothing, but has the kernel choose the route and its source address.
        probe.connect(address)
        return str(probe.getsockname()[0])


def default_address(family: int) -> str | None:
    """Returns this host's address on the way to everywhere else, None if there is no such way."""
    with suppress(OSError):
        return address_towards(_NOWHERE[socket.AddressFamily(family)])
    return None


def _read(probe: socket.socket, name: str) -> Interface:
    flags = struct.unpack_from("H", _ask(probe, name, _GET_FLAGS))[0]
    addresses = []
    with suppress(OSError):  # it has no IPv4 address
        addresses.append(socket.inet_ntoa(_ask(probe, name, _GET_ADDRESS)[4:8]))
    return Interface(
        name,
        (*addresses, *_ipv6_addresses(name)),
        struct.unpack_from("i", _ask(probe, name, _GET_MTU))[0],
        bool(flags & _UP and flags & _RUNNING),  # switched on, and with a carrier
        bool(flags & _LOOPBACK),
    )


def _ask(probe: socket.socket, name: str, question: int) -> bytes:
    """Returns the fields after the name in Linux's struct ifreq."""
    answer = fcntl.ioctl(
        probe, question, struct.pack(f"{_NAME_BYTES}s{_REQUEST_BYTES - _NAME_BYTES}x", os.fsencode(name))
    )
    return answer[_NAME_BYTES:]


def _ipv6_addresses(name: str) -> list[str]:
    """Returns the IPv6 addresses of an interface, without link-local ones: they need the interface's name."""
    addresses = []
    with suppress(OSError):  # IPv6 is switched off
        for line in Path("/proc/self/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, flags, owner = line.split()
            # A tentative address is still being checked for duplicates and cannot be bound.
            if owner == name and int(scope, 16) != _LINK_LOCAL and not int(flags, 16) & _TENTATIVE:
                addresses.append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return addresses
