"""Does a simulation with measured costs predict how long steps take on real processes?

    python benchmarks/prediction/run.py            # all links
    python benchmarks/prediction/run.py shm        # or some of: shm, loopback, shaped
    python benchmarks/prediction/run.py --rounds 1

Two ranks, one thread each. First two real processes measure their link in the way in which each program uses it
(links.py), what computing alone takes, and the steps (steps.py). Then the same steps are simulated with these figures
and with the CPU time that they take here, times a factor: what computing alone took both processes at once, over the
CPU time that it takes here. Where this user may make network namespaces (as root, with ip), the same again over a link
of 1 Gbit/s and 1 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from links import Probe, all_reduce, exchange, figures
from steps import ddp_steps, local_steps, pipeline_steps

import echelon
from echelon import Network, ProcessGroup
from echelon.simulation import Measured

sys.path.insert(0, str(Path(__file__).parents[1]))
from slow_link import LOCAL, Ends, Unavailable, run_ranks, slow_link

LINKS = ("shm", "loopback", "shaped")
MARK = "figures: "
REPETITIONS = 3
"""How often each kind of step is measured, before the link and after it, in turns: other work disturbs all of them."""


class Program(NamedTuple):
    """What is predicted."""

    steps: Callable[[ProcessGroup], list[float]]
    """Returns the seconds of each step."""
    probe: Probe
    """What measures the link for it."""


PROGRAMS = {
    "DDP": Program(ddp_steps, Probe(all_reduce, is_beside=True)),
    "pipeline, 1f1b, 4 microbatches": Program(pipeline_steps, Probe(exchange, is_beside=False)),
}


def all_steps(group: ProcessGroup) -> dict[str, list[float]]:
    """Returns the seconds of steps without communication, and of each program."""
    return {"local": local_steps(group)} | {name: program.steps(group) for name, program in PROGRAMS.items()}


def be_a_rank(backend: str) -> None:
    with echelon.init(backend=backend) as group:
        torch.set_num_threads(1)
        rounds = [all_steps(group) for _ in range(REPETITIONS)]
        links = {name: figures(group, program.probe) for name, program in PROGRAMS.items()}
        rounds += [all_steps(group) for _ in range(REPETITIONS)]
        steps = {name: [seconds for steps in rounds for seconds in steps[name]] for name in rounds[0]}
        if group.rank == 0:
            print(MARK + json.dumps({"links": links, "steps": steps}))


def run_processes(backend: str, ends: Ends) -> dict[str, Any]:
    """Runs this file on two processes, and returns what rank 0 measured: before its link, and after it."""
    output, _ = run_ranks(ends, [sys.executable, __file__, "--rank", backend])
    (line,) = [line for line in output.splitlines() if line.startswith(MARK)]
    measured: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return measured


def simulated(steps: Callable[[ProcessGroup], list[float]], network: Network | None, costs: Measured) -> float:
    """Returns the median of the virtual seconds of a step."""
    runs = [echelon.simulate(steps, 2, network=network, costs=costs) for _ in range(REPETITIONS)]
    return statistics.median(seconds for run in runs for seconds in run.results[0])


def report(rounds: int, link: str, backend: str, ends: Ends = LOCAL) -> None:
    """Prints the rows of a link between two processes."""
    for _ in range(rounds):
        real = run_processes(backend, ends)
        local = simulated(local_steps, None, Measured())
        costs = Measured(factor=statistics.median(real["steps"]["local"]) / local)
        for name, program in PROGRAMS.items():
            network = Network(**real["links"][name])
            predicted = simulated(program.steps, network, costs)
            measured = statistics.median(real["steps"][name])
            print(
                f"| {link} | {network.latency * 1e6:.0f} us, {network.bandwidth / 1e6:.0f} MB/s, "
                f"{network.overhead * 1e9:.2f} s/GB | {costs.factor:.2f} | {name} | "
                f"{predicted * 1e3:.1f} | {measured * 1e3:.1f} | {predicted / measured:.2f} |",
                flush=True,
            )


def main(links: Sequence[str], rounds: int) -> None:
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}\n")
    print("| link | latency, bandwidth, overhead | computing takes | step | predicted (ms) | measured (ms) | ratio |")
    print("|---|---|---|---|---|---|---|")
    if "shm" in links:
        report(rounds, "shared memory", "shm")
    if "loopback" in links:
        report(rounds, "loopback TCP", "tcp")
    if "shaped" in links:
        try:
            with slow_link(bits_per_second=1e9, delay=1e-3) as ends:
                report(rounds, "TCP at 1 Gbit/s, 1 ms", "tcp", ends)
                print(f"\nthe link of 1 Gbit/s was made by {ends.made_by}")
        except Unavailable as error:
            print(f"\n{error}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank(sys.argv[2])
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("links", nargs="*", help=f"some of {', '.join(LINKS)}; all of them if none is given")
        parser.add_argument("--rounds", type=int, default=3)
        options = parser.parse_args()
        if unknown := set(options.links) - set(LINKS):
            parser.error(f"no link is called {', '.join(sorted(unknown))}")
        main(options.links or LINKS, options.rounds)
