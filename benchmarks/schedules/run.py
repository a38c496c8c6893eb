"""How long does it take to build, check and simulate a schedule, and what does torch take for its part of that?

    python benchmarks/schedules/run.py             # all rows, about 2 minutes
    python benchmarks/schedules/run.py --quick     # up to 100 thousand actions

Every row is measured in processes of its own, so that their peak memory is theirs; medians of three.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from argparse import SUPPRESS
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[1]))
from harness import options_of, print_environment, print_head, print_row

REPETITIONS = 3
LINEAR = ((256, 20), (256, 195), (256, 1954), (256, 7813))
LOWERED = ((16, 64), (32, 128), (64, 256))


def timed(act: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = act()
    return time.perf_counter() - start, result


def echelon(ranks: int, microbatches: int, chunks: int) -> dict[str, float]:
    from echelon.pipeline.plan.cost import Costs
    from echelon.pipeline.schedules import build

    name = "1f1b" if chunks == 1 else "interleaved-1f1b"
    build_time, schedule = timed(lambda: build(name, ranks, microbatches, chunks))
    check_time, _ = timed(schedule.check)
    simulate_time, _ = timed(lambda: schedule.simulate(Costs(1.0, 1.0, 1.0, transfer=0.1)))
    return {"build": build_time, "check": check_time, "simulate": simulate_time}


def torch_stages(ranks: int, chunks: int) -> list[SimpleNamespace]:
    """Stands in for stages, of which torch's schedules ask sizes only."""
    return [
        SimpleNamespace(stage_index=ranks * chunk, num_stages=ranks * chunks, group_size=ranks, group_rank=0)
        for chunk in range(chunks)
    ]


def torch_1f1b(ranks: int, microbatches: int, chunks: int) -> dict[str, float]:
    """Generates all ranks' orders and validates them; both look at one rank at a time."""
    from torch.distributed.pipelining import schedules as of_torch

    schedule = of_torch.Schedule1F1B(torch_stages(ranks, chunks)[0], microbatches)
    generate_time, order = timed(schedule._get_pipeline_order)
    orders = {rank: [step for step in steps if step is None or step.is_compute_op] for rank, steps in order.items()}
    # The last rank's forwards are numbered from 1 (torch 2.13), which its own validation refuses.
    orders[ranks - 1] = [
        step._replace(microbatch_index=step.microbatch_index - (step.computation_type == of_torch.FORWARD))
        for step in orders[ranks - 1]
        if step is not None
    ]
    validate_time, _ = timed(lambda: of_torch._validate_schedule(orders, ranks, ranks, microbatches))
    return {"build": generate_time, "check": validate_time}


def torch_interleaved(ranks: int, microbatches: int, chunks: int) -> dict[str, float]:
    """Makes a schedule that torch can run: generated, validated, and with sends and receives in their places."""
    from torch.distributed.pipelining import schedules as of_torch

    stages = torch_stages(ranks, chunks)
    made, _ = timed(lambda: of_torch.ScheduleInterleaved1F1B(stages, microbatches))
    return {"build": made}


PARTS = {part.__name__: part for part in (echelon, torch_1f1b, torch_interleaved)}


def in_a_process(part: Callable[..., dict[str, float]], *sizes: object) -> dict[str, float]:
    command = [sys.executable, __file__, "--part", json.dumps([part.__name__, *sizes])]
    done = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(REPETITIONS)]
    return {key: statistics.median(row[key] for row in done) for key in done[0]}


def run_part(text: str) -> None:
    part, *sizes = json.loads(text)
    times = PARTS[part](*sizes)
    print(json.dumps({**times, "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000}))


def report(quick: bool) -> None:
    print_environment()
    print_head("1F1B: actions | build | check | simulate | total (s) | us per action | MB")
    for ranks, microbatches in LINEAR[: 2 if quick else None]:
        row = in_a_process(echelon, ranks, microbatches, 1)
        actions = 2 * ranks * microbatches
        times = [row[key] for key in ("build", "check", "simulate")]
        cells = (f"{value:.2f}" for value in (*times, sum(times), sum(times) / actions * 1e6))
        print_row(f"{actions:,}", *cells, f"{row['megabytes']:.0f}")
    ranks, microbatches = (64, 512) if quick else LINEAR[2]
    ours, theirs = (in_a_process(part, ranks, microbatches, 1) for part in (echelon, torch_1f1b))
    print()
    print_head(f"1F1B, {2 * ranks * microbatches:,} actions | Echelon | torch | ratio")
    for key, what in (("build", "all ranks' orders"), ("check", "check (Echelon: deadlocks, too)")):
        print_row(f"{what} (s)", *(f"{value:.2f}" for value in (ours[key], theirs[key], ours[key] / theirs[key])))
    print()
    print_head("interleaved 1F1B, 2 chunks: actions | Echelon: build and check | torch: constructor | ratio")
    for ranks, microbatches in LOWERED[: 2 if quick else None]:
        ours = in_a_process(echelon, ranks, microbatches, 2)
        theirs = in_a_process(torch_interleaved, ranks, microbatches, 2)
        total = ours["build"] + ours["check"]
        values = (total, theirs["build"], total / theirs["build"])
        print_row(f"{4 * ranks * microbatches:,}", *(f"{value:.3f}" for value in values))


if __name__ == "__main__":
    parser = options_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="only the small sizes")
    parser.add_argument("--part", help=SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run_part(options.part)
    else:
        report(options.quick)
