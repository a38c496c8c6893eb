"""How long does it take to build, check and simulate a schedule, and what does torch take for its part of that?

    python benchmarks/schedules/run.py             # all rows, about 2 minutes
    python benchmarks/schedules/run.py --quick     # up to 100 thousand actions

Every row is measured in processes of its own, so that their peak memory is theirs; medians of three.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

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
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}\n")
    print("| 1F1B: actions | build | check | simulate | total (s) | us per action | MB |")
    print("|---|---|---|---|---|---|---|")
    for ranks, microbatches in LINEAR[: 2 if quick else None]:
        row = in_a_process(echelon, ranks, microbatches, 1)
        actions = 2 * ranks * microbatches
        times = [row[key] for key in ("build", "check", "simulate")]
        cells = [f"{actions:,}", *(f"{value:.2f}" for value in (*times, sum(times)))]
        print(f"| {' | '.join(cells)} | {sum(times) / actions * 1e6:.2f} | {row['megabytes']:.0f} |", flush=True)
    ranks, microbatches = (64, 512) if quick else LINEAR[2]
    ours, theirs = (in_a_process(part, ranks, microbatches, 1) for part in (echelon, torch_1f1b))
    print(f"\n| 1F1B, {2 * ranks * microbatches:,} actions | Echelon | torch | ratio |\n|---|---|---|---|")
    for key, what in (("build", "all ranks' orders"), ("check", "check (Echelon: deadlocks, too)")):
        print(f"| {what} (s) | {ours[key]:.2f} | {theirs[key]:.2f} | {ours[key] / theirs[key]:.2f} |")
    print("\n| interleaved 1F1B, 2 chunks: actions | Echelon: build and check | torch: constructor | ratio |")
    print("|---|---|---|---|")
    for ranks, microbatches in LOWERED[: 2 if quick else None]:
        ours = in_a_process(echelon, ranks, microbatches, 2)
        theirs = in_a_process(torch_interleaved, ranks, microbatches, 2)
        total = ours["build"] + ours["check"]
        actions = 4 * ranks * microbatches
        print(f"| {actions:,} | {total:.3f} | {theirs['build']:.3f} | {total / theirs['build']:.3f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the small sizes")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        run_part(arguments.part)
    else:
        report(arguments.quick)
