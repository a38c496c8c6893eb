"""Names of the backends that stand for engines of torch.distributed. Importing it needs no torch. Pure."""

from __future__ import annotations

from collections.abc import Mapping

ENGINES: Mapping[str, Mapping[str, str]] = {
    "gloo": {"cpu": "gloo"},
    "nccl": {"cpu": "gloo", "cuda": "nccl"},
    "mpi": {"cpu": "mpi"},
    "ucc": {"cpu": "ucc", "cuda": "ucc"},
}
"""For each name of a backend: the engine that moves the tensors of a device type."""

MESSAGES: Mapping[str, frozenset[str]] = {"nccl": frozenset({"cuda"}), "ucc": frozenset({"cuda"})}
"""For each name of a backend: the device types whose tensors its engine moves between two ranks. Others go over TCP."""
