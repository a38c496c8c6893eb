"""Should buckets be reduced beside backward, or behind it, where no core is idle?

    python benchmarks/ddp/experiments/ways.py
    python benchmarks/ddp/experiments/ways.py --rounds 70
    python benchmarks/ddp/experiments/ways.py --backend tcp --model mlp1m

Ranks of one host: a step of a local model, and of DDP that launches full buckets during backward, or one
that holds all when backward has ended. In turns of changing order, all ranks together. Then what the parts of the
difference take with nothing beside them: gradients that autograd has made anew are copied into their buckets, and
buckets are reduced.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import echelon
from echelon.data_parallel import gradient_sync, reducer

sys.path.extend(map(str, Path(__file__).parents[1:3]))
from harness import in_turns, ms, options_of, print_environment, print_head, print_row, ratio
from run import TASKS, Step, training_step

WAYS = {"beside backward": True, "behind backward": False}


def measure(group: echelon.ProcessGroup, model: str, rounds: int, set_to_none: bool) -> dict[str, list[float]]:
    """Returns the seconds of each way's steps, then of the parts alone."""
    torch.set_num_threads(1)
    torch.manual_seed(group.rank)
    task = TASKS[model]
    batch = torch.randn(task.batch)

    def by_way(step: Step, beside: bool) -> Callable[[], None]:
        def act() -> None:
            gradient_sync.can_overlap = reducer.can_overlap = lambda _: beside
            step()

        return act

    acts = {"local": training_step(task.make(), batch, set_to_none)}
    for name, beside in WAYS.items():
        acts[name] = by_way(training_step(echelon.DDP(task.make(), group), batch, set_to_none), beside)
    steps = in_turns(group, acts, rounds)
    whole = echelon.DDP(task.make(), group)
    training_step(whole, batch, set_to_none=True)()
    gradients = [parameter.grad for parameter in whole.parameters()]
    others = [gradient.clone() for gradient in gradients]

    def copy() -> None:
        for gradient, other in zip(gradients, others, strict=True):
            gradient.copy_(other)

    parts = in_turns(group, {"copying alone": copy, "reducing alone": whole.sync_gradients}, 10, warmup=1)
    return {**steps.seconds, **parts.seconds}


def main() -> None:
    parser = options_of(__doc__, rounds=40, ranks=2)
    parser.add_argument("--backend", default="auto", help="of Echelon: auto, shm, tcp")
    parser.add_argument("--model", choices=TASKS, default="mlp10m")
    options = parser.parse_args()
    print_environment(
        f"{options.ranks} ranks over {options.backend}, 1 thread each; {options.model}; medians of {options.rounds} "
        "rounds"
    )
    print_head("zero_grad(set_to_none=) | way | step, ms | to a local step")
    for set_to_none in (False, True):
        arguments = (options.model, options.rounds, set_to_none)
        seconds = echelon.spawn(measure, options.ranks, arguments, backend=options.backend)[0]
        for name, taken in seconds.items():
            # The parts have fewer rounds than the steps, so their ratio is that of the medians.
            paired = len(taken) == len(seconds["local"])
            local = seconds["local"] if paired else [statistics.median(seconds["local"])] * len(taken)
            print_row(set_to_none, name, ms(taken), f"{ratio(taken, local):.3f}")


if __name__ == "__main__":
    main()
