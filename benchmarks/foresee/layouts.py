"""Published steps of GPT with tensor parallelism and pipelines on A100, beside their forecast.

The program is Megatron's, see `megatron.py`. Only the stages of one pipeline are recorded, since others do the same.
The time of a step grows linearly with the microbatches, so two smaller numbers of microbatches are recorded. Recordings
are kept in a folder.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import pickle
import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from harness import print_environment, print_head, print_row
from megatron import Program, train

from echelon.foresight.networks import cluster_of
from echelon.foresight.play.devices import device_named
from echelon.foresight.play.fusion import fuse
from echelon.foresight.play.player import play
from echelon.foresight.record.run import record
from echelon.foresight.trace import Message, Trace

PER_HOST = 8


class Layout(NamedTuple):
    """A published step."""

    name: str
    program: Program
    nics: int
    """NICs of a host, of 200 Gb/s each."""
    is_batched: bool
    """Whether messages are sent in batches, so that they have the channels of a communicator of all ranks."""
    step_seconds: float


def recorded(folder: Path, layout: Layout, microbatches: int) -> dict[int, Trace]:
    """Returns a trace of each stage of the first pipeline, by its rank."""
    program = layout.program._replace(microbatches=microbatches)
    source = Path(__file__).with_name("megatron.py").read_bytes()
    name = hashlib.sha256(repr(program).encode() + source).hexdigest()[:16]
    path = folder / f"{layout.name}-{microbatches}-{name}.pickle"
    if not path.exists():
        world_size = program.pp * program.dp * program.tp
        firsts = range(0, world_size, world_size // program.pp)
        traces = record(partial(train, program), world_size, firsts)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(pickle.dumps({rank: fuse(traces[rank]) for rank in firsts}))
        unfinished.rename(path)
    found: dict[int, Trace] = pickle.loads(path.read_bytes())
    return {rank: batched(trace) for rank, trace in found.items()} if layout.is_batched else found


def batched(trace: Trace) -> Trace:
    """Returns the trace with each lone message as a batch of one, as Megatron sends it, that waits for no other."""
    entries = (
        entry._replace(batch=len(trace.entries) + index, is_ordered=False)
        if isinstance(entry, Message) and entry.batch < 0
        else entry
        for index, entry in enumerate(trace.entries)
    )
    return replace(trace, entries=tuple(entries))


def seconds_of(folder: Path, layout: Layout) -> tuple[float, float]:
    """Returns the time of a step and its bubble."""
    program = layout.program
    world_size = program.pp * program.dp * program.tp
    first = program.pp if program.schedule == "1F1B" else 2 * program.pp
    second = first + program.pp
    if program.microbatches <= second:
        first = second = program.microbatches
    stride = world_size // program.pp
    classes = [rank // stride * stride for rank in range(world_size)]
    device, hosts = device_named("a100"), max(1, world_size // PER_HOST)
    cluster = cluster_of("infiniband-200g", device, world_size, hosts, oversubscription=PER_HOST / layout.nics)
    found = []
    for microbatches in sorted({first, second}):
        played = play(recorded(folder, layout, microbatches), classes, device, cluster)
        found.append((played.seconds, played.bubble * played.seconds))
    more = (program.microbatches - first) / (second - first) if second > first else 0
    seconds, bubble = (a + more * (b - a) for a, b in zip(found[0], found[-1], strict=True))
    return seconds, bubble / seconds


def layouts() -> list[Layout]:
    """Returns the published rows."""
    with Path(__file__).with_name("layouts.csv").open() as file:
        return [_layout(row) for row in csv.DictReader(file)]


def _layout(row: dict[str, str]) -> Layout:
    numbers = {
        name: int(row[name]) for name in Program._fields if name not in ("schedule", "recompute", "microbatches")
    }
    microbatches = int(row["global_batch"]) // (numbers["microbatch"] * numbers["dp"])
    program = Program(**numbers, schedule=row["schedule"], recompute=row["recompute"] == "1", microbatches=microbatches)
    return Layout(row["name"], program, int(row["nics"]), row["messages"] == "batched", float(row["step_seconds"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="rows: all if none is given")
    parser.add_argument("--recordings", type=Path, default=Path("build/foresee"), help="folder of recorded programs")
    args = parser.parse_args()
    print_environment()
    print_head("row | tp x pp x dp | schedule | measured s | foreseen s | error | bubble")
    errors = []
    for layout in layouts():
        if args.names and layout.name not in args.names:
            continue
        program = layout.program
        seconds, bubble = seconds_of(args.recordings, layout)
        errors.append(seconds / layout.step_seconds - 1)
        size = f"{program.tp} x {program.pp} x {program.dp}"
        schedule = f"{program.schedule} v{program.stages_per_rank}" if program.pp > 1 else "-"
        shown = f"{layout.step_seconds:.2f}", f"{seconds:.2f}", f"{errors[-1]:+.1%}", f"{bubble:.1%}"
        print_row(layout.name, size, schedule, *shown)
        sys.stdout.flush()
    print(f"\nmedian error {statistics.median(map(abs, errors)):.1%} on {len(errors)} rows")


if __name__ == "__main__":
    main()
