"""Plays the published training steps on models of their GPUs, and prints measured beside predicted.

Programs that have not been recorded yet are recorded first, a few seconds each.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from harness import print_environment, print_head, print_row
from models import depth_of
from recordings import Recordings, depths, with_another_microbatch
from rows import FITTED, MPT_ATTENTION, NETWORKS, Row, published

from echelon.foresight.networks import cluster_of
from echelon.foresight.play.allocator import memory_of
from echelon.foresight.play.device import Device
from echelon.foresight.play.devices import DEVICES
from echelon.foresight.play.fusion import fuse
from echelon.foresight.play.played import Played
from echelon.foresight.play.player import play
from echelon.foresight.trace import Allocate, Entry, Free, Kernel, Trace

GIB = 1 << 30
_LOSS = ("_log_softmax", "nll_loss")


class Prediction(NamedTuple):
    seconds: float
    live: float
    """Bytes at the peak."""
    reserved: float
    shares: str
    """Matrix products, attention, other kernels and exposed communication, in % of the time of the deeper recording."""


def compiled(trace: Trace) -> Trace:
    """Returns a trace of which all kernels are compiled, except those of the loss, which is outside of the model."""
    return replace(trace, entries=tuple(map(_compiled, trace.entries)))


def _compiled(entry: Entry) -> Entry:
    is_in_model = type(entry) is Kernel and not entry.name.startswith(_LOSS)
    return entry._replace(is_compiled=True) if is_in_model else entry  # type: ignore[union-attr]


class Study:
    """Rows with the steps that were recorded for them."""

    def __init__(self, recordings: Recordings) -> None:
        self._recordings = recordings
        self._traces: dict[tuple[object, ...], Trace] = {}

    def predict(self, row: Row, device: Device) -> Prediction:
        """Plays a row's program, and extends results of two depths to the full depth."""
        recorded = depths(row)
        seconds, memory = [], []
        for layers in recorded:
            played = self._play(row, device, layers, 0)
            time = played.seconds
            if row.accumulation > 2:
                time += (row.accumulation - 2) * (self._play(row, device, layers, 1).seconds - time)
            seconds.append(time)
            memory.append(live_by_phase(played.roles[0].program.trace))
        role = played.roles[0]
        parts = (*role.kernel_seconds.values(), sum(played.exposed.values()))
        shares = " / ".join(f"{100 * part / played.seconds:.0f}" for part in parts)
        depth = depth_of(row.recipe.model)
        # The peak moves with the depth, from the loss to the backward of the blocks. So phases are extended one by one.
        peaks = [extended([each.get(phase, 0) for each in memory], recorded, depth) for phase in memory[0]]
        # Llama's authors ran with expandable segments.
        expandable = replace(played.roles[0].program.trace, has_expandable_segments=True)
        reserved = memory_of(expandable).reserved_peak if row.reserved_gib else 0
        return Prediction(extended(seconds, recorded, depth), max(peaks), reserved, shares)

    def _play(self, row: Row, device: Device, layers: int, more: int) -> Played:
        key = (row.recipe, layers, more, row.is_compiled)
        if key not in self._traces:
            trace = self._recordings.trace(row.recipe, layers)
            if more:
                trace = with_another_microbatch(trace)
            self._traces[key] = fuse(compiled(trace)) if row.is_compiled else trace
        world_size = row.recipe.world_size
        cluster = cluster_of(NETWORKS[row.gpu], device, world_size)
        # Memory is asked for without a limit: whether it fits is compared below.
        return play({0: self._traces[key]}, [0] * world_size, replace(device, memory_bytes=1 << 50), cluster)


def extended(values: Sequence[float], recorded: Sequence[int], depth: int) -> float:
    """Returns the value at the full depth, by the line through those at two depths."""
    if len(values) == 1:
        return values[0]
    slope = (values[1] - values[0]) / (recorded[1] - recorded[0])
    return values[0] + (depth - recorded[0]) * slope


def live_by_phase(trace: Trace) -> dict[str, float]:
    """Returns the most bytes of tensors in each part of a step."""
    live = sum(entry.num_bytes for entry in trace.live)
    sizes = {entry.storage: entry.num_bytes for entry in trace.live}
    part, peaks = "forward", dict[str, float]()
    for entry in trace.entries:
        if isinstance(entry, Kernel):
            name = trace.modules[entry.module] if entry.module >= 0 else ""
            part = f"{entry.phase} {'block' if 'layers' in name else 'rest'}"
        elif isinstance(entry, Allocate):
            sizes[entry.storage] = entry.num_bytes
            live += entry.num_bytes
        elif isinstance(entry, Free):
            live -= sizes.pop(entry.storage, 0)
        peaks[part] = max(live, peaks.get(part, 0))
    return peaks


def device_of(row: Row) -> Device:
    device = DEVICES[row.gpu]
    return replace(device, attention_share=MPT_ATTENTION[row.gpu]) if row.is_mpt else device


def fit(study: Study, rows: list[Row]) -> None:
    """Prints the two constants of each GPU that meet the rows of `FITTED`."""
    by_name = {str(row): row for row in reversed(rows)}

    def off(gpu: str, names: tuple[str, ...], matmul: float, attention: float) -> float:
        """Returns the sum of the logarithms of predicted by measured time."""
        total = 0.0
        for row in (by_name[name] for name in names):
            share = attention if row.is_mpt else DEVICES[gpu].attention_share
            tried = replace(DEVICES[gpu], matmul_share=matmul, attention_share=share)
            total += math.log(study.predict(row, tried).seconds / (row.tokens / row.tokens_per_second))
        return total

    for gpu, (for_matmul, for_attention) in FITTED.items():
        matmul, attention = DEVICES[gpu].matmul_share, MPT_ATTENTION.get(gpu, 0.0)
        for _ in range(3):
            matmul = _root(partial(_swapped, off, gpu, for_matmul, attention))
            if for_attention:
                attention = _root(partial(off, gpu, for_attention, matmul))
        print(f"{gpu}: matrix products {matmul:.3f}, MPT's attention {attention:.3f}")


def _swapped(off: Callable[..., float], gpu: str, names: tuple[str, ...], attention: float, matmul: float) -> float:
    return off(gpu, names, matmul, attention)


def _root(too_slow: Callable[[float], float]) -> float:
    low, high = 0.05, 1.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if too_slow(middle) > 0 else (low, middle)
    return (low + high) / 2


def table(study: Study, rows: list[Row], shows_all: bool) -> None:
    fitted = {name for names in FITTED.values() for part in names for name in part}
    for gpu in dict.fromkeys(row.gpu for row in rows):
        errors, memory, alarms, count = [], [], 0, 0
        seen: set[str] = set()
        if shows_all:
            print_head(
                "model | GPUs | batch | AC | measured tok/s | predicted | error | "
                "mm / attn / other / exposed % | GiB live"
            )
        for row in (row for row in rows if row.gpu == gpu):
            found = study.predict(row, device_of(row))
            predicted = row.tokens / found.seconds
            error = predicted / row.tokens_per_second - 1
            is_fitted = str(row) in fitted and str(row) not in seen
            seen.add(str(row))
            count += 1
            if not is_fitted:
                errors.append(abs(error))
            limit = DEVICES[gpu].memory_bytes
            alarms += found.live > limit
            gib = f"{found.live / GIB:.1f}"
            if row.reserved_gib:
                off = found.reserved / GIB / row.reserved_gib - 1
                memory.append(abs(off))
                gib += f", reserved {found.reserved / GIB:.1f} of {row.reserved_gib} ({off:+.1%})"
            if shows_all:
                recipe = row.recipe
                batch = f"{recipe.microbatch} x {row.accumulation} x {recipe.length}"
                name = recipe.model + (" compiled" if row.is_compiled else "")
                shown = f"{error:+.1%}" + (" fit" if is_fitted else "")
                measured = f"{row.tokens_per_second:,.0f}"
                ac = recipe.checkpointing
                print_row(name, recipe.world_size, batch, ac, measured, f"{predicted:,.0f}", shown, found.shares, gib)
        within = sum(error <= 0.1 for error in errors) / len(errors)
        print(
            f"\n{gpu}: {len(errors)} of {count} rows not fitted, median error {statistics.median(errors):.1%}, "
            f"within 10 %: {within:.0%}, worst {max(errors):.1%}; false alarms of memory: {alarms}"
            + (f"; reserved memory, {len(memory)} rows: worst {max(memory):.1%}" if memory else "")
            + "\n",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recordings", type=Path, default=Path("build/foresee"), help="folder of recorded programs")
    parser.add_argument("--gpu", help="rows of one GPU only")
    parser.add_argument("--fit", action="store_true", help="print the fitted constants instead")
    parser.add_argument("--summary", action="store_true", help="leave out the rows")
    options = parser.parse_args()
    study = Study(Recordings(options.recordings))
    rows = [row for row in published() if options.gpu in (None, row.gpu)]
    if options.fit:
        fit(study, published())
        return
    print_environment("Published training steps, dense and in bfloat16: tokens per second of a GPU.")
    table(study, rows, not options.summary)


if __name__ == "__main__":
    main()
