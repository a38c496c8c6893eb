"""On which device a rank is to have its tensors."""

from __future__ import annotations

import torch

from echelon.backends.torch_distributed.engines import check_available
from echelon.backends.torch_distributed.names import ENGINES
from echelon.errors import LaunchError


def choose_device(name: str, backend: str, local_rank: int) -> torch.device:
    """Returns the device of a rank.

    Args:
        name: "auto": a GPU of its own where the backend's collectives take tensors of GPUs, else the CPU; or "cpu",
            "cuda" (the GPU with the number of the rank on its host), "cuda:1".
        backend: its name.
        local_rank: this rank's number on its host.

    Raises:
        LaunchError: there is no such device, or no such backend here.
    """
    if backend in ENGINES:
        check_available(backend)
    if name == "auto":
        name = "cuda" if "cuda" in ENGINES.get(backend, ()) else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LaunchError(f"device={name!r} is unknown: use 'auto', 'cpu', 'cuda' or 'cuda:0'") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise LaunchError(f"device={name!r} is not supported: use 'auto', 'cpu', 'cuda' or 'cuda:0'")
    count, index = torch.cuda.device_count(), local_rank if device.index is None else device.index
    if index >= count:
        raise LaunchError(
            f"device={name!r}: rank {local_rank} of this host would have GPU {index}, but torch sees {count}: start at "
            "most as many ranks as there are GPUs, or name one by device='cuda:0'"
        )
    return torch.device("cuda", index)
