"""Whether torch is one that Echelon can use, and what it can use itself."""

from __future__ import annotations

from collections.abc import Sequence

from echelon import _torch_versions
from echelon.doctor.finding import Finding, error, ok, warning


def check_torch(version: str, *, has_distributed: bool, lacking: tuple[str, ...]) -> Finding:
    """Judges torch's version, as "2.13.0+cpu", whether it has torch.distributed, and which private names it lacks."""
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
    """Judges torch's threads in each rank of this host, beside the cores that this process may use."""
    found = f"{num_threads} a rank, {num_cores} cores"
    if num_threads * num_local_ranks > max(num_cores, num_local_ranks):
        share = max(1, num_cores // num_local_ranks)
        fix = f"start ranks with OMP_NUM_THREADS={share}: more threads than cores wait for each other"
        return warning("threads", f"{found}, {num_local_ranks} ranks on this host", fix)
    return ok("threads", found)


def check_gpu(cuda: str | None, devices: Sequence[str], problem: str, *, has_driver: bool) -> Finding:
    """Judges the GPUs.

    Args:
        cuda: the version that torch was built for, None for a build without.
        devices: their names, as torch has them.
        problem: why one of them could not be used, "" if all could.
        has_driver: whether this host has NVIDIA's driver.
    """
    if problem:
        fix = "mend the driver (`nvidia-smi` shows it), or hide the GPU by CUDA_VISIBLE_DEVICES"
        return error("GPU", f"{', '.join(devices) or 'none usable'}: {problem}", fix)
    if has_driver and cuda is None:
        return warning("GPU", "torch is built without CUDA", "install a build for CUDA to use this host's GPUs")
    if has_driver and not devices:
        return warning("GPU", "none visible", "check CUDA_VISIBLE_DEVICES, and that torch's CUDA fits the driver")
    return ok("GPU", f"{', '.join(devices)} (CUDA {cuda})" if devices else "none; ranks use the CPU")


def check_nccl(version: str | None, num_gpus: int, *, is_wanted: bool) -> Finding:
    """Judges NCCL: its version, None if torch lacks it. is_wanted: ECHELON_BACKEND says so."""
    if is_wanted and (version is None or not num_gpus):
        found = "torch is built without it" if version is None else "there is no GPU for it"
        return error("NCCL", found, "unset ECHELON_BACKEND=nccl, or run where torch has NCCL and a GPU")
    if num_gpus and version is None:
        fix = "install a build of torch with NCCL; until then GPU tensors need ECHELON_ENABLE_GPU_FALLBACK=1"
        return warning("NCCL", "torch is built without it", fix)
    return ok("NCCL", version or "none, and no GPU")
