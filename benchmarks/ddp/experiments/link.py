"""How much of the communication over 1 Gbit/s and 1 ms is hidden behind backward, and what does torch's DDP take?

    python benchmarks/ddp/experiments/link.py
    python benchmarks/ddp/experiments/link.py --rounds 12 --bucket-mb 25
    python benchmarks/ddp/experiments/link.py --model idle10m  # leaves processors to the link

Two ranks in network namespaces of their own, joined by a slow link (benchmarks/slow_link.py; it needs root). Steps of a
local model, of Echelon's DDP over TCP and of torch's on Gloo take turns. What is not hidden is what DDP adds to the
local step, as a share of what the same reduction takes with nothing beside it. Where a process is the link, it computes
on the processors that the ranks compute with; how long is printed as well, by reduction of all gradients, and what the
ranks compute in a step: where all processors compute all the time, a step cannot take less than all that together.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import echelon

sys.path.extend(map(str, Path(__file__).parents[1:3]))
from harness import difference, ms, options_of, print_environment, print_head, ratio
from run import NUM_ALONE, TASKS, VARIANTS, WARMUP, measure
from slow_link import LOCAL, Unavailable, run_ranks, slow_link

BITS_PER_SECOND, DELAY = 1e9, 1e-3


def rank(options: argparse.Namespace) -> None:
    with echelon.init(backend="tcp") as group:
        before = sent_bytes()
        measured = measure(group, options, options.store)
        sent = (sent_bytes() - before) / num_reductions(options)
    if group.rank == 0:
        steps, reductions = measured
        local, ours, theirs = steps.seconds.values()
        alone = reductions.seconds["alone"]
        hidden = "-" if options.is_local else f"{1 - difference(ours, local) / statistics.median(alone):.0%}"
        busy = " / ".join(ms(each, 0) for each in steps.busy.values())
        moved = "-" if options.is_local else f"{sent / 2**20:.1f} MiB"
        cells = [*(ms(each, 0) for each in (local, ours, theirs, alone)), hidden, f"{ratio(ours, theirs):.2f}", busy]
        print(f"| {' | '.join([*cells, ms(reductions.busy['alone'], 0), moved])} |")


def num_reductions(options: argparse.Namespace) -> int:
    """Returns how often all parameters travel: two variants reduce in each step, and send them when they are made."""
    return 2 * (WARMUP + options.rounds) + NUM_ALONE + 1


def sent_bytes() -> int:
    """Returns the bytes that this end has sent over the link so far, with TCP's headers."""
    counter = Path("/sys/class/net/slow/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def report(options: argparse.Namespace) -> None:
    parameters = sum(parameter.numel() for parameter in TASKS[options.model].make().parameters())
    print_environment(
        f"{options.model} of {parameters / 1e6:.2f}M parameters, inputs {TASKS[options.model].batch} a rank; buckets "
        f"of {options.bucket_mb:g} MiB; medians of {options.rounds} rounds, in ms; variants {', '.join(VARIANTS)}"
    )
    columns = "local step | Echelon | torch on Gloo | the reduction alone | hidden | Echelon / torch"
    computes = f"the ranks compute: {' / '.join(VARIANTS)} | for the reduction alone"
    print_head(f"link | {columns} | {computes} | each sends for a reduction")
    given = ["--model", options.model, "--bucket-mb", str(options.bucket_mb), "--rounds", str(options.rounds)]
    busy = 0.0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--store", os.path.join(folder, "store"), *given]
        try:
            with slow_link(BITS_PER_SECOND, DELAY) as ends:
                name = f"1 Gbit/s, 1 ms, by {ends.made_by}"
                print(f"| {name} {run_ranks(ends, command, {'GLOO_SOCKET_IFNAME': 'slow'})[0].strip()}", flush=True)
                busy = ends.busy_seconds() / num_reductions(options)
        except Unavailable as error:
            print(error)
        command[3] += " local"
        print(f"| none {run_ranks(LOCAL, [*command, '--is-local'], {'GLOO_SOCKET_IFNAME': 'lo'})[0].strip()}")
    if busy:
        print(f"\nThe process that is the link computed {busy * 1e3:.0f} ms for each reduction.")


if __name__ == "__main__":
    parser = options_of(__doc__, rounds=6)
    parser.add_argument("--model", choices=TASKS, default="gpt10m-large")
    parser.add_argument("--bucket-mb", type=float, default=5, help="mebibytes, for both")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--is-local", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(set_to_none=True)
    options = parser.parse_args()
    rank(options) if options.store else report(options)
