"""How good are searched schedules beside published ones, and how long does the largest practical search take?

    python benchmarks/schedules/experiments/search.py              # all tables, about 4 minutes
    python benchmarks/schedules/experiments/search.py --quick      # 8 ranks, and no search on a V

The tables are in docs/search.md and benchmarks/schedules/README.md. Seconds are of the processor: the search runs on
one core and waits for nothing.
"""

from __future__ import annotations

import csv
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from echelon.pipeline import Costs, schedules
from echelon.pipeline.plan.action import loop
from echelon.pipeline.search.problem import lower_bound, problem, rank_limits

sys.path.append(str(Path(__file__).parents[2]))
from harness import options_of, print_environment, print_head, print_row

PUBLISHED = Path(__file__).parents[3] / "tests" / "pipeline" / "published.csv"
# Heads and hidden size of the models, for sequences of 1024 (Zero Bubble Pipeline Parallelism).
SHAPES = {"1.5B": (24, 2304), "6.2B": (32, 4096), "14.6B": (40, 5120), "28.3B": (48, 6144)}


class Searched(NamedTuple):
    rate: float
    seconds: float


def weight_share(model: str) -> float:
    """Returns the part of an activation that W keeps, in the authors' model of memory."""
    heads, hidden = SHAPES[model]
    return 32 / (34 + 5 * heads * 1024 / hidden)


def search(costs: Costs, ranks: int, microbatches: int, limit: float, chunks: int = 1) -> Searched:
    start = time.process_time()
    schedule = schedules.search(costs, ranks, microbatches, limit, num_chunks=chunks)
    seconds = time.process_time() - start
    schedule.check(memory_limit=limit * chunks, costs=costs)
    return Searched(float(schedule.simulate(costs).bubble_rate), seconds)


def bound_rate(costs: Costs, ranks: int, microbatches: int, limit: float) -> float:
    """The least bubble rate that any schedule has."""
    placement = loop(ranks)
    exact = problem(costs, placement, microbatches, rank_limits(costs, placement, microbatches, limit))
    return 1 - max(exact.work) / lower_bound(exact)


def rows(quick: bool) -> list[dict[str, str]]:
    with PUBLISHED.open(newline="") as file:
        found = list(csv.DictReader(file))
    return [row for row in found if not quick or int(row["ranks"]) == 8]


def sizes(row: dict[str, str]) -> tuple[int, int, str]:
    ranks, microbatches = int(row["ranks"]), int(row["microbatches"])
    return ranks, microbatches, f"{row['model']}, {ranks}, {microbatches}"


def chunk_costs(row: dict[str, str], scale: float) -> Costs:
    times = (scale * float(row[name]) for name in ("forward", "backward_input", "backward_weight"))
    return Costs(*times, transfer=float(row["transfer"]))


def twice_the_memory(quick: bool) -> None:
    print_head("model, ranks, microbatches | printed | searched | bound | all kept: searched | all kept: bound")
    for row in rows(quick):
        ranks, microbatches, name = sizes(row)
        kept = chunk_costs(row, 2 if row["table"] == "8" else 1)
        costs = replace(kept, weight_activation=weight_share(row["model"]))
        cells = [f"0{row['bubble_zb_2p']}" if row["bubble_zb_2p"] else "-"]
        for each in (costs, kept):
            cells.append(f"{search(each, ranks, microbatches, 2 * ranks).rate:.4f}")
            cells.append(f"{bound_rate(each, ranks, microbatches, 2 * ranks):.4f}")
        print_row(name, *cells)


def on_a_v(quick: bool) -> None:
    print()
    print_head("model, ranks, microbatches | printed | zb-v | searched | seconds")
    for row in rows(quick=False):
        if not row["bubble_zb_v"]:
            continue
        ranks, microbatches, name = sizes(row)
        costs = chunk_costs(row, 1)
        cells = [f"0{row['bubble_zb_v']}"]
        cells.append(f"{schedules.build('zb-v', ranks, microbatches).simulate(costs).bubble_rate:.4f}")
        if not quick:
            found = search(costs, ranks, microbatches, ranks, chunks=2)
            cells += [f"{found.rate:.4f}", f"{found.seconds:.0f}"]
        print_row(name, *cells)


def small_cases() -> None:
    print()
    print_head("ranks, microbatches | 1x | 1.5x | 2x | 3x")
    costs = Costs(1, 1, 1, transfer=0)
    for ranks, microbatches in ((4, 8), (8, 16)):
        found = (schedules.search(costs, ranks, microbatches, times * ranks) for times in (1, 1.5, 2, 3))
        print_row(f"{ranks}, {microbatches}", *(schedule.simulate(costs).span for schedule in found))


def largest(quick: bool) -> None:
    """32 ranks, 256 microbatches. The first stops at the bound, the others spend all their tries."""
    ranks, microbatches = (8, 64) if quick else (32, 256)
    table = {
        "equal stages, 2 x ranks": (Costs(10.4, 10.2, 7.7, 0.46, weight_activation=0.43), 2 * ranks),
        "equal stages, 1.5 x ranks": (Costs(10.4, 10.2, 7.7, 3.0, weight_activation=0.43), 1.5 * ranks),
        "unequal stages, 2 x ranks": (
            Costs([10.4 + rank % 5 / 4 for rank in range(ranks)], 10.2, 7.7, 0.46),
            2 * ranks,
        ),
    }
    print()
    print_head(f"{ranks} ranks, {microbatches} microbatches | seconds | bubble rate | bound")
    for name, (costs, limit) in table.items():
        found = search(costs, ranks, microbatches, limit)
        least = bound_rate(costs, ranks, microbatches, limit)
        print_row(name, f"{found.seconds:.1f}", f"{found.rate:.4f}", f"{least:.4f}")
    print(f"\npeak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000:.0f} MB")


if __name__ == "__main__":
    parser = options_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="only the small sizes")
    quick = parser.parse_args().quick
    print_environment()
    twice_the_memory(quick)
    on_a_v(quick)
    small_cases()
    largest(quick)
