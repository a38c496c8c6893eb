"""Does any order with the memory of interleaved 1F1B pay fewer transfers? Simulated annealing over orders.

    python benchmarks/schedules/experiments/interleaved.py         # half a minute

Transfers are counted on the critical path: (span - span without transfers) / transfer. The closed form in
docs/schedules.md has (2v-1)p - 2 of them, interleaved 1F1B has 2(vp - 1).
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

from echelon.pipeline import Costs, schedules
from echelon.pipeline.plan.action import Action
from echelon.pipeline.plan.simulate import play

sys.path.append(str(Path(__file__).parents[2]))
from harness import print_head, print_row

COSTS = Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, transfer=0.05)
SIZES = ((2, 4, 2), (2, 6, 2), (3, 6, 2), (4, 8, 2))
SEEDS = range(3)
MOVES = 20_000


def peak(order: list[Action]) -> float:
    """Activations held at most; infinite if a backward stands before its own forward."""
    held: set[tuple[int, int]] = set()
    most = 0
    for stage, kind, microbatch in order:
        if kind == "F":
            held.add((stage, microbatch))
            most = max(most, len(held))
        elif (stage, microbatch) in held:
            held.remove((stage, microbatch))
        else:
            return math.inf
    return most


def fewest_transfers(num_ranks: int, num_microbatches: int, num_chunks: int, shared_limit: bool, seed: int) -> float:
    """Moves single actions within their rank's order; keeps within the memory of interleaved 1F1B.

    Args:
        num_ranks, num_microbatches, num_chunks: of the schedule.
        shared_limit: every rank may hold as much as the first one does; False: as much as it does in interleaved 1F1B.
        seed: of the moves.
    """
    chance = random.Random(seed)
    schedule = schedules.build("interleaved-1f1b", num_ranks, num_microbatches, num_chunks)
    costs = COSTS.per_stage(schedule.placement)
    orders = [list(order) for order in schedule.orders]
    limits = [peak(orders[0] if shared_limit else order) for order in orders]

    def span() -> float:
        ends = play(orders, schedule.placement, num_microbatches, costs).ends
        done = all(len(rank) == len(order) for rank, order in zip(ends, orders, strict=True))
        return float(max(rank[-1] for rank in ends)) if done else math.inf

    now = best = span()
    for move in range(MOVES):
        rank = chance.randrange(num_ranks)
        kept = orders[rank]
        source = chance.randrange(len(kept))
        target = min(max(source + chance.choice((-4, -3, -2, -1, 1, 2, 3, 4)), 0), len(kept) - 1)
        moved = kept[:source] + kept[source + 1 :]
        moved.insert(target, kept[source])
        if peak(moved) > limits[rank]:
            continue
        orders[rank] = moved
        then = span()
        heat = 1.2 * COSTS.transfer * (1 - move / MOVES) + 1e-9
        if then > now and chance.random() > math.exp((now - then) / heat):
            orders[rank] = kept
            continue
        now, best = then, min(best, then)
    work = (num_microbatches * num_chunks + num_ranks - 1) * 3.0
    return (best - work) / COSTS.transfer


def main() -> None:
    print_head(
        "ranks, microbatches, chunks | closed form | interleaved 1F1B | fewest found | with rank 0's memory on each"
    )
    for sizes in SIZES:
        found = [min(fewest_transfers(*sizes, shared, seed) for seed in SEEDS) for shared in (False, True)]
        ranks, _, chunks = sizes
        closed, ours = (2 * chunks - 1) * ranks - 2, 2 * (chunks * ranks - 1)
        print_row(", ".join(map(str, sizes)), closed, ours, *(f"{transfers:.0f}" for transfers in found))


if __name__ == "__main__":
    main()
