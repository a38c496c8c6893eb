"""Does a simulation with measured costs predict how long steps take on real processes?

    python benchmarks/prediction/run.py            # all links
    python benchmarks/prediction/run.py shm        # or some of: shm, loopback, shaped
    python benchmarks/prediction/run.py --rounds 1

Two ranks, one thread each. First two real processes measure their link in the way in which each program uses it,
what computing alone takes, and the steps. Then the same steps are simulated with these figures
and with the CPU time that they take here, times a factor: what computing alone took both processes at once, over the
CPU time that it takes here. Where this user may make network namespaces (as root, with ip), the same again over a link
of 1 Gbit/s and 1 ms.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import echelon
from echelon import Network, ProcessGroup
from echelon.pipeline import Pipeline
from echelon.simulation import Measured

sys.path.extend(
    [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples")]
)
from gpt import loss_of, make_gpt
from harness import Act, options_of, print_environment, print_head, print_row
from links import Move, Moves, Use, all_reduce, exchange, measure, network_of, timed
from slow_link import LOCAL, Ends, Unavailable, run_ranks, slow_link

LINKS = ("shm", "loopback", "shaped")
MARK = "figures: "
REPETITIONS = 3
"""How often each kind of step is measured, before the link and after it, in turns: other work disturbs all of them."""
CONTEXT, SAMPLES, WIDTH, MICROBATCHES = 64, 8, 128, 4
BUCKET = 1 << 20
"""Bytes that data parallelism reduces at once."""
ACTIVATIONS = SAMPLES // MICROBATCHES * CONTEXT * WIDTH * 4
"""Bytes that a stage of the pipeline sends at once."""


def computing(group: ProcessGroup) -> Callable[[], None]:
    """Returns the computation of a rank in a step of data parallelism, without its communication."""
    torch.set_num_threads(1)
    inputs, target = _batch(group.rank)
    alone = _model()
    return lambda: loss_of(alone(inputs), target).backward()


def local_steps(group: ProcessGroup) -> list[float]:
    return timed(group, computing(group))


def training_steps(group: ProcessGroup, parameters: Iterable[torch.Tensor], forward_and_backward: Act) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        forward_and_backward()
        optimizer.step()

    return timed(group, step)


def ddp_steps(group: ProcessGroup) -> list[float]:
    torch.set_num_threads(1)
    inputs, target = _batch(group.rank)
    ddp = echelon.DDP(_model(), group, bucket_mb=BUCKET / 2**20)
    return training_steps(group, ddp.parameters(), lambda: loss_of(ddp(inputs), target).backward())


def pipeline_steps(group: ProcessGroup) -> list[float]:
    torch.set_num_threads(1)
    inputs, target = _batch(0)  # the same on all stages
    pipe = Pipeline(_model(), group, "1f1b", MICROBATCHES, loss_of)
    return training_steps(group, pipe.parameters(), lambda: pipe.step(inputs, target=target))


def _model() -> torch.nn.Sequential:
    return make_gpt(num_layers=4, width=WIDTH, num_heads=4, context=CONTEXT)


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(256, (SAMPLES, CONTEXT + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


SIZES = (ACTIVATIONS, BUCKET)
"""Bytes that are moved to find latency and bandwidth."""
PAIRS = 9
"""Measurements of computing without moves and with them, in turns."""


class Program(NamedTuple):
    """Program whose step is predicted."""

    steps: Callable[[ProcessGroup], list[float]]
    """Returns the seconds of each step."""
    move: Move
    """Move that measures the link for it."""
    use: Use
    """How it moves."""


PROGRAMS = {
    "DDP": Program(ddp_steps, all_reduce, "beside"),
    # Its ranks wait for what they move.
    "pipeline, 1f1b, 4 microbatches": Program(pipeline_steps, exchange, "alone"),
}


def all_steps(group: ProcessGroup) -> dict[str, list[float]]:
    """Returns the seconds of steps without communication, and of each program."""
    return {"local": local_steps(group)} | {name: program.steps(group) for name, program in PROGRAMS.items()}


def be_a_rank(backend: str) -> None:
    with echelon.init(backend=backend) as group:
        torch.set_num_threads(1)
        rounds = [all_steps(group) for _ in range(REPETITIONS)]
        compute = computing(group)
        links = {name: measure(group, each.move, compute, compute, SIZES, PAIRS) for name, each in PROGRAMS.items()}
        rounds += [all_steps(group) for _ in range(REPETITIONS)]
        steps = {name: [seconds for steps in rounds for seconds in steps[name]] for name in rounds[0]}
        if group.rank == 0:
            print(MARK + json.dumps({"links": links, "steps": steps}))


def run_processes(backend: str, ends: Ends) -> dict[str, Any]:
    """Runs this file on two processes, and returns rank 0's measurements, of before its link and after it."""
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
            network = network_of([Moves.of(real["links"][name])], program.move, SIZES, program.use)
            predicted = simulated(program.steps, network, costs)
            measured = statistics.median(real["steps"][name])
            speed = f"{network.latency * 1e6:.0f} us, {network.bandwidth / 1e6:.0f} MB/s"
            figures = f"{predicted * 1e3:.1f}", f"{measured * 1e3:.1f}", f"{predicted / measured:.2f}"
            print_row(link, f"{speed}, {network.overhead * 1e9:.2f} s/GB", f"{costs.factor:.2f}", name, *figures)


def main(links: Sequence[str], rounds: int) -> None:
    print_environment()
    print_head("link | latency, bandwidth, overhead | computing takes | step | predicted (ms) | measured (ms) | ratio")
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
        parser = options_of(__doc__, rounds=3)
        parser.add_argument("links", nargs="*", help=f"some of {', '.join(LINKS)}; all of them if none is given")
        options = parser.parse_args()
        if unknown := set(options.links) - set(LINKS):
            parser.error(f"no link is called {', '.join(sorted(unknown))}")
        main(options.links or LINKS, options.rounds)
