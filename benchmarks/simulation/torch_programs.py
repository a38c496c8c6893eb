"""How long do unmodified programs on torch.distributed take on simulated ranks, and how much memory?

    python benchmarks/simulation/torch_programs.py           # two minutes
    python benchmarks/simulation/torch_programs.py --quick   # without 256 ranks, and with 100 seeds

The time is that of the whole `simulate` call, after imports and one simulation of two ranks; the median of three, but
one alone for 256 ranks and for the seeds. The CPU time is that of the process: where the machine is shared, look at
that. Memory is measured in processes of their own: the peak beyond the memory after imports and one simulation of two
ranks.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import echelon

sys.path.append(str(Path(__file__).parents[1]))
from harness import options_of, print_environment, print_head, print_row

REPETITIONS = 3
SEEDS = 1000
SIMULATIONS = 50
"""Simulations after which memory is left or not."""


# The programs


def small_fsdp() -> float:
    """Trains 4 layers of 64 for 3 steps, sharded over all ranks."""
    return train(sharded(layers_of(64, 4)), steps=3, width=64)


def fsdp_of_a_million() -> float:
    return train(sharded(layers_of(500, 4)), steps=2, width=500)


def ddp_of_a_million() -> float:
    dist.init_process_group("gloo")
    return train(nn.parallel.DistributedDataParallel(layers_of(500, 4)), steps=2, width=500)


def small_ddp() -> str:
    """Takes a step of DDP with 3 layers of 48. Returns a digest of the weights."""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(layers_of(48, 3))
    train(model, steps=1, width=48)
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()


def gpt2() -> float:
    """Trains transformers' GPT-2 with 2 layers for 2 steps: tensor parallel over 2 ranks, sharded over the others."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    config = GPT2Config(
        vocab_size=256,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    model = GPT2LMHeadModel(config)
    for block in model.transformer.h:
        # torch's plans know Linear, not the Conv1D of GPT-2, whose weight is transposed.
        block.mlp.c_fc, block.mlp.c_proj = linear(block.mlp.c_fc), linear(block.mlp.c_proj)
        parallelize_module(block, mesh["tp"], {"mlp.c_fc": ColwiseParallel(), "mlp.c_proj": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for _ in range(2):
        text = torch.randint(256, (2, 32), generator=generator)
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    return float(loss.detach())


def linear(convolution: nn.Module) -> nn.Linear:
    weight, bias = convolution.weight, convolution.bias
    made = nn.Linear(*weight.shape)
    with torch.no_grad():
        made.weight.copy_(weight.t())
        made.bias.copy_(bias)
    return made


def layers_of(width: int, number: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(number)))


def sharded(model: nn.Sequential) -> nn.Module:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, steps: int, width: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.full((8, width), dist.get_rank() + 1.0)).square().mean()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
    return float(loss.detach())


# Time


class Taken(NamedTuple):
    """Seconds of a simulation."""

    wall: float
    cpu: float


def taken(act: Callable[[], object]) -> Taken:
    cpu, wall = time.process_time(), time.perf_counter()
    act()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def print_time(name: str, ranks: int, goal: float, runs: Sequence[Taken]) -> None:
    wall, cpu = (statistics.median(each) for each in zip(*runs, strict=True))
    print_row(name, ranks, f"{wall:.2f}", f"{cpu:.2f}", f"{goal:g}")


def times(quick: bool) -> None:
    print_head("program | ranks | seconds | CPU seconds | goal")
    echelon.simulate(small_fsdp, 2)
    goals = {4: 0.3, 16: 1.2, 64: 5.0} if quick else {4: 0.3, 16: 1.2, 64: 5.0, 256: 25.0}
    for ranks, goal in goals.items():
        runs = [
            taken(lambda ranks=ranks: echelon.simulate(small_fsdp, ranks))
            for _ in range(1 if ranks > 64 else REPETITIONS)
        ]
        print_time("FSDP2, 4 layers of 64, 3 steps", ranks, goal, runs)
    echelon.simulate(gpt2, 4)
    runs = [taken(lambda: echelon.simulate(gpt2, 16)) for _ in range(REPETITIONS)]
    print_time("GPT-2, 2 layers, FSDP2 x TP, 2 steps", 16, 1.5, runs)
    digests: set[str] = set()
    count = SEEDS // 10 if quick else SEEDS

    def all_seeds() -> None:
        for seed in range(count):
            digests.update(echelon.simulate(small_ddp, 4, seed=seed).results)

    echelon.simulate(small_ddp, 4)
    print_time(f"DDP, 3 layers of 48, 1 step, {count:,} seeds", 4, 60.0 * count / SEEDS, [taken(all_seeds)])
    print(
        f"\nall seeds and ranks have {'the same bits' if len(digests) == 1 else f'{len(digests)} different results'}\n"
    )


# Memory


def measured_here(name: str) -> None:
    """Prints the bytes that a simulation takes beyond one of two ranks. With the name "left": bytes left after many."""
    if name == "left":
        for _ in range(2):
            gc.collect()
            before, objects = heap(), len(gc.get_objects())
            for _ in range(SIMULATIONS // 2):
                echelon.simulate(small_fsdp, 4)
                echelon.simulate(small_ddp, 4)
        gc.collect()
        print(heap() - before, len(gc.get_objects()) - objects)  # of the second time
        return
    program = globals()[name]
    echelon.simulate(program, 2)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from now on
    before = memory("VmRSS")
    echelon.simulate(program, 64)
    print(memory("VmHWM") - before)


def memory(field: str) -> int:
    """Returns the resident bytes of this process, now or at most, by the field's name in /proc/self/status."""
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024


class Heap(ctypes.Structure):
    """The answer of glibc's `mallinfo2`."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in _names.split()]


def heap() -> int:
    """Returns the bytes that this process has allocated and not freed. Resident memory also has holes between them."""
    ask = ctypes.CDLL("libc.so.6").mallinfo2
    ask.restype = Heap
    answer = ask()
    return answer.uordblks + answer.hblkhd


def memory_of(name: str) -> list[int]:
    command = [sys.executable, __file__, "--memory", name]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    return [int(number) for number in output.split()]


def memories() -> None:
    print_head("memory | ranks | MiB | goal")
    for name, program in (("FSDP2", "fsdp_of_a_million"), ("DDP", "ddp_of_a_million")):
        print_row(f"{name}, 1 M parameters, AdamW: peak", 64, f"{memory_of(program)[0] / 2**20:,.0f}", "2,048")
    num_bytes, num_objects = memory_of("left")
    left = f"left by {SIMULATIONS} simulations of the small programs, after as many"
    print_row(f"{left}: {num_objects} Python objects, and", 4, f"{num_bytes / 2**20:.2f}", "0")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        measured_here(sys.argv[2])
    else:
        parser = options_of(__doc__)
        parser.add_argument("--quick", action="store_true", help="without 256 ranks, and with 100 seeds")
        options = parser.parse_args()
        print_environment()
        times(options.quick)
        memories()
