"""Names of the backends that use engines of torch.distributed, and a check that the engines are available.

Importing it needs no torch: commands read the names, and torch takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Mapping

from echelon.errors import LaunchError

ENGINES: Mapping[str, Mapping[str, str]] = {
    "gloo": {"cpu": "gloo"},
    "nccl": {"cpu": "gloo", "cuda": "nccl"},  # NCCL takes no tensors on the CPU
    "mpi": {"cpu": "mpi"},
    "ucc": {"cpu": "ucc", "cuda": "ucc"},
}
"""By name of a backend: the engine (c10d backend) for tensors of each device type."""

MESSAGES: Mapping[str, frozenset[str]] = {"nccl": frozenset({"cuda"}), "ucc": frozenset({"cuda"})}
"""By name of a backend: the device types whose messages go by the engine. Other messages go over TCP."""

TIMED = frozenset({"gloo", "nccl"})
"""Backends all of whose engines take a timeout."""


def check_available(name: str) -> None:
    """Raises LaunchError if an engine of a backend, or the GPU that it needs, is missing here."""
    # Late, for commands that need the names alone.
    import torch
    import torch.distributed as dist

    for engine in ENGINES[name].values():
        if not getattr(dist, f"is_{engine}_available")():
            instead = "" if engine == "gloo" else ", or use backend='gloo'"
            raise LaunchError(
                f"backend={name!r} needs {engine}, which torch {torch.__version__} was built without: "
                f"install a build of torch that has it{instead}"
            )
    if "cuda" in ENGINES[name] and not torch.cuda.is_available():
        raise LaunchError(
            f"backend={name!r} moves CUDA tensors, but torch {torch.__version__} sees no GPU here: "
            "check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use backend='gloo'"
        )
