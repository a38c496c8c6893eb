"""Does a simulation with measured costs predict how long steps take on real processes?

    python benchmarks/prediction/run.py            # all links
    python benchmarks/prediction/run.py shm        # or some of: shm, loopback, shaped

Two ranks, one thread each. First two real processes measure their link, what computing alone takes, by how much moving
bytes slows it down, and the steps. Then the same steps are simulated with these figures and with the CPU time that they
take here, times a factor: what computing alone took both processes at once, over the CPU time that it takes here. Over
shared memory collectives are no messages: there the link of DDP is the one on which the plan of an all-reduce takes as
long as a real all-reduce did. Where this user may make network namespaces (as root, with ip and tc), the same again
over a link that tc has shaped to 1 Gbit/s.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import secrets
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import echelon
from echelon import ProcessGroup
from echelon.pipeline import Pipeline
from echelon.simulation import Measured

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import loss_of, make_gpt

WARM_UP, STEPS, ROUNDS = 2, 9, 3
CONTEXT, SAMPLES = 64, 8
MESSAGE = 1 << 20
"""Bytes of a message by which bandwidth is measured: a bucket of DDP's."""
NAMESPACES, NETWORK = ("echelon-a", "echelon-b"), ("10.231.77.1", "10.231.77.2")
FIGURES = "figures: "


def model() -> torch.nn.Sequential:
    return make_gpt(num_layers=4, width=128, num_heads=4, context=CONTEXT)


def batch(group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(group.rank)
    text = torch.randint(256, (SAMPLES, CONTEXT + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def timed(group: ProcessGroup, step: Callable[[], object], count: int = WARM_UP + STEPS) -> list[float]:
    """Returns how long each step took, on the clock of the group's backend: virtual on simulated ranks."""
    seconds = []
    for _ in range(count):
        group.barrier()
        began = group.backend.now()
        step()
        seconds.append(group.backend.now() - began)
    return seconds[WARM_UP:]


def local_steps(group: ProcessGroup) -> list[float]:
    """Times what a rank of data parallelism computes, without its communication."""
    torch.set_num_threads(1)
    inputs, target = batch(group)
    alone = model()
    return timed(group, lambda: loss_of(alone(inputs), target).backward())


def ddp_steps(group: ProcessGroup) -> list[float]:
    torch.set_num_threads(1)
    inputs, target = batch(group)
    ddp = echelon.DDP(model(), group, bucket_mb=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(ddp(inputs), target).backward()
        optimizer.step()

    return timed(group, step)


def pipeline_steps(group: ProcessGroup) -> list[float]:
    torch.set_num_threads(1)
    inputs, target = batch(group)
    pipe = Pipeline(model(), group, "1f1b", 4, loss_of)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        pipe.step(inputs, target=target)
        optimizer.step()

    return timed(group, step)


PROGRAMS = {"DDP": ddp_steps, "pipeline, 1f1b, 4 microbatches": pipeline_steps}


def exchange(group: ProcessGroup, tensor: torch.Tensor) -> None:
    sent = group.isend(tensor, 1 - group.rank)
    group.recv(1 - group.rank)
    sent.wait()


def all_reduce(group: ProcessGroup, tensor: torch.Tensor) -> None:
    group.all_reduce(tensor)


class Link(NamedTuple):
    """A way between two processes."""

    name: str
    backend: str
    moves: Mapping[str, Callable[[ProcessGroup, torch.Tensor], None]]
    """For each program, that by which its link is measured: each rank sends and receives a tensor's bytes once."""
    prefixes: Sequence[Sequence[str]] = ((), ())
    """What comes before the command of each process."""
    address: str = "127.0.0.1"


MESSAGES = dict.fromkeys(PROGRAMS, exchange)
SHARED_MEMORY = Link("shared memory", "shm", MESSAGES | {"DDP": all_reduce})
LOOPBACK = Link("loopback TCP", "tcp", MESSAGES)


def rounds_of(move: Callable[[ProcessGroup, torch.Tensor], None], num_bytes: int) -> float:
    """Returns how many latencies one move takes a simulated rank."""

    def once(group: ProcessGroup) -> float:
        return timed(group, lambda: move(group, torch.zeros(num_bytes // 4)))[0]

    return float(echelon.simulate(once, 2, network=echelon.Network(1.0, math.inf)).results[0])


def link_figures(
    group: ProcessGroup, move: Callable[[ProcessGroup, torch.Tensor], None], rounds: Mapping[str, float]
) -> dict[str, float]:
    """Returns latency and bandwidth, both ranks sending at once, and overhead.

    Args:
        group: two ranks.
        move: has each send a tensor's bytes.
        rounds: how many latencies that takes a simulated rank, for a small tensor and a large one.
    """

    def median(num_bytes: int, count: int) -> float:
        tensor = torch.zeros(num_bytes // 4)
        return statistics.median(timed(group, lambda: move(group, tensor), count))

    latency = median(4, 400) / rounds["small"]
    seconds = median(MESSAGE, 60) - latency * rounds["large"]
    return {"latency": latency, "bandwidth": MESSAGE / seconds, "overhead": overhead(group, move, seconds)}


def overhead(group: ProcessGroup, move: Callable[[ProcessGroup, torch.Tensor], None], seconds: float) -> float:
    """Returns the seconds by which a byte that comes or goes makes computing longer.

    Args:
        group: two ranks.
        move: has each send a tensor's bytes.
        seconds: what it takes.
    """
    inputs, target = batch(group)
    alone = model()
    message = torch.zeros(MESSAGE // 4)

    def compute() -> None:
        for _ in range(3):
            loss_of(alone(inputs), target).backward()

    without = statistics.median(timed(group, compute, 7))
    # As many messages as fill two thirds of the time, the same number on both ranks.
    count = int(str(group.broadcast_object(max(1, int(without / seconds * 2 / 3)))))

    def beside() -> None:
        for _ in range(count):
            move(group, message)

    def both() -> None:
        moving = group.backend.start(beside, "messages")
        began = group.backend.now()
        compute()
        longer.append(group.backend.now() - began - without)
        moving.wait()

    longer: list[float] = []
    timed(group, both, 9)
    return max(0.0, statistics.median(longer)) / (2 * count * MESSAGE)


def be_a_rank(link: Link, rounds: Mapping[str, Mapping[str, float]]) -> None:
    with echelon.init(backend=link.backend) as group:
        torch.set_num_threads(1)
        moves = dict.fromkeys(link.moves.values())
        measured = {move.__name__: link_figures(group, move, rounds[move.__name__]) for move in moves}
        figures: dict[str, Any] = {"links": measured, "local": local_steps(group)}
        figures |= {name: program(group) for name, program in PROGRAMS.items()}
        if group.rank == 0:
            print(FIGURES + json.dumps(figures))


def run_processes(link: Link) -> dict[str, Any]:
    """Runs this file on two processes, and returns what rank 0 printed."""
    rounds = {
        move.__name__: {"small": rounds_of(move, 4), "large": rounds_of(move, MESSAGE)} for move in link.moves.values()
    }
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": link.address,
        "MASTER_PORT": str(20_000 + os.getpid() % 10_000),
        "ECHELON_SECRET": secrets.token_hex(16),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [*prefix, sys.executable, __file__, "--rank", link.backend, json.dumps(rounds)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, prefix in enumerate(link.prefixes)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    (line,) = [line for line in outputs[0].splitlines() if line.startswith(FIGURES)]
    figures: dict[str, Any] = json.loads(line.removeprefix(FIGURES))
    return figures


@contextlib.contextmanager
def shaped_link() -> Iterator[list[list[str]] | None]:
    """Makes two network namespaces with a link of 1 Gbit/s; yields how to run a command in each, None if it cannot."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)

    try:
        for name in NAMESPACES:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "ech-a",
            "netns",
            NAMESPACES[0],
            "type",
            "veth",
            "peer",
            "name",
            "ech-b",
            "netns",
            NAMESPACES[1],
        )
        for name, device, address in zip(NAMESPACES, ("ech-a", "ech-b"), NETWORK, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            # As a network card does: what leaves is cut into packets behind the queue, not by this machine's cores.
            ip("-n", name, "link", "set", "dev", device, "gso_max_size", "32768")
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
            shape = [
                "tc",
                "qdisc",
                "add",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                "1gbit",
                "burst",
                "64kb",
                "latency",
                "50ms",
            ]
            ip("netns", "exec", name, *shape)
        yield [["ip", "netns", "exec", name] for name in NAMESPACES]
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        print(f"\nno shaped link: {error}")
        yield None
    finally:
        if shutil.which("ip"):
            for name in NAMESPACES:
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=10)


def report(link: Link) -> None:
    for _ in range(ROUNDS):
        real = run_processes(link)
        local = statistics.median(echelon.simulate(local_steps, 2, costs="measured").results[0])
        costs = Measured(factor=statistics.median(real["local"]) / local)
        for name, program in PROGRAMS.items():
            network = echelon.Network(**real["links"][link.moves[name].__name__])
            run = echelon.simulate(program, 2, network=network, costs=costs)
            predicted, measured = statistics.median(run.results[0]), statistics.median(real[name])
            print(
                f"| {link.name} | {network.latency * 1e6:.0f} us, {network.bandwidth / 1e6:.0f} MB/s, "
                f"{network.overhead * 1e9:.2f} s/GB | {costs.factor:.2f} | {name} | "
                f"{predicted * 1e3:.1f} | "
                f"{measured * 1e3:.1f} | {predicted / measured:.2f} |",
                flush=True,
            )


def main(links: Sequence[str]) -> None:
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}\n")
    print(
        "| link | measured: latency, bandwidth, overhead | computing takes | step "
        "| predicted (ms) | measured (ms) | ratio |"
    )
    print("|---|---|---|---|---|---|---|")
    if "shm" in links:
        report(SHARED_MEMORY)
    if "loopback" in links:
        report(LOOPBACK)
    if "shaped" in links:
        with shaped_link() as prefixes:
            if prefixes is not None:
                report(Link("TCP at 1 Gbit/s", "tcp", MESSAGES, prefixes, NETWORK[0]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank({"shm": SHARED_MEMORY, "tcp": LOOPBACK}[sys.argv[2]], json.loads(sys.argv[3]))
    else:
        main(sys.argv[1:] or ["shm", "loopback", "shaped"])
