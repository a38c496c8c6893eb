"""Checks of this host's network, from facts that the probes found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.backends.connect.interfaces import Interface, is_loopback
from echelon.doctor.finding import Finding, error, ok, warning
from echelon.launch.interface import TORCH_VARIABLES, VARIABLE
from echelon.launch.variables import PORTS

MIN_MTU = 1280
"""Bytes: least MTU that IPv6 allows on a link."""
_IPV4, _IPV6 = "127.0.0.1", "::1"


def check_loopback(problems: Mapping[str, str]) -> Finding:
    """Checks the loopback. `problems`: by address, why a connection to itself failed, "" if it did not."""
    # A host with IPv6 alone is usable, so a problem with one family is not an error.
    if problems[_IPV4] and not problems[_IPV6]:
        return ok("loopback", f"{_IPV6}; no IPv4 ({problems[_IPV4]})")
    if problems[_IPV4]:
        fix = "bring the loopback interface up: `ip link set lo up`"
        return error("loopback", f"{_IPV4} cannot be reached: {problems[_IPV4]}", fix)
    if problems[_IPV6]:
        return ok("loopback", f"{_IPV4}; no IPv6 ({problems[_IPV6]})")
    return ok("loopback", f"{_IPV4} and {_IPV6}")


def check_interfaces(found: Sequence[Interface], environ: Mapping[str, str], ways: Sequence[str]) -> Finding:
    """Checks the interfaces, and the choice of one for runs on several hosts.

    Args:
        found: all interfaces of this host.
        environ: environment variables, of which ECHELON_INTERFACE is read.
        ways: this host's addresses on its default routes.
    """
    usable = [interface for interface in found if interface.is_up and not interface.is_loopback and interface.addresses]
    listed = "; ".join(f"{interface.name} {', '.join(interface.addresses)}" for interface in usable)
    name = environ.get(VARIABLE)
    if name:
        if name not in [interface.name for interface in usable]:
            names = ", ".join(interface.name for interface in usable) or "none"
            fix = f"set it to one that is up and has an address ({names}), or unset it"
            return error("interfaces", f"{VARIABLE}={name} is not usable", fix)
        return ok("interfaces", f"{listed}. Between hosts: {name}, as {VARIABLE} says")
    for variable in TORCH_VARIABLES:
        if environ.get(variable):
            fix = f"set {VARIABLE}, too, to choose it for Echelon's connections"
            return warning(
                "interfaces", f"{listed}. {variable}={environ[variable]} applies to torch's connections only", fix
            )
    if not usable:
        return warning("interfaces", "only loopback", "for runs on several hosts, connect this one to their network")
    if not ways:
        fix = f"for runs on several hosts, set {VARIABLE} to the interface that leads to them"
        return warning("interfaces", f"{listed}, but no default route", fix)
    return ok("interfaces", f"{listed}. Between hosts: the one on the way to rank 0; by default {', '.join(ways)}")


def check_host_name(name: str, addresses: Sequence[str]) -> Finding:
    """Checks that the host's name resolves on this host."""
    if not addresses:
        fix = f"add a line for it to /etc/hosts, as `127.0.1.1 {name}`; torchrun and MPI look it up"
        return warning("host name", f"{name} has no address here", fix)
    found = f"{name} is {', '.join(addresses)}"
    if all(map(is_loopback, addresses)):
        found += " here: loopback. Other hosts need another address, which is then used here, too"
    return ok("host name", found)


def check_mtu(found: Sequence[Interface]) -> Finding:
    """Checks the MTU (greatest packet) of the interfaces."""
    usable = [interface for interface in found if interface.is_up and not interface.is_loopback]
    listed = ", ".join(f"{interface.name} {interface.mtu}" for interface in usable) or "no interface but loopback"
    for interface in usable:
        if interface.mtu < MIN_MTU:
            fix = f"raise it to that of the other hosts of its network: `ip link set {interface.name} mtu 1500`"
            return warning("MTU", f"{listed}: below {MIN_MTU} there is no IPv6, and much overhead", fix)
    return ok("MTU", listed)


def check_listening(problem: str) -> Finding:
    """Checks listening. `problem`: why no free port could be listened on, "" if one could."""
    if problem:
        fix = (
            "let this user open sockets (a container's or a sandbox's rules), and end the program that holds all ports"
        )
        return error("ports", f"no port can be listened on: {problem}", fix)
    return ok("ports", "a free one can be listened on")


def check_master_port(address: str, port: str, problem: str) -> Finding:
    """Checks MASTER_PORT. `problem`: why it cannot be listened on, "" if it can or rank 0 is on another host."""
    if problem:
        return error(
            "MASTER_PORT", f"{address} port {port}: {problem}", "set MASTER_PORT to a free port, 1024 to 32767"
        )
    return ok("MASTER_PORT", f"{port} is free here" if port else "not set: it follows from the job, or the launcher's")


def check_port_range(first: int, last: int) -> Finding:
    """Checks Linux's ephemeral ports against the ports that are derived from the names of jobs."""
    found = f"Linux hands out {first} to {last}; jobs without MASTER_PORT take {PORTS.start} to {PORTS.stop - 1}"
    if first < PORTS.stop and last >= PORTS.start:
        fix = "set MASTER_PORT for each job, or `sysctl net.ipv4.ip_local_port_range='32768 60999'`"
        return warning("port range", f"{found}: another program may have a job's port", fix)
    return ok("port range", found)


def check_master_address(master: str, addresses: Sequence[str]) -> Finding:
    """Checks that MASTER_ADDR resolves on this host. `master`: "" if it is not set."""
    if not master:
        return ok("MASTER_ADDR", "not set: the launcher says where ranks meet")
    if not addresses:
        return error("MASTER_ADDR", f"{master} is unknown here", "correct it, or have it in DNS or /etc/hosts")
    return ok("MASTER_ADDR", master if [master] == list(addresses) else f"{master} is {', '.join(addresses)}")
