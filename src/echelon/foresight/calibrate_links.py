"""Collectives and messages between ranks of this machine, timed over each of its networks."""

from __future__ import annotations

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
"""Backend for each network between ranks of one host."""
_RANKS = (1, 2, 4)
_BYTES = (8, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_TURNS = 24
_DISTURBANCE = 8 << 20
"""Bytes that a rank touches before each call: as in a training step, neither data nor code is in the nearest cache."""

Act = Callable[[Tensor], dist.Work | None]


def links(cores: int) -> dict[str, dict[str, Curve]]:
    """Returns the curves of each network, by kind and number of ranks, such as "all_reduce 2": (bytes, seconds).

    The seconds are those of a rank with a processor of its own. Ranks that share processors take longer in proportion.
    """
    return {name: _link(backend, cores) for name, backend in BACKENDS.items()}


def _link(backend: str, cores: int) -> dict[str, Curve]:
    found = {}
    for num_ranks in _RANKS:
        share = min(1.0, cores / num_ranks)
        for kind, points in spawn(_timed, num_ranks, (share,), backend=backend)[0].items():
            found[f"{kind} {num_ranks}"] = points
    return found


def _timed(share: float) -> dict[str, Curve]:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:echelon")
    try:
        acts = _collectives()
        found = {kind: tuple((float(n), _collective(act, n, share)) for n in _BYTES) for kind, act in acts.items()}
        if dist.get_world_size() == 2:
            found["message"] = tuple((float(size), _message(size)) for size in _BYTES)
        return found
    finally:
        dist.destroy_process_group()


def _collectives() -> Mapping[str, Act]:
    size = dist.get_world_size()
    own = torch.ones(max(_BYTES) // 4)

    def all_gather(whole: Tensor) -> None:
        dist.all_gather(list(whole.chunk(size)), whole[: len(whole) // size])

    def reduce_scatter(whole: Tensor) -> None:
        dist.reduce_scatter(own[: len(whole) // size], list(whole.chunk(size)))

    def all_reduce(whole: Tensor) -> dist.Work:
        # Asynchronous as in DDP: the thread that runs it shares the interpreter with the program.
        work: dist.Work | None = dist.all_reduce(whole, async_op=True)
        assert work is not None
        return work

    return {"all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter}


def _tensors(size: int) -> list[Tensor]:
    num_ranks = dist.get_world_size()
    # All ranks have equal parts in all_gather and reduce_scatter.
    elements = max(1, size // 4 // num_ranks) * num_ranks
    # They take turns, so that no call finds its tensor in a near cache.
    return [torch.ones(elements) for _ in range(max(1, min(8, (64 << 20) // size)))]


class _Disturbance:
    """Work between two calls: a step of a small model, and a pass over much memory."""

    def __init__(self) -> None:
        self._model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
        self._memory = torch.ones(_DISTURBANCE // 4)

    def __call__(self) -> float:
        """Does the work, and returns the processor time that it took."""
        begin = time.thread_time()
        self._model(torch.ones(1, 16)).sum().backward()
        self._memory.add_(1.0)
        return time.thread_time() - begin


def _collective(act: Act, size: int, share: float) -> float:
    """Returns the processor seconds by which a collective lengthens a step. Each rank has `share` of a processor.

    They include the waking of ranks that sleep, and the wait for later ranks.
    """
    disturb, tensors, turns = _Disturbance(), cycle(_tensors(size)), []
    for _ in range(_TURNS):
        begin = time.perf_counter()
        work = act(next(tensors))
        own = disturb()
        if work is not None:
            work.wait()
        turns.append((time.perf_counter() - begin) * share - own)
    # A median of differences may be negative, but times of a curve are above 0.
    return max(1e-7, torch.cat(_of_all_ranks(turns)).median().item())


def _message(size: int) -> float:
    """Returns the seconds between the later of send and recv and the end of the receive: half of a round trip."""
    disturb, tensors, turns = _Disturbance(), cycle(_tensors(size)), []
    other = 1 - dist.get_rank()
    for _ in range(_TURNS):
        disturb()
        tensor = next(tensors)
        begin = time.perf_counter()
        if other:
            dist.send(tensor, other)
            dist.recv(tensor, other)
            turns.append(time.perf_counter() - begin)
        else:
            dist.recv(tensor, other)
            own = disturb()
            dist.send(tensor, other)
            turns.append(-own)
    first, second = _of_all_ranks(turns)
    return max(1e-7, (first + second).median().item() / 2)


def _of_all_ranks(turns: list[float]) -> list[Tensor]:
    of_all = [torch.empty(_TURNS) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, torch.tensor(turns))
    return of_all
