"""How long do the small collectives of a training loop take, beside Gloo and Open MPI?

    python benchmarks/shared_memory/steps.py
    python benchmarks/shared_memory/steps.py --ranks 4

Two steps. "all-reduces": 200 tensors of 4 KiB, one all-reduce for each. "batch norm": 50 layers as SyncBatchNorm makes
them communicate. In the forward each computes mean and variance of its activations, gathers them from all ranks and
combines them; in the backward each reduces two sums. Both are also measured without any communication. All contestants
are in the same processes and take turns of changing order. A step counts as that of the slowest rank; the table shows
medians, and medians of the rounds' ratios: above 1 where Echelon is faster.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import echelon
from echelon.bench.mpi import has_mpi4py, join, run_under_mpi

sys.path.append(str(Path(__file__).parents[1]))
from harness import Act, gloo, in_turns, ms, options_of, print_environment, print_head, print_row, ratio

NUM_TENSORS, ELEMENTS = 200, 1024
NUM_LAYERS, CHANNELS, SAMPLES = 50, 64, 128


class Peer(NamedTuple):
    """Two collectives of one contestant, on tensors that stay the same from step to step.

    gather: overwrites the second tensor with the first ones of all ranks, one behind the other.
    """

    name: str
    reduce: Callable[[Tensor], object]
    gather: Callable[[Tensor, Tensor], object]


def peers(group: echelon.ProcessGroup, world: object) -> list[Peer]:
    """Returns the contestants. `world`: COMM_WORLD of an MPI program; None without MPI."""
    found = [
        Peer("Echelon", group.all_reduce, lambda own, out: group.all_gather(own, out=out)),
        Peer("Gloo", dist.all_reduce, lambda own, out: dist.all_gather_single(out, own)),
        Peer("nothing", lambda _: None, lambda _, __: None),
    ]
    if world is not None:
        from mpi4py import MPI

        def reduce(tensor: Tensor) -> None:
            world.Allreduce(MPI.IN_PLACE, tensor.numpy())  # type: ignore[attr-defined]

        def gather(own: Tensor, out: Tensor) -> None:
            world.Allgather(own.numpy(), out.numpy())  # type: ignore[attr-defined]

        found.insert(2, Peer("Open MPI", reduce, gather))
    return found


def all_reduces(peer: Peer, _: int) -> Act:
    """Returns a step of many small all-reduces."""
    tensors = [torch.zeros(ELEMENTS) for _ in range(NUM_TENSORS)]

    def step() -> None:
        for tensor in tensors:
            peer.reduce(tensor)

    return step


def batch_norm(peer: Peer, num_ranks: int) -> Act:
    """Returns the statistics of a forward and a backward of many layers of SyncBatchNorm."""
    activations = [torch.randn(SAMPLES, CHANNELS) for _ in range(NUM_LAYERS)]
    gathered = torch.zeros(num_ranks, 2 * CHANNELS + 1)
    counts = torch.full((1,), float(SAMPLES))

    def step() -> None:
        for values in activations:
            variance, mean = torch.var_mean(values, 0, correction=0)
            peer.gather(torch.cat((mean, variance, counts)), gathered.view(-1))
            gathered[:, :CHANNELS].mean(0)
        for values in reversed(activations):
            peer.reduce(torch.cat((values.sum(0), (values * values).sum(0))))

    return step


STEPS = {f"{NUM_TENSORS} all-reduces of 4 KiB": all_reduces, f"{NUM_LAYERS} layers of batch norm": batch_norm}


def check(group: echelon.ProcessGroup, found: list[Peer]) -> None:
    """Raises AssertionError if a contestant computes something else than the others."""
    num_ranks = group.world_size
    for peer in found:
        total, out = torch.full((ELEMENTS,), group.rank + 1.0), torch.zeros(3 * num_ranks)
        peer.reduce(total)
        peer.gather(torch.full((3,), float(group.rank)), out)
        if peer.name != "nothing":
            assert total.eq(num_ranks * (num_ranks + 1) / 2).all(), peer.name
            assert out.view(num_ranks, 3).eq(torch.arange(num_ranks)[:, None]).all(), peer.name


def measure(group: echelon.ProcessGroup, options: argparse.Namespace, world: object = None) -> None:
    """Measures as one rank. The first one prints."""
    folder = group.broadcast_object(tempfile.mkdtemp() if group.rank == 0 else None)
    with gloo(group, f"{folder}/store"):
        found = peers(group, world)
        check(group, found)
        names = [peer.name for peer in found]
        others = [name for name in names if name not in ("Echelon", "nothing")]
        if group.rank == 0:
            print_head(
                " | ".join(["ranks", "step", *(f"{name}, ms" for name in names), *(f"{n} / Echelon" for n in others)])
            )
        for title, make in STEPS.items():
            acts = {peer.name: make(peer, group.world_size) for peer in found}
            seconds = in_turns(group, acts, options.rounds).seconds
            if group.rank == 0:
                ratios = [f"{ratio(seconds[name], seconds['Echelon']):.2f}" for name in others]
                print_row(group.world_size, title, *(ms(seconds[name]) for name in names), *ratios)
        group.barrier()
    if group.rank == 0:
        shutil.rmtree(folder)


def main() -> int:
    parser = options_of(__doc__, rounds=21, ranks=2)
    parser.add_argument("--without-mpi", action="store_true")
    parser.add_argument("--mpi-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mpi_rank:
        from mpi4py import MPI

        with join(MPI.COMM_WORLD, "shm") as group:
            measure(group, options, MPI.COMM_WORLD)
        return 0
    print_environment(f"{options.ranks} ranks, 1 thread each, float32, medians of {options.rounds} rounds")
    if not options.without_mpi and shutil.which("mpirun") and has_mpi4py():
        return run_under_mpi([*sys.argv, "--mpi-rank"], options.ranks)
    print("without Open MPI: it is not wanted, or there is no mpirun or no mpi4py\n", flush=True)
    echelon.spawn(measure, options.ranks, (options,), backend="shm")
    return 0


if __name__ == "__main__":
    sys.exit(main())
