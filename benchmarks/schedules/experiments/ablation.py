"""How much longer do the search's schedules get without each of its methods?

    python benchmarks/schedules/experiments/ablation.py                      # each method off in turn, 40 minutes
    python benchmarks/schedules/experiments/ablation.py --without climb+swap # several at once
    python benchmarks/schedules/experiments/ablation.py --quick              # small cases

Cases are those of search.py, and unequal stages at three limits. A figure is the longest span, divided by that of the
whole search. Seconds are of the processor.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from search import chunk_costs, rows, sizes, weight_share

from echelon.pipeline import Costs, schedules
from echelon.pipeline.search import engine, greedy, weight_placement
from echelon.pipeline.search.weight_placement import Filler

sys.path.append(str(Path(__file__).parents[2]))
from harness import options_of, print_head, print_row


class Case(NamedTuple):
    name: str
    costs: Costs
    ranks: int
    microbatches: int
    limit: float
    chunks: int = 1


class Result(NamedTuple):
    span: float
    seconds: float


def cases(quick: bool) -> Iterator[Case]:
    for row in rows(quick):
        ranks, microbatches, name = sizes(row)
        kept = chunk_costs(row, 2 if row["table"] == "8" else 1)
        shared = replace(kept, weight_activation=weight_share(row["model"]))
        yield Case(f"published: {name}", shared, ranks, microbatches, 2 * ranks)
        yield Case(f"published, all kept: {name}", kept, ranks, microbatches, 2 * ranks)
        if row["bubble_zb_v"] and not quick:
            yield Case(f"V: {name}", chunk_costs(row, 1), ranks, microbatches, ranks, 2)
    for ranks, microbatches in ((4, 8), (8, 16)):
        for times in (1, 1.5, 2, 3):
            name = f"small: {ranks}, {microbatches}, {times}x"
            yield Case(name, Costs(1, 1, 1, transfer=0), ranks, microbatches, times * ranks)
    # Stages as a model's first, last and middle layers make them, a slow link, and costs that vary.
    kinds = {
        "slow ends": Costs([6, *[4] * 6, 9], [6, *[4] * 6, 10], [5, *[3] * 6, 8], 1),
        "slow link": Costs(4, 4, 3, 3, weight_activation=0.5),
        "varied": Costs([4 + rank * 3 % 5 for rank in range(8)], [5 + rank * 2 % 5 for rank in range(8)], 4, 0.5),
    }
    for kind, costs in kinds.items():
        for times in (1, 1.5, 2):
            yield Case(f"unequal: {kind}, {times}x", costs, 8, 24, times * 8)
    giving_way = (
        (4, 11, Costs(14.764, 13.095, 13.923, 1.476, weight_activation=0.3), 6),
        (6, 13, Costs(11.785, 16.97, 10.296, 0.236, weight_activation=0.7), 9),
        (8, 33, Costs(14.134, 12.549, 12.923, 0.283, weight_activation=0.7), 12),
    )
    for ranks, microbatches, costs, limit in giving_way:
        yield Case(f"giving way: {ranks}, {microbatches}", costs, ranks, microbatches, limit)
    draw = random.Random(0)
    for number in range(20):
        ranks = draw.choice((4, 6, 8))
        # Each stage takes up to a tenth more or less than the others, as a measured cut leaves them.
        times = [[mean * draw.uniform(0.9, 1.1) for _ in range(ranks)] for mean in (4, 4.5, 3.5)]
        costs = Costs(*times, transfer=draw.uniform(0, 2), weight_activation=draw.uniform(0.2, 1))
        limit = draw.choice((1, 1.25, 1.5, 2)) * ranks
        yield Case(f"random: {number}", costs, ranks, draw.randint(2, 4) * ranks, limit)
    halves = Costs([2 + stage * 3 % 4 for stage in range(16)], 3, 2, 0.5)
    for times in (1, 1.5):
        yield Case(f"unequal V: 8, 24, {times}x", halves, 8, 24, times * 8, 2)
    if not quick:
        equal, ranks = Costs(10.4, 10.2, 7.7, 0.46, weight_activation=0.43), 32
        uneven = Costs([10.4 + rank % 5 / 4 for rank in range(ranks)], 10.2, 7.7, 0.46)
        yield Case("largest: 2x", equal, ranks, 256, 2 * ranks)
        yield Case("largest: 1.5x", replace(equal, transfer=3.0), ranks, 256, 1.5 * ranks)
        yield Case("largest: unequal", uneven, ranks, 256, 2 * ranks)


def run(case: Case) -> Result:
    start = time.process_time()
    schedule = schedules.search(case.costs, case.ranks, case.microbatches, case.limit, num_chunks=case.chunks)
    seconds = time.process_time() - start
    return Result(float(schedule.simulate(case.costs).span), seconds)


METHODS = ("free_waits", "greedy", "swap", "climb", "pull", "known", "bound")


class Eager(Filler):
    """Filler that runs W in every gap, also if the next action is then late."""

    def _fill_gap(self, rank: int, arrival: int) -> None:
        while self._free[rank] < arrival and self._put_weight(rank):
            pass


@contextmanager
def without(methods: list[str]) -> Iterator[None]:
    saved: list[Callable[[], None]] = []

    def put(owner: object, name: str, value: object) -> None:
        before = getattr(owner, name)
        saved.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    for method in methods:
        if method == "climb":
            put(engine, "climb", lambda *_: None)
        elif method == "bound":
            put(engine, "lower_bound", lambda _: 0)
        elif method == "free_waits":
            put(greedy, "Filler", Eager)
            put(weight_placement, "Filler", Eager)
        else:
            put(engine._Search, method, lambda _: None)
    try:
        yield
    finally:
        for undo in reversed(saved):
            undo()


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="only small cases")
    parser.add_argument("--without", action="append", help="methods to leave out together, joined by +")
    parser.add_argument("--cases", default="", help="only cases whose name begins so")
    arguments = parser.parse_args()
    chosen = [case for case in cases(arguments.quick) if case.name.startswith(arguments.cases)]
    whole = {}
    for case in chosen:
        whole[case.name] = run(case)
        print(f"{case.name}: {whole[case.name].span:.4f}, {whole[case.name].seconds:.1f} s", flush=True)
    print()
    print_head("without | longer, mean | most | in | seconds | worst")
    print_row("nothing", "", "", "", f"{sum(result.seconds for result in whole.values()):.0f}", "")
    for left_out in arguments.without or METHODS:
        found = {}
        with without(left_out.split("+")):
            for case in chosen:
                found[case.name] = run(case)
        longer = {name: result.span / whole[name].span - 1 for name, result in found.items()}
        worst = max(longer, key=longer.__getitem__)
        more = sum(each > 1e-9 for each in longer.values())
        seconds = sum(result.seconds for result in found.values())
        cells = (f"{statistics.mean(longer.values()):.3%}", f"{longer[worst]:.2%}", f"{more} of {len(longer)}")
        print_row(left_out, *cells, f"{seconds:.0f}", worst)
        listed = sorted(((more, name) for name, more in longer.items() if abs(more) > 1e-9), reverse=True)
        print("    " + "; ".join(f"{name} {more:+.2%}" for more, name in listed), flush=True)


if __name__ == "__main__":
    main()
