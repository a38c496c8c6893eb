"""Prints the memory that the allocator's model reserves in published steps of MPT 13B and 30B on 8 GPUs.

Steps that fill their GPUs took longer than foreseen. Programs are recorded at their full depth, up to a minute each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from harness import print_environment, print_head, print_row
from models import depth_of
from recordings import Recordings
from rows import published
from run import GIB, Study, device_of

from echelon.foresight.play.allocator import memory_of
from echelon.foresight.play.devices import DEVICES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recordings", type=Path, default=Path("build/foresee"), help="folder of recorded programs")
    recordings = Recordings(parser.parse_args().recordings)
    study = Study(recordings)
    print_environment()
    print_head(
        "model | GPU | batch | reserved, GiB | of the GPU | times that the cache is emptied | longer than foreseen"
    )
    found = []
    for row in published():
        if row.recipe.world_size == 8 and row.recipe.model in ("mpt-13b", "mpt-30b"):
            trace = recordings.trace(row.recipe, depth_of(row.recipe.model))
            reserved, size = memory_of(trace).reserved_peak, DEVICES[row.gpu].memory_bytes
            # CUDA's context and NCCL's buffers take more than a GiB.
            emptied = memory_of(trace, size - GIB - GIB // 2).retries
            longer = row.tokens / row.tokens_per_second / study.predict(row, device_of(row)).seconds - 1
            found.append((reserved / size, row, reserved, emptied, longer))
    for share, row, reserved, emptied, longer in sorted(found, reverse=True):
        batch = f"{row.recipe.microbatch} x {row.accumulation} x {row.recipe.length}"
        cells = f"{reserved / GIB:.1f}", f"{share:.1%}", emptied, f"{longer:+.1%}"
        print_row(row.recipe.model, row.gpu, batch, *cells)


if __name__ == "__main__":
    main()
