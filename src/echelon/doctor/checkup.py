"""All checks of this host, in the order in which a run needs the checked things, and the probes for their facts.

A probe returns a fact, or the reason why a facility cannot be used.
"""

from __future__ import annotations

import ctypes
import difflib
import errno
import os
import resource
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed

from echelon import _native, _torch_versions, operation_records
from echelon.backends.connect.interfaces import default_address, family_of, interfaces, is_loopback
from echelon.backends.shared.memory.support import obstacle
from echelon.collectives.plans.algorithms.registry import OPERATIONS
from echelon.collectives.plans.select import parse, variable_of
from echelon.collectives.plans.tuning import from_text
from echelon.cores import num_cores
from echelon.doctor import checks
from echelon.doctor.checks import Finding, error, ok, warning
from echelon.errors import EchelonError, LaunchError
from echelon.group import staging
from echelon.launch import environment, interface, report, status_line, tuned
from echelon.launch.secret_file import SecretFile


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Runs all checks and returns their findings. Takes up to some seconds.

    Args:
        environ: environment variables that ranks would be started with.
    """
    return [*check_variables(environ), *_network(environ), *_host(environ), *_engine(environ)]


_OWN = "ECHELON_"
# A test compares it with all names in the source, so a new variable cannot be forgotten here.
KNOWN = frozenset(
    (
        "ECHELON_BACKEND",
        "ECHELON_RUN_ID",
        "ECHELON_SECRET",
        _native.VARIABLE,
        operation_records.VARIABLE,
        staging.VARIABLE,
        interface.VARIABLE,
        report.ERROR_FILE,
        status_line.VARIABLE,
        tuned.VARIABLE,
        *map(variable_of, OPERATIONS),
    )
)
"""All ECHELON_ variables that are read."""


def check_variables(environ: Mapping[str, str]) -> list[Finding]:
    """Checks all variables that a run reads, and finds unknown ECHELON_ variables, which may be misspelt."""
    found = [*_wrong(environ), *_unknown(environ)]
    if found:
        return found
    # Names alone, without values: one of them is the secret.
    names = [name for name in sorted(environ) if name in KNOWN or name in environment.REQUIRED]
    return [ok("variables", ", ".join(names) + " as they should be" if names else "none set")]


def _wrong(environ: Mapping[str, str]) -> Iterator[Finding]:
    # Read as a run reads them, so that the doctor and the run say the same.
    for read in (_read_launcher, _read_backend, staging.fallback_is_on, _read_table, _read_algorithms):
        try:
            read(environ)
        except EchelonError as problem:
            # Error texts have their advice behind the first colon.
            what, _, fix = str(problem).partition(": ")
            yield error("variables", what, fix or "correct it")


def _read_launcher(environ: Mapping[str, str]) -> None:
    if launched := environment.read(environ):
        launched.check_secret()


def _read_backend(environ: Mapping[str, str]) -> None:
    environment.read_backend(environ, "auto")


def _read_table(environ: Mapping[str, str]) -> None:
    source, text = tuned.find(environ)
    if text:
        from_text(text, source)


def _read_algorithms(environ: Mapping[str, str]) -> None:
    for operation in OPERATIONS:
        if name := environ.get(variable_of(operation)):
            parse(operation, name)


def _unknown(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(environ):
        if name.startswith(_OWN) and name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            fix = f"rename it to {near[0]}, or unset it" if near else "unset it"
            yield warning("variables", f"{name} is not read by anything", fix)


def _network(environ: Mapping[str, str]) -> list[Finding]:
    found = interfaces()
    name = socket.gethostname()
    master = environ.get("MASTER_ADDR", "").strip("[]")  # an IPv6 address may have brackets
    master_addresses = addresses_of(master) if master else []
    ports = port_range()
    return [
        checks.check_loopback({address: loopback_problem(address) for address in ("127.0.0.1", "::1")}),
        checks.check_interfaces(found, environ, _ways()),
        checks.check_mtu(found),
        checks.check_host_name(name, addresses_of(name)),
        checks.check_listening(listening_problem("127.0.0.1", 0)),
        checks.check_port_range(ports.start, ports.stop - 1),
        checks.check_master_address(master, master_addresses),
        _master_port(environ, master_addresses),
    ]


def _ways() -> list[str]:
    """Returns this host's addresses on its default routes, IPv4 first."""
    found = map(default_address, (socket.AF_INET, socket.AF_INET6))
    return [address for address in found if address is not None and not is_loopback(address)]


def _master_port(environ: Mapping[str, str], addresses: list[str]) -> Finding:
    port, address = environ.get("MASTER_PORT", ""), next(iter(addresses), "127.0.0.1")
    # Only rank 0 listens on MASTER_PORT.
    is_wanted = port.isdecimal() and 0 < int(port) < 1 << 16 and environ.get("RANK", "0") == "0"
    return checks.check_master_port(address, port, listening_problem(address, int(port)) if is_wanted else "")


def _host(environ: Mapping[str, str]) -> list[Finding]:
    has_gpu = has_nvidia_driver()
    return [
        checks.check_shared_memory(obstacle(), is_wanted=environ.get("ECHELON_BACKEND") == "shm"),
        checks.check_secret_file(secret_file_problem(environ)),
        checks.check_pidfd(pidfd_problem()),
        checks.check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        checks.check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_gpu=has_gpu),
        checks.check_clock(is_synchronised=clock_is_synchronised(), year=time.gmtime().tm_year),
    ]


def _engine(environ: Mapping[str, str]) -> list[Finding]:
    names, problem = gpus()
    local = environ.get("LOCAL_WORLD_SIZE", "")
    return [
        checks.check_torch(
            torch.__version__, has_distributed=torch.distributed.is_available(), lacking=_torch_versions.lacking()
        ),
        checks.check_threads(
            torch.get_num_threads(), num_cores(), int(local) if local.isdecimal() and int(local) else 1
        ),
        checks.check_gpu(torch.version.cuda, names, problem, has_driver=has_nvidia_driver()),
        checks.check_nccl(nccl_version(), len(names), is_wanted=environ.get("ECHELON_BACKEND") == "nccl"),
    ]


_TIME_ERROR = 5  # TIME_ERROR, returned by adjtimex(2) while the clock is not synchronised
_TIMEX_BYTES = 512  # more than the size of Linux's struct timex; all zero, it sets nothing
_PATIENCE = 2.0  # seconds; a firewall may drop even packets to the host itself


def loopback_problem(address: str) -> str:
    """Returns why this host cannot connect to itself at `address`. "" if it can. Blocks for at most 2 s."""
    try:
        with (
            socket.create_server((address, 0), family=family_of(address)) as server,
            socket.create_connection(server.getsockname()[:2], _PATIENCE),
        ):
            return ""
    except OSError as error:
        return reason(error)


def listening_problem(address: str, port: int) -> str:
    """Returns why `address` and `port` (0: any) cannot be listened on. "" if they can, or are another host's."""
    try:
        with socket.create_server((address, port), family=family_of(address), backlog=1):
            return ""
    except OSError as error:
        # EADDRNOTAVAIL: no interface of this host has the address.
        return "" if error.errno == errno.EADDRNOTAVAIL else reason(error)


def addresses_of(host: str) -> list[str]:
    """Returns the addresses that a name resolves to on this host. Empty if it is unknown."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        # An address comes as often as it stands in /etc/hosts.
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return []


def secret_file_problem(environ: Mapping[str, str]) -> str:
    """Returns why ranks of this host could not share a secret in a file. "" if they could."""
    try:
        with SecretFile("doctor", environ) as file:
            file.remove()  # and its folder, if it was made for it
    except LaunchError as error:
        return str(error)
    return ""


def port_range() -> range:
    """Returns Linux's range of ephemeral ports."""
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return range(int(first), int(last) + 1)


def pidfd_problem() -> str:
    """Returns why the end of a process cannot be watched by a pidfd. "" if it can."""
    try:
        # Tried and not looked up: seccomp rules of a container refuse it on new kernels, too.
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return reason(error)
    return ""


def clock_is_synchronised() -> bool | None:
    """Whether the kernel regards the clock as synchronised. None if it does not know."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else state != _TIME_ERROR


def gpus() -> tuple[list[str], str]:
    """Returns the names of the GPUs that torch sees, and why one cannot be used, "" if all can."""
    names = []
    try:
        for number in range(torch.cuda.device_count()):
            names.append(torch.cuda.get_device_name(number))
            torch.ones(1, device=f"cuda:{number}").sum().item()  # a listed GPU may still fail its first kernel
    except (RuntimeError, AssertionError) as error:
        return names, str(error).splitlines()[0]
    return names, ""


def nccl_version() -> str | None:
    """Returns the version of torch's NCCL. None if torch has none."""
    # In a build without NCCL the call of its version would fail.
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def has_nvidia_driver() -> bool:
    """Whether NVIDIA's driver is loaded."""
    # A container may have only one of the two.
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def reason(error: OSError) -> str:
    """Returns the system's text of an error, without the address that Python may add and the caller knows."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
