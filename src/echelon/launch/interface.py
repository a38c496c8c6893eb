"""Choice of this host's address on which a rank listens and from which it connects to others."""

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
"""Variables with which torch's backends choose their interface."""


def with_local_address(launched: Environment, environ: Mapping[str, str]) -> Environment:
    """Returns `launched` with the address at which ranks of other hosts reach this one, if it has to be chosen.

    ECHELON_INTERFACE chooses it. Without that it is the address of the route to rank 0, which needs no choice, except
    on rank 0's host: there its name may stand for the loopback address, as Debian's installer has it in /etc/hosts.

    Raises:
        LaunchError: there is no such interface, or it has no address of MASTER_ADDR's family; or this host has no
            address that others could reach.
    """
    # Ranks of one host use the rendezvous address itself; ECHELON_INTERFACE is for several hosts.
    if launched.is_one_host:
        return launched
    master = launched.master_addr
    found = _resolve(master)
    family = family_of(found[0]) if found else socket.AF_INET
    # An address resolves to itself, so `master` is a host name if it is not among the results.
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
    """Returns the addresses of a host name. Empty if the name is unknown, which may change while a cluster starts."""
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []
