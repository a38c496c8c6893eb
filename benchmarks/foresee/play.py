"""Time to play a step on many ranks: `python benchmarks/foresee/play.py`.

A pipeline with tensor parallelism is recorded on one rank for each stage, with the example of the docs and a narrow
model. Its ranks with other places in tensor parallelism are made from these, so every (stage, place) is a role.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from echelon.foresight.networks import cluster_of
from echelon.foresight.play.devices import device_named
from echelon.foresight.play.player import play
from echelon.foresight.record.run import record
from echelon.foresight.trace import Message, Trace

EXAMPLE = Path(__file__).parents[2] / "examples" / "foresee_llama.py"
TENSOR = 8
LAYERS = 2
"""Layers of a stage."""


class Job(NamedTuple):
    """Ranks of a job: `stages` x `replicas` x `TENSOR`."""

    stages: int
    replicas: int

    @property
    def world_size(self) -> int:
        return self.stages * self.replicas * TENSOR

    @property
    def name(self) -> str:
        return f"{self.world_size:,} ranks in {self.stages * TENSOR} roles"


JOBS = (Job(8, 16), Job(8, 256), Job(16, 128))


def recorded(stages: int) -> dict[int, Trace]:
    """Returns the step of the first rank of each stage, of two replicas."""

    def main() -> None:
        module = runpy.run_path(str(EXAMPLE), run_name="example")
        module["MODELS"]["tiny"] = (256, LAYERS * stages, 8, 8, 512, 512)
        module["main"]()

    sys.argv = [
        str(EXAMPLE),
        "--model",
        "tiny",
        "--tp",
        str(TENSOR),
        "--pp",
        str(stages),
        "--microbatches",
        str(stages),
    ]
    warnings.simplefilter("ignore")
    world_size = stages * 2 * TENSOR
    return record(main, world_size, [2 * TENSOR * stage for stage in range(stages)], ranks_per_host=8)


def roles_of(traces: Mapping[int, Trace], job: Job) -> dict[int, Trace]:
    """Returns a role for each stage and place in tensor parallelism, in a job with other replicas."""

    def moved(rank: int, tensor: int) -> int:
        """Returns a rank of the recorded job in this one, `tensor` places further."""
        stage, rest = divmod(rank, 2 * TENSOR)
        replica, place = divmod(rest, TENSOR)
        return (stage * job.replicas + replica) * TENSOR + (place + tensor) % TENSOR

    found = {}
    for rank, trace in traces.items():
        stage = rank // (2 * TENSOR)
        for tensor in range(TENSOR):
            groups = []
            for group in trace.groups:
                if group.name == "dp":
                    ranks = tuple((stage * job.replicas + each) * TENSOR + tensor for each in range(job.replicas))
                else:
                    ranks = tuple(sorted(moved(each, tensor) for each in group.ranks))
                groups.append(group._replace(ranks=ranks))
            entries = tuple(
                entry._replace(peer=moved(entry.peer, tensor)) if isinstance(entry, Message) else entry
                for entry in trace.entries
            )
            own = moved(rank, tensor)
            found[own] = replace(trace, rank=own, world_size=job.world_size, groups=tuple(groups), entries=entries)
    return found


def classes_of(job: Job) -> list[int]:
    """Returns the role of every rank: that of the first replica."""
    width = job.replicas * TENSOR
    return [rank // width * width + rank % TENSOR for rank in range(job.world_size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    device = device_named("h100")
    by_stages: dict[int, dict[int, Trace]] = {}
    for job in JOBS:
        if job.stages not in by_stages:
            by_stages[job.stages] = recorded(job.stages)
        traces = roles_of(by_stages[job.stages], job)
        cluster = cluster_of("infiniband-400g", device, job.world_size, job.world_size // 8)
        seconds = []
        for _ in range(options.rounds):
            begin = time.perf_counter()
            step = play(traces, classes_of(job), device, cluster).seconds
            seconds.append(time.perf_counter() - begin)
        entries = sum(len(trace.entries) for trace in traces.values())
        print(
            f"{job.name}, {entries:,} entries: {statistics.median(seconds):.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f}), step {step * 1e3:.6f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
