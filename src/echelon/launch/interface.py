"""On which of this host's addresses a rank listens, and from which it dials."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from dataclasses import replace

from echelon.backends.connect.interfaces import default_address, family_of, interfaces, is_loopback
from echelon.errors import LaunchError
from echelon.launch.environment import Environment

logger = logging.getLogger("echelon")

VARIABLE = "ECHELON_INTERFACE"
TORCH_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""By which torch's backends are told the same."""


def with_local_address(launched: Environment, environ: Mapping[str, str]) -> Environment:
    """Returns `launched` with the address by which ranks of other hosts reach this one, where it has to be chosen.

    That is the one of ECHELON_INTERFACE. Without that it is the one on the way to rank 0, which needs no choice; but on
    rank 0's host its name may stand for the loopback address, as Debian's installer has it in /etc/hosts.

    Raises:
        LaunchError: there is no such interface, or it has no address of the kind that MASTER_ADDR has; or nothing says
            by which address others reach this host.
    """
    if launched.is_one_host:
        return launched
    master = launched.master_addr
    found = _resolve(master)
    family = family_of(found[0]) if found else socket.AF_INET
    is_here = master not in found and any(map(is_loopback, found))
    name = environ.get(VARIABLE)
    if name:
        address = _address_of(name, family)
    else:
        _mention_torchs(environ)
        if not is_here:
            return launched
        address = _default_address(master, found[0])
    return replace(launched, local_address=address, master_addr=address if is_here else master)


def _default_address(master: str, loopback: str) -> str:
    address = default_address(family_of(loopback))
    if address is None:
        raise LaunchError(
            f"MASTER_ADDR={master} is the loopback address {loopback} on this host, where no other host can reach it: "
            f"set MASTER_ADDR to an address, or {VARIABLE} to the interface that leads to the other hosts"
        )
    return address


def _address_of(name: str, family: int) -> str:
    known = {interface.name: interface for interface in interfaces()}
    if name not in known:
        raise LaunchError(f"{VARIABLE}={name}: there is no such interface; use one of {', '.join(known)}")
    address = known[name].address(family)
    if address is None:
        kind = "IPv6" if family == socket.AF_INET6 else "IPv4"
        raise LaunchError(f"{VARIABLE}={name} has no {kind} address, but MASTER_ADDR has: use another interface")
    return address


def _mention_torchs(environ: Mapping[str, str]) -> None:
    for name in TORCH_VARIABLES:
        if environ.get(name):
            logger.warning(
                "%s=%s is for torch's own connections: set %s to choose the interface of Echelon's, too",
                name,
                environ[name],
                VARIABLE,
            )


def _resolve(host: str) -> list[str]:
    """Returns the addresses that a name stands for here; none, if it is not known (yet)."""
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []
