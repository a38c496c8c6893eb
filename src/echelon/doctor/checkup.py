"""All checks of a host, in the order in which a run needs the checked things."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Mapping

import torch
import torch.distributed

from echelon import _torch_versions
from echelon.backends.connect.interfaces import default_address, interfaces, is_loopback
from echelon.backends.shared.memory.support import obstacle
from echelon.doctor import host, network, probes
from echelon.doctor.finding import Finding
from echelon.doctor.variables import check_variables


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Runs all checks and returns their findings. Takes up to some seconds.

    Args:
        environ: environment variables that ranks would be started with.
    """
    return [*check_variables(environ), *_network(environ), *_host(environ), *_engine(environ)]


def _network(environ: Mapping[str, str]) -> list[Finding]:
    found = interfaces()
    name = socket.gethostname()
    master = environ.get("MASTER_ADDR", "").strip("[]")
    master_addresses = probes.addresses_of(master) if master else []
    ports = probes.port_range()
    return [
        network.check_loopback({address: probes.loopback_problem(address) for address in ("127.0.0.1", "::1")}),
        network.check_interfaces(found, environ, _ways()),
        network.check_mtu(found),
        network.check_host_name(name, probes.addresses_of(name)),
        network.check_listening(probes.listening_problem("127.0.0.1", 0)),
        network.check_port_range(ports.start, ports.stop - 1),
        network.check_master_address(master, master_addresses),
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
    return network.check_master_port(address, port, probes.listening_problem(address, int(port)) if is_wanted else "")


def _host(environ: Mapping[str, str]) -> list[Finding]:
    has_gpu = probes.has_nvidia_driver()
    return [
        host.check_shared_memory(obstacle(), is_wanted=environ.get("ECHELON_BACKEND") == "shm"),
        host.check_secret_file(probes.secret_file_problem(environ)),
        host.check_pidfd(probes.pidfd_problem()),
        host.check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        host.check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_gpu=has_gpu),
        host.check_clock(is_synchronised=probes.clock_is_synchronised(), year=time.gmtime().tm_year),
    ]


def _engine(environ: Mapping[str, str]) -> list[Finding]:
    names, problem = probes.gpus()
    local = environ.get("LOCAL_WORLD_SIZE", "")
    return [
        host.check_torch(
            torch.__version__, has_distributed=torch.distributed.is_available(), lacking=_torch_versions.lacking()
        ),
        host.check_threads(
            torch.get_num_threads(), len(os.sched_getaffinity(0)), int(local) if local.isdecimal() and int(local) else 1
        ),
        host.check_gpu(torch.version.cuda, names, problem, has_driver=probes.has_nvidia_driver()),
        host.check_nccl(probes.nccl_version(), len(names), is_wanted=environ.get("ECHELON_BACKEND") == "nccl"),
    ]
