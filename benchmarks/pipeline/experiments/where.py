"""Where does the time go that a step takes over its ideal?

    python benchmarks/pipeline/experiments/where.py            # 2 ranks, 16 x (Linear 512 + ReLU), 8 microbatches of 16
    python benchmarks/pipeline/experiments/where.py --width 8  # a tiny model

In every round a step without messages (see run.py) and one of Echelon's pipeline take turns. The step's timeline is
then played again in parts: with its actions as long as they were without messages, one by one instead of the means
(what is uneven of itself), as long as they were in the step (what they take more there), the rest of its timeline
(messages, and what lies between actions), and what a call of `step` takes around it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import echelon
from echelon.pipeline.plan.simulate import Timeline

sys.path.extend(map(str, Path(__file__).parents[1:3]))
from harness import options_of, print_head, print_row
from run import RANKS, Alone, Work, costs_of, every_rank, our_pipeline, our_step

NAMES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v")
WARMUP = 3


def played(seconds: Sequence[Sequence[float]], ideal: Timeline) -> float:
    """Returns how long a step takes whose actions take these seconds, rank by rank, where nothing lies between them.

    What an action waits for is taken from the ideal, which has the same order.
    """
    arrivals = {(one.target_rank, one.target): (one.source_rank, one.source) for one in ideal.transfers}
    ends: dict[tuple[int, int], float] = {}
    while len(ends) < sum(map(len, seconds)):
        for rank, durations in enumerate(seconds):
            for index, duration in enumerate(durations):
                before = [(rank, index - 1)] if index else []
                before += [arrivals[rank, index]] if (rank, index) in arrivals else []
                if (rank, index) not in ends and all(one in ends for one in before):
                    ends[rank, index] = max((ends[one] for one in before), default=0.0) + duration
    return max(ends.values())


def durations(timeline: Timeline) -> list[list[float]]:
    """Returns the seconds of each rank's actions."""
    both = zip(timeline.starts, timeline.ends, strict=True)
    return [[float(end - start) for start, end in zip(starts, ends, strict=True)] for starts, ends in both]


def measure(group: echelon.ProcessGroup, work: Work, rounds: int, names: Sequence[str]) -> list[list[float]]:
    """Returns of each schedule the medians of ideal, uneven, more, messages and around, in seconds, and its actions."""
    torch.set_num_threads(1)
    found = []
    for name in names:
        pipe = our_pipeline(group, work, name)
        schedule = pipe.schedule
        step, alone = our_step(pipe, work), Alone(pipe, work, group.rank)
        step()
        parts = []
        for _ in range(WARMUP + rounds):
            group.barrier()
            alone.step()
            ideal = schedule.simulate(costs_of(every_rank(group, alone.rounds[-1:])[0], schedule))
            each = group.all_gather(torch.tensor(alone.latest, dtype=torch.float64))
            each = each.split([len(order) for order in schedule.orders])
            group.barrier()
            began = time.perf_counter()
            step()
            seconds = group.all_reduce(torch.tensor(time.perf_counter() - began, dtype=torch.float64), "max").item()
            makespan, own = float(pipe.timeline.makespan), played(durations(pipe.timeline), ideal)
            least, uneven = float(ideal.makespan), played([one.tolist() for one in each], ideal)
            parts.append([least, uneven - least, own - uneven, makespan - own, seconds - makespan])
        medians = [statistics.median(part) for part in zip(*parts[WARMUP:], strict=True)]
        found.append([*medians, max(map(len, schedule.orders))])
    return found


def main() -> None:
    parser = options_of(__doc__, rounds=15)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    work = Work(options.width, 16, 16, 8)
    rows = echelon.spawn(measure, RANKS, (work, options.rounds, NAMES), "auto")[0]
    print_head("schedule | actions | ideal (ms) | uneven (ms) | more (ms) | messages and between (ms) | around (ms)")
    for name, (*parts, actions) in zip(NAMES, rows, strict=True):
        print_row(name, f"{actions:.0f}", *(f"{seconds * 1e3:.2f}" for seconds in parts))


if __name__ == "__main__":
    main()
