"""Is the foreseen memory of tensors that of a real run on the processors of this machine?

    python benchmarks/foresee/memory_here.py             # all programs
    python benchmarks/foresee/memory_here.py fsdp gpt    # some of them

Each program runs on real processes. A meter looks at all living tensors after every operation of the last step. Beside
it, torch's profiler tells how much its allocator has given out, temporary memory inside of kernels included.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from here import GPT, LARGE, MLP, WAYS, WIDE, WORKLOADS, Step, Workload, training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import echelon
from echelon._torch_private.tensors import DispatchMode

sys.path.append(str(Path(__file__).parents[1]))
from harness import options_of, print_environment, print_head, print_row

STEPS = 2
MIB = 1 << 20


class Recomputed(nn.Module):
    """A block whose forward is repeated in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def recomputed(model: nn.Sequential) -> nn.Sequential:
    """Returns the model with checkpointing of every layer but the first and the last."""
    first, *blocks, last = model
    return nn.Sequential(first, *map(Recomputed, blocks), last)


def checkpointed_ddp(work: Workload) -> Step:
    return training(nn.parallel.DistributedDataParallel(recomputed(work.make())), work)


def checkpointed_fsdp(work: Workload) -> Step:
    model, mesh = recomputed(work.make()), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return training(fully_shard(model, mesh=mesh), work)


def accumulating(work: Workload) -> Step:
    """DDP with two microbatches, whose gradients are views of its buckets, and SGD with momentum."""
    model = nn.parallel.DistributedDataParallel(work.make(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, target = work.inputs(), work.target()

    def step() -> None:
        with model.no_sync():
            work.loss(model(inputs), target).backward()
        work.loss(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


PROGRAMS: dict[str, Callable[[Workload], Step]] = {
    **WAYS,
    "DDP, checkpointing": checkpointed_ddp,
    "FSDP2, checkpointing": checkpointed_fsdp,
    "DDP, 2 microbatches, SGD": accumulating,
}


class Row(NamedTuple):
    program: str
    workload: str
    ranks: int


ROWS = (
    Row("DDP", LARGE, 1),
    Row("DDP", WIDE, 2),
    Row("DDP, checkpointing", LARGE, 2),
    Row("DDP, 2 microbatches, SGD", GPT, 2),
    Row("FSDP2", WIDE, 2),
    Row("FSDP2", LARGE, 2),
    Row("FSDP2, checkpointing", LARGE, 2),
    Row("TP", MLP, 2),
    Row("TP", LARGE, 2),
    Row("torch GPipe", LARGE, 2),
    Row("torch 1F1B", WIDE, 2),
    Row("Echelon DDP", LARGE, 2),
    Row("Echelon 1f1b", LARGE, 2),
    Row("Echelon zb-h1", WIDE, 2),
)


_BACKENDS = tuple(os.path.join(os.sep, "echelon", name, "") for name in ("backends", "collectives"))


class Meter(DispatchMode):
    """Bytes of all living storages that an operation of this thread has read or made, seen after each operation.

    Buffers inside of collectives do not count, such as the region that ranks share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_in_collective():
            return result
        for tensor in _tensors((args, tuple(kwargs.values()), result)):
            storage = tensor.untyped_storage()
            self._alive[storage._cdata] = storage
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._alive.values()))
        return result


def _is_in_collective() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if any(folder in frame.f_code.co_filename for folder in _BACKENDS):
            return True
        frame = frame.f_back
    return False


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield getattr(value, "_local_tensor", value)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


class Measured(NamedTuple):
    """Most bytes of one rank in the last step."""

    tensors: int
    allocated: int


def main(program: str, workload: str) -> None:
    """Trains: the program that is foreseen."""
    torch.set_num_threads(1)
    dist.init_process_group("echelon")
    step = PROGRAMS[program](WORKLOADS[workload])
    for _ in range(STEPS):
        step()
    dist.destroy_process_group()


def metered(program: str, workload: str) -> int:
    """Trains, and returns the peak of living tensors in the last step."""
    torch.set_num_threads(1)
    dist.init_process_group("echelon")
    with Meter() as meter:
        step = PROGRAMS[program](WORKLOADS[workload])
        for _ in range(STEPS):
            meter.peak = 0
            step()
    dist.destroy_process_group()
    return meter.peak


def profiled(program: str, workload: str) -> int:
    """Trains, and returns the most that torch's allocator has given out in the last step."""
    torch.set_num_threads(1)
    dist.init_process_group("echelon")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = PROGRAMS[program](WORKLOADS[workload])
        for number in range(STEPS):
            with torch.profiler.record_function(f"step {number}"):
                step()
    dist.destroy_process_group()
    events = profiler.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == f"step {STEPS - 1}")
    held, peak = 0, 0
    for event in sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        held += event.nbytes()
        if event.start_ns() >= begin:
            peak = max(peak, held)
    return peak


def compare(rows: Sequence[Row]) -> None:
    """Prints the rows."""
    print_environment("MiB of the rank with the most, in the last of two steps")
    print_head("program | model | ranks | tensors, measured | foreseen | error | allocator, measured | foreseen / it")
    errors = []
    for row in rows:
        args = row.program, row.workload
        tensors = echelon.spawn(metered, row.ranks, args)
        allocated = echelon.spawn(profiled, row.ranks, args)
        foreseen = echelon.foresee(main, row.ranks, args, gpu="cpu", network="shared-memory").live_memory
        worst = max(range(row.ranks), key=lambda rank: abs(foreseen[rank] / tensors[rank] - 1))
        error = foreseen[worst] / tensors[worst] - 1
        errors.append(abs(error))
        figures = (tensors[worst], foreseen[worst], allocated[worst])
        measured, predicted, given = (f"{each / MIB:.2f}" for each in figures)
        ratio = f"{foreseen[worst] / allocated[worst]:.3f}"
        print_row(*row, measured, predicted, f"{error:+.2%}", given, ratio)
    print(f"\nworst error {max(errors):.2%}")


if __name__ == "__main__":
    parser = options_of(__doc__)
    parser.add_argument("words", nargs="*", help="parts of the names of programs and models; all rows if none is given")
    options = parser.parse_args()
    chosen = [row for row in ROWS if all(word.lower() in " ".join(map(str, row)).lower() for word in options.words)]
    if not chosen:
        parser.error(f"no row has {' and '.join(options.words)}")
    compare(chosen)
