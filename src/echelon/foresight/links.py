"""Collectives and messages between ranks of this machine, timed over each of its networks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

import echelon.interop.torch_distributed  # noqa: F401 # registers the backend
from echelon.foresight.play.device import Curve
from echelon.launch.spawn import spawn

BACKENDS = {"shared-memory": "shm", "loopback": "tcp"}
"""Backends by the network that they are for ranks of one host."""
_RANKS = (2, 4)
_BYTES = (8, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_FAR = 64 << 20
"""Bytes of the tensors that take turns: more than the caches of a core, as in a training step."""
_SECONDS = 0.08
"""Time in which a collective is called again and again."""

Act = Callable[[Tensor], object]


def links(cores: int) -> dict[str, dict[str, Curve]]:
    """Returns the curves of each network, by kind and number of ranks, such as "all_reduce 2": (bytes, seconds).

    The seconds are those of a processor that each rank has for itself. Ranks that share processors take longer by that.
    """
    return {name: _link(backend, cores) for name, backend in BACKENDS.items()}


def _link(backend: str, cores: int) -> dict[str, Curve]:
    found = {}
    for num_ranks in _RANKS:
        share = min(1.0, cores / num_ranks)
        for kind, points in spawn(_timed, num_ranks, backend=backend)[0].items():
            found[f"{kind} {num_ranks}"] = tuple((size, seconds * share) for size, seconds in points)
    return found


def _timed() -> dict[str, Curve]:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:echelon")
    try:
        return {kind: tuple(_point(act, size) for size in _BYTES) for kind, act in _acts().items()}
    finally:
        dist.destroy_process_group()


def _acts() -> Mapping[str, Act]:
    size, rank = dist.get_world_size(), dist.get_rank()

    def all_gather(whole: Tensor) -> None:
        dist.all_gather_into_tensor(whole, whole[: len(whole) // size])

    def reduce_scatter(whole: Tensor) -> None:
        dist.reduce_scatter_tensor(whole[: len(whole) // size], whole)

    def message(tensor: Tensor) -> None:
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    acts: dict[str, Act] = {
        "all_reduce": dist.all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
    }
    return {**acts, "message": message} if size == 2 else acts


def _point(act: Act, size: int) -> tuple[float, float]:
    """Returns the bytes of the whole array, and the seconds of a call: the first quartile, as others only disturb."""
    tensors = [torch.ones(max(dist.get_world_size(), size // 4)) for _ in range(max(1, min(16, _FAR // size)))]
    turns = []
    for tensor in tensors:
        act(tensor)
    num_turns = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        begin = time.perf_counter()
    for tensor in tensors[:4]:
        act(tensor)
    if dist.get_rank() == 0:
        num_turns += max(5, int(_SECONDS / (time.perf_counter() - begin) * len(tensors[:4])))
    dist.broadcast(num_turns, 0)
    for tensor, _ in zip(cycle(tensors), range(int(num_turns.item())), strict=False):
        begin = time.perf_counter()
        act(tensor)
        turns.append(time.perf_counter() - begin)
    return float(size), statistics.quantiles(turns, n=4)[0] / (2 if act.__name__ == "message" else 1)
