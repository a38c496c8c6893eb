"""Checks of shared memory, descriptors, clock, torch and GPUs, from facts that the probes found. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from echelon import _torch_versions
from echelon.doctor.finding import Finding, error, ok, warning

FEW_FILES = 1024
"""Descriptors. A rank needs one for each other rank, and a few for each rank of its host."""
TOO_FEW_FILES = 64
ENOUGH_LOCKED = 64 << 20
"""Bytes. Least amount that drivers of GPUs and RDMA lock."""
UNLIMITED = -1


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
    if found := _torch_versions.problem(version, lacking):
        return error("torch", found, _torch_versions.fix())
    newest = _torch_versions.TRIED[-1]
    if _torch_versions.release(version) > _torch_versions.release(newest):
        return ok("torch", f"{version}; {newest} is the newest that was tried")
    return ok("torch", version)


def check_threads(num_threads: int, num_cores: int, num_local_ranks: int) -> Finding:
    """Checks torch's threads per rank against the cores that this process may use."""
    found = f"{num_threads} a rank, {num_cores} cores"
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
