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
import math
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

sys.path.extend([str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples")])
from gpt import loss_of, make_gpt
from harness import Act, options_of, print_environment, print_head, print_row
from slow_link import LOCAL, Ends, Unavailable, run_ranks, slow_link

LINKS = ("shm", "loopback", "shaped")
MARK = "figures: "
REPETITIONS = 3
"""How often each kind of step is measured, before the link and after it, in turns: other work disturbs all of them."""
WARM_UP, STEPS = 2, 6
CONTEXT, SAMPLES, WIDTH, MICROBATCHES = 64, 8, 128, 4
BUCKET = 1 << 20
"""Bytes that data parallelism reduces at once."""
ACTIVATIONS = SAMPLES // MICROBATCHES * CONTEXT * WIDTH * 4
"""Bytes that a stage of the pipeline sends at once."""


def timed(group: ProcessGroup, step: Callable[[], object], count: int = WARM_UP + STEPS) -> list[float]:
    """Returns how long each step took but the first, one upon the other as in training, on the clock of the group.

    That clock is virtual on simulated ranks. No barrier stands between steps: over a slow link one rank would leave it
    later than the other, and begin its step so much nearer to the other's first message.
    """
    group.barrier()
    times = [group.backend.now()]
    for _ in range(count):
        step()
        times.append(group.backend.now())
    return [end - start for start, end in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]


def computing(group: ProcessGroup) -> Callable[[], None]:
    """Returns the computation of a rank in a step of data parallelism, without its communication."""
    torch.set_num_threads(1)
    inputs, target = _batch(group)
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
    inputs, target = _batch(group)
    ddp = echelon.DDP(_model(), group, bucket_mb=BUCKET / 2**20)
    return training_steps(group, ddp.parameters(), lambda: loss_of(ddp(inputs), target).backward())


def pipeline_steps(group: ProcessGroup) -> list[float]:
    torch.set_num_threads(1)
    inputs, target = _batch(group)
    pipe = Pipeline(_model(), group, "1f1b", MICROBATCHES, loss_of)
    return training_steps(group, pipe.parameters(), lambda: pipe.step(inputs, target=target))


def _model() -> torch.nn.Sequential:
    return make_gpt(num_layers=4, width=WIDTH, num_heads=4, context=CONTEXT)


def _batch(group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(group.rank)
    text = torch.randint(256, (SAMPLES, CONTEXT + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


# A link is measured in the way in which a program uses it: as a `Network` on which moving a tensor takes simulated
# ranks as long as it took these two. Data parallelism moves by all-reduces beside its backward, so those are timed
# beside computing: a message then waits for the core, and for the interpreter, until what computes lets go of them. The
# ranks of a pipeline wait for what they move.

SIZES = (ACTIVATIONS, BUCKET)
"""Bytes that are moved to find latency and bandwidth."""
BATCH = 10
"""Moves that are timed together: over a slow link the ranks take turns in being late."""


class Probe(NamedTuple):
    """Movement of bytes by a program: each rank sends and receives a tensor's bytes once."""

    move: Callable[[ProcessGroup, torch.Tensor], None]
    is_beside: bool
    """Whether while it computes."""


def exchange(group: ProcessGroup, tensor: torch.Tensor) -> None:
    sent = group.isend(tensor, 1 - group.rank)
    group.recv(1 - group.rank)
    sent.wait()


def all_reduce(group: ProcessGroup, tensor: torch.Tensor) -> None:
    group.all_reduce(tensor)


def figures(group: ProcessGroup, probe: Probe) -> dict[str, float]:
    """Returns the arguments of `Network`: latency and bandwidth, both ranks sending at once, and overhead."""
    alone = [_alone(group, probe.move, size) for size in SIZES]
    beside = [_beside(group, probe.move, size, seconds) for size, seconds in zip(SIZES, alone, strict=True)]
    small, large = [move.seconds for move in beside] if probe.is_beside else alone
    rounds = [_rounds(probe.move, size) for size in SIZES]
    share = SIZES[0] / SIZES[1]
    latency = (small - share * large) / (rounds[0] - share * rounds[1])
    latency = min(max(latency, 0.0), small / rounds[0])
    rest = large - latency * rounds[1]
    return {
        "latency": latency,
        "bandwidth": SIZES[1] / rest if rest > 0 else math.inf,
        "overhead": beside[1].overhead / (2 * SIZES[1]),
    }


class _Beside(NamedTuple):
    """Costs of a move beside computing."""

    seconds: float
    overhead: float
    """Seconds by which it makes computing longer."""


def _alone(group: ProcessGroup, move: Callable[[ProcessGroup, torch.Tensor], None], num_bytes: int) -> float:
    tensor = torch.zeros(num_bytes // 4)

    def some() -> None:
        for _ in range(BATCH):
            move(group, tensor)

    return statistics.median(timed(group, some)) / BATCH


def _beside(
    group: ProcessGroup, move: Callable[[ProcessGroup, torch.Tensor], None], num_bytes: int, alone: float
) -> _Beside:
    """Times as many moves as fill two thirds of three computations, which they take alone."""
    tensor = torch.zeros(num_bytes // 4)
    one = computing(group)

    def compute() -> float:
        began = group.backend.now()
        for _ in range(3):
            one()
        return group.backend.now() - began

    count = int(str(group.broadcast_object(max(1, int(compute() / alone * 2 / 3)))))

    def moves() -> float:
        began = group.backend.now()
        for _ in range(count):
            move(group, tensor)
        return group.backend.now() - began

    seconds, longer = [], []
    for _ in range(9):
        group.barrier()
        without = compute()
        group.barrier()
        moving = group.backend.lanes.start(moves, "messages")
        longer.append(compute() - without)
        seconds.append(moving.wait())
    return _Beside(statistics.median(seconds) / count, max(0.0, statistics.median(longer)) / count)


def _rounds(move: Callable[[ProcessGroup, torch.Tensor], None], num_bytes: int) -> float:
    """Returns how many latencies one move takes simulated ranks."""

    def once(group: ProcessGroup) -> float:
        return statistics.median(timed(group, lambda: move(group, torch.zeros(num_bytes // 4))))

    return float(echelon.simulate(once, 2, network=Network(1.0, math.inf)).results[0])


class Program(NamedTuple):
    """Program whose step is predicted."""

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
            network = Network(**real["links"][name])
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
