"""Checks of a host's network, limits, clock, torch and GPUs. Each judges facts that the caller found.

A check and the probe for its facts are apart, so that tests can judge hosts that they do not run on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from echelon import _torch_versions
from echelon.backends.connect.interfaces import Interface, is_loopback
from echelon.launch.interface import TORCH_VARIABLES, VARIABLE
from echelon.launch.variables import PORTS


class Status(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """A run would start, but it may be slow, or fail in some cases."""
    ERROR = "error"
    """A run would not start."""


@dataclass(frozen=True)
class Finding:
    """Outcome of one check, with a fix unless its status is OK."""

    check: str
    status: Status
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.status is not Status.OK), self


def ok(check: str, found: str) -> Finding:
    """Returns a finding without a problem."""
    return Finding(check, Status.OK, found)


def warning(check: str, found: str, fix: str) -> Finding:
    """Returns a problem that does not stop a run."""
    return Finding(check, Status.WARNING, found, fix)


def error(check: str, found: str, fix: str) -> Finding:
    """Returns a problem that stops a run."""
    return Finding(check, Status.ERROR, found, fix)


def _usable(found: Sequence[Interface]) -> list[Interface]:
    return [interface for interface in found if interface.is_up and not interface.is_loopback]


def check_loopback(problems: Mapping[str, str]) -> Finding:
    """Checks the loopback. `problems`: by address, why a connection to itself failed, "" if it did not."""
    reached = [address for address, problem in problems.items() if not problem]
    # A host with IPv6 alone is usable, so a problem with one family is not an error.
    if not reached:
        address, problem = next(iter(problems.items()))
        fix = "bring the loopback interface up: `ip link set lo up`"
        return error("loopback", f"{address} cannot be reached: {problem}", fix)
    lacking = ((("IPv6" if ":" in address else "IPv4"), problem) for address, problem in problems.items() if problem)
    return ok("loopback", " and ".join(reached) + "".join(f"; no {family} ({problem})" for family, problem in lacking))


def check_interfaces(found: Sequence[Interface], environ: Mapping[str, str], ways: Sequence[str]) -> Finding:
    """Checks the interfaces, and the choice of one for runs on several hosts.

    Args:
        found: all interfaces of this host.
        environ: environment variables, of which ECHELON_INTERFACE is read.
        ways: this host's addresses on its default routes.
    """
    usable = [interface for interface in _usable(found) if interface.addresses]
    listed = "; ".join(f"{interface.name} {', '.join(interface.addresses)}" for interface in usable)
    # A wrong name is an error, since the user asked for that interface.
    if name := environ.get(VARIABLE):
        if name not in [interface.name for interface in usable]:
            names = ", ".join(interface.name for interface in usable) or "none"
            fix = f"set it to one that is up and has an address ({names}), or unset it"
            return error("interfaces", f"{VARIABLE}={name} is not usable", fix)
        return ok("interfaces", f"{listed}. Between hosts: {name}, as {VARIABLE} says")
    # A user who set GLOO_SOCKET_IFNAME or NCCL's may expect that it holds for all connections.
    for variable in TORCH_VARIABLES:
        if environ.get(variable):
            fix = f"set {VARIABLE}, too, to choose it for Echelon's connections"
            return warning(
                "interfaces", f"{listed}. {variable}={environ[variable]} applies to torch's connections only", fix
            )
    # Only warnings from here on: a run on this host alone needs the loopback only.
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
    # Debian's /etc/hosts has 127.0.1.1 for the host's own name: no problem here, but for ranks on other hosts.
    if all(map(is_loopback, addresses)):
        found += " here: loopback. Other hosts need another address, which is then used here, too"
    return ok("host name", found)


MIN_MTU = 1280  # bytes; IPv6 allows no less on a link (RFC 8200)


def check_mtu(found: Sequence[Interface]) -> Finding:
    """Checks the MTU (greatest packet) of the interfaces."""
    usable = _usable(found)
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
    # A job derives its port from its name, so that all ranks compute the same one. Linux may have given it away.
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


FEW_FILES = 1024  # descriptors; a rank needs one for each other rank, and a few for each rank of its host
TOO_FEW_FILES = 64
ENOUGH_LOCKED = 64 << 20  # bytes; drivers of GPUs and RDMA lock at least as much
UNLIMITED = -1  # RLIM_INFINITY


def check_shared_memory(obstacle: str, *, is_wanted: bool) -> Finding:
    """Checks shared memory. `obstacle`: why it cannot be used, "" if it can; `is_wanted`: ECHELON_BACKEND=shm."""
    if obstacle and is_wanted:
        return error("shared memory", obstacle, "unset ECHELON_BACKEND=shm: ranks of this host then use TCP")
    if obstacle:
        fix = "nothing has to be done: ranks of this host use TCP, which is slower; do not ask for backend='shm'"
        return warning("shared memory", obstacle, fix)
    return ok("shared memory", "ranks of this host share memory")


def check_secret_file(problem: str) -> Finding:
    """Checks the secret file. `problem`: why ranks of this host could not share one, "" if they could."""
    if problem:
        # The error of the secret's file has its own advice behind the colon.
        what, _, fix = problem.partition(": ")
        return error("secret", what, fix)
    return ok("secret", "ranks of this host can share one in a file of this user's alone")


def check_pidfd(problem: str) -> Finding:
    """Checks pidfd. `problem`: why the end of a process cannot be watched, "" if it can."""
    if problem:
        fix = "use Linux 5.3 or newer, and let the container's seccomp rules pass pidfd_open"
        return error("pidfd", f"the death of a rank cannot be watched: {problem}", fix)
    return ok("pidfd", "the death of a rank is noticed at once")


def check_open_files(soft: int, hard: int) -> Finding:
    """Checks the limits on open files and sockets of a process; -1 is unlimited."""
    found = f"{_amount(soft)}, can be raised to {_amount(hard)}"
    if soft == UNLIMITED or soft >= FEW_FILES:
        return ok("open files", found)
    fix = f"raise it before the run: `ulimit -n {FEW_FILES if hard == UNLIMITED else min(hard, 65536)}`"
    if soft < TOO_FEW_FILES:
        return error("open files", found, fix)
    return warning("open files", f"{found}: too few for hundreds of ranks", fix)


def check_locked_memory(soft: int, *, has_gpu: bool) -> Finding:
    """Checks the limit on locked memory in bytes; -1 is unlimited."""
    found = _amount(soft, " bytes")
    if soft != UNLIMITED and soft < ENOUGH_LOCKED and has_gpu:
        return warning("locked memory", found, "NCCL over InfiniBand needs more: `ulimit -l unlimited`")
    return ok("locked memory", found if has_gpu else f"{found}; matters only for GPUs and RDMA")


def check_clock(*, is_synchronised: bool | None, year: int) -> Finding:
    """Checks the clock of this host. `is_synchronised`: None if the kernel does not know."""
    # A host without a battery begins in 1970.
    if year < 2024:
        return error("clock", f"it is {year} here", "set the clock: certificates and recorded timelines go by it")
    if is_synchronised is False:
        fix = "for runs on several hosts, start chrony or systemd-timesyncd, so that their timelines can be compared"
        return warning("clock", "not synchronised with others", fix)
    return ok("clock", "synchronised" if is_synchronised else "set; the kernel does not say whether synchronised")


def _amount(limit: int, unit: str = "") -> str:
    return "unlimited" if limit == UNLIMITED else f"{limit}{unit}"


def check_torch(version: str, *, has_distributed: bool, lacking: tuple[str, ...]) -> Finding:
    """Checks torch: its version such as "2.13.0+cpu", torch.distributed, and the private names that it lacks."""
    if not has_distributed:
        return error(
            "torch", f"{version}, without torch.distributed", "install a build that has it, as PyPI's for Linux"
        )
    # The text of the error that a run would raise.
    if found := _torch_versions.problem(version, lacking):
        return error("torch", found, _torch_versions.fix())
    newest = _torch_versions.TRIED[-1]
    if _torch_versions.release(version) > _torch_versions.release(newest):
        return ok("torch", f"{version}; {newest} is the newest that was tried")
    return ok("torch", version)


def check_threads(num_threads: int, num_cores: int, num_local_ranks: int) -> Finding:
    """Checks torch's threads per rank against the cores that this process may use."""
    found = f"{num_threads} a rank, {num_cores} cores"
    # One thread per rank is no mistake, even if there are more ranks than cores.
    if num_threads * num_local_ranks > max(num_cores, num_local_ranks):
        share = max(1, num_cores // num_local_ranks)
        fix = f"start ranks with OMP_NUM_THREADS={share}: more threads than cores wait for each other"
        return warning("threads", f"{found}, {num_local_ranks} ranks on this host", fix)
    return ok("threads", found)


def check_gpu(cuda: str | None, devices: Sequence[str], problem: str, *, has_driver: bool) -> Finding:
    """Checks the GPUs.

    Args:
        cuda: CUDA version of torch's build; None: a build without CUDA.
        devices: names of the GPUs that torch sees.
        problem: why a GPU could not be used; "" if all could.
        has_driver: whether NVIDIA's driver is loaded.
    """
    if problem:
        fix = "repair the driver (`nvidia-smi` shows it), or hide the GPU by CUDA_VISIBLE_DEVICES"
        return error("GPU", f"{', '.join(devices) or 'none usable'}: {problem}", fix)
    if has_driver and cuda is None:
        return warning("GPU", "torch is built without CUDA", "install a build for CUDA to use this host's GPUs")
    if has_driver and not devices:
        return warning("GPU", "none visible", "check CUDA_VISIBLE_DEVICES, and that torch's CUDA fits the driver")
    return ok("GPU", f"{', '.join(devices)} (CUDA {cuda})" if devices else "none; ranks use the CPU")


def check_nccl(version: str | None, num_gpus: int, *, is_wanted: bool) -> Finding:
    """Checks NCCL. `version`: None if torch lacks it; `is_wanted`: ECHELON_BACKEND=nccl is set."""
    if is_wanted and (version is None or not num_gpus):
        found = "torch is built without it" if version is None else "there is no GPU for it"
        return error("NCCL", found, "unset ECHELON_BACKEND=nccl, or run where torch has NCCL and a GPU")
    if num_gpus and version is None:
        fix = "install a build of torch with NCCL; until then GPU tensors need ECHELON_ENABLE_GPU_FALLBACK=1"
        return warning("NCCL", "torch is built without it", fix)
    return ok("NCCL", version or "none, and no GPU")
