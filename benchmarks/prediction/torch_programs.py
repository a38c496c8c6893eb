"""Does a simulation with measured costs predict the steps of programs on torch.distributed?

    python benchmarks/prediction/torch_programs.py           # all links
    python benchmarks/prediction/torch_programs.py shm       # or some of: shm, loopback, shaped

Programs that know nothing of Echelon but the name of its backend: DDP, FSDP2, and FSDP2 with tensor parallelism, on
two ranks of one thread each. In a round two real processes run each of them, and measure their link by all-reduces:
beside computing for DDP, between computations for the others. Then each program is simulated with this link and the CPU
time that its computing takes here, times a factor: what computing alone took both processes at once, over the CPU time
that it takes here. The ratio is the median of five rounds, because the speed of a shared machine changes by the minute.
Where this user may make network namespaces (as root, with ip), the same again over a link of 1 Gbit/s and 1 ms.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import echelon
from echelon import Network, ProcessGroup
from echelon.interop.torch_distributed import EchelonProcessGroup
from echelon.simulation import Measured

sys.path.extend(
    [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples")]
)
from gpt import loss_of, make_gpt
from harness import options_of, print_environment, print_head, print_row
from links import Move, Moves, Use, all_reduce, all_reduce_by_thread, measure, network_of
from slow_link import LOCAL, Ends, Unavailable, run_ranks, slow_link

LINKS = ("shm", "loopback", "shaped")
MARK = "figures: "
RUNS = 5
"""Rounds of real and simulated runs of each program. The median of their ratios counts."""
WARM_UP, STEPS = 3, 8
CONTEXT, SAMPLES, WIDTH = 64, 8, 128
SIZES = (1 << 16, 1 << 20)
"""Bytes of the all-reduces that measure the link."""
PAIRS = 3
"""Measurements of computing without moves and with them in each run, in turns."""

Clock = Callable[[], float]


# The programs. Their only argument is a clock: real seconds, or virtual ones.


def main(name: str, now: Clock) -> float:
    """Returns the median seconds of a program's steps."""
    dist.init_process_group("echelon")
    seconds = steps_of(PROGRAMS[name].make(), now)
    dist.destroy_process_group()
    return seconds


def steps_of(model: nn.Module, now: Clock) -> float:
    """Returns the median seconds of a training step."""
    step = training_step(model)
    dist.barrier()
    times = [now()]
    for _ in range(WARM_UP + STEPS):
        step()
        times.append(now())
    return statistics.median(end - start for start, end in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False))


def training_step(model: nn.Module) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (SAMPLES, CONTEXT + 1), generator=generator)
    inputs, target = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(inputs), target).backward()
        optimizer.step()

    return step


def alone() -> nn.Sequential:
    """Returns the model without communication."""
    return make_gpt(num_layers=4, width=WIDTH, num_heads=4, context=CONTEXT)


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(alone(), bucket_cap_mb=1)


def fsdp() -> nn.Module:
    model, mesh = alone(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp_and_tensor_parallel() -> nn.Module:
    """Returns the model with its feed-forward layers split over both ranks, each part sharded over one rank."""
    model = alone()
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    plan = {"feed_forward_in": ColwiseParallel(), "feed_forward_out": RowwiseParallel()}
    for name, layer in model.named_children():
        if name.startswith("block"):
            parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def piece_of_computing() -> Callable[[], None]:
    """Returns the forward of a block, about as much as FSDP2 computes between two collectives."""
    block, activations = alone()[1], torch.randn(SAMPLES, CONTEXT, WIDTH)
    return lambda: block(activations).detach_()


class Program(NamedTuple):
    """Program whose step is predicted."""

    make: Callable[[], nn.Module]
    """Makes its model."""
    use: Use = "between"
    """How it communicates: FSDP2 on the CPU waits for most of its collectives."""
    move: Move = all_reduce
    """Move that measures the link for it. The collectives of DTensor are asynchronous, and it waits for them."""


PROGRAMS = {
    "alone": Program(alone),
    "DDP": Program(ddp, use="beside"),
    "FSDP2": Program(fsdp),
    "FSDP2 x TP": Program(fsdp_and_tensor_parallel, move=all_reduce_by_thread),
}

MOVES = list(dict.fromkeys(program.move for program in PROGRAMS.values()))


# Real ranks


def be_a_rank() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("echelon")
    world = dist.group.WORLD
    assert isinstance(world, EchelonProcessGroup)
    steps = {name: steps_of(program.make(), time.perf_counter) for name, program in PROGRAMS.items()}
    compute, piece = training_step(alone()), piece_of_computing()
    links = {move.__name__: measure(world.group, move, compute, piece, SIZES, PAIRS) for move in MOVES}
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(MARK + json.dumps({"steps": steps, "links": links}))


def run_processes(backend: str, ends: Ends) -> dict[str, Any]:
    """Runs this file on two processes, and returns rank 0's measurements."""
    output, _ = run_ranks(ends, [sys.executable, __file__, "--rank"], {"ECHELON_BACKEND": backend})
    (line,) = [line for line in output.splitlines() if line.startswith(MARK)]
    measured: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return measured


# Simulated ranks


def simulated(name: str, network: Network | None, costs: Measured) -> float:
    """Returns the virtual seconds of a step, by simulation."""

    def program(group: ProcessGroup) -> float:
        return main(name, group.backend.now)

    return float(echelon.simulate(program, 2, network=network, costs=costs).results[0])


class Round(NamedTuple):
    """Predictions of all programs by one measurement of the link, and what they took right before."""

    factor: float
    networks: dict[str, Network]
    measured: dict[str, float]
    predicted: dict[str, float]


def one_round(backend: str, ends: Ends) -> Round:
    real = run_processes(backend, ends)
    moves = {move: [Moves.of(real["links"][move.__name__])] for move in MOVES}
    factor = real["steps"]["alone"] / simulated("alone", None, Measured())
    programs = {name: program for name, program in PROGRAMS.items() if name != "alone"}
    networks = {name: network_of(moves[each.move], each.move, SIZES, each.use) for name, each in programs.items()}
    predicted = {name: simulated(name, networks[name], Measured(factor)) for name in programs}
    return Round(factor, networks, real["steps"], predicted)


def report(link: str, backend: str, ends: Ends = LOCAL) -> list[float]:
    """Prints the rows of a link between two processes. Returns the ratios, each the median of the rounds'."""
    rounds = [one_round(backend, ends) for _ in range(RUNS)]
    factor = statistics.median(each.factor for each in rounds)
    ratios = []
    for name in rounds[0].predicted:
        latency = statistics.median(each.networks[name].latency for each in rounds)
        bandwidth = statistics.median(each.networks[name].bandwidth for each in rounds)
        overhead = statistics.median(each.networks[name].overhead for each in rounds)
        speed = f"{latency * 1e6:.0f} us, {bandwidth / 1e6:.0f} MB/s, {overhead * 1e9:.2f} s/GB"
        predicted = statistics.median(each.predicted[name] for each in rounds)
        measured = statistics.median(each.measured[name] for each in rounds)
        own = sorted(each.predicted[name] / each.measured[name] for each in rounds)
        ratios.append(statistics.median(own))
        figures = f"{predicted * 1e3:.1f}", f"{measured * 1e3:.1f}", f"{ratios[-1]:.2f}"
        print_row(link, speed, f"{factor:.2f}", name, *figures, f"{own[0]:.2f} to {own[-1]:.2f}")
    return ratios


def compare(links: Sequence[str]) -> None:
    print_environment()
    print_head(
        "link | latency, bandwidth, overhead | computing takes | step | predicted (ms) | measured (ms) | ratio | rounds"
    )
    ratios = []
    if "shm" in links:
        ratios += report("shared memory", "shm")
    if "loopback" in links:
        ratios += report("loopback TCP", "tcp")
    if "shaped" in links:
        try:
            with slow_link(bits_per_second=1e9, delay=1e-3) as ends:
                ratios += report("TCP at 1 Gbit/s, 1 ms", "tcp", ends)
        except Unavailable as error:
            print(f"\n{error}")
    print(f"\nwithin 10 percent: {sum(0.9 <= ratio <= 1.1 for ratio in ratios)} of {len(ratios)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank()
    else:
        parser = options_of(__doc__)
        parser.add_argument("links", nargs="*", help=f"some of {', '.join(LINKS)}; all of them if none is given")
        options = parser.parse_args()
        if unknown := set(options.links) - set(LINKS):
            parser.error(f"no link is called {', '.join(sorted(unknown))}")
        compare(options.links or LINKS)
