"""Where does the time go that DDP adds to a step, and what do other ways to copy and to add gradients make of it?

    python benchmarks/ddp/experiments/tried.py                   # 2 ranks, the MLP of 10M, set_to_none=True
    python benchmarks/ddp/experiments/tried.py --keep-gradients  # set_to_none=False
    python benchmarks/ddp/experiments/tried.py --model gpt40m --rounds 8 --ways "as it is" "preset"

Over shared memory. A step of a local model, of DDP as it is, and of DDP with one thing changed, in turns of random
order, all ranks together: milliseconds that each adds to the local step, of the slowest rank and of all processors.
Then the parts of a local step and of one of DDP as it is, by rank. Some of the ways are wrong on purpose: they show
the cost of a part. The decisions have ways to add and to wait, too, from before the native library did both.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import echelon
from echelon.data_parallel import gradient_sync, reducer
from echelon.data_parallel.bucket_set import BucketMemory

sys.path.extend(map(str, Path(__file__).parents[1:3]))
from harness import ms, options_of, print_environment, print_head, print_row
from run import TASKS

WARMUP = 3

SHOWN = {"local": "local: ", "as it is": "DDP: "}
"""The ways of which parts are shown."""


class Way(NamedTuple):
    """Change of the library that is tried."""

    bucket_mb: float | None = None
    """None: one bucket holds all, as it does behind backward."""
    copies: str = "copy_"
    """How a new gradient comes into its bucket: copy_, memmove, half of it (wrong), or added to zeros by autograd
    (preset)."""
    reduces: bool = True
    """Whether buckets are reduced at all; wrong if not."""
    beside: bool = False
    """Whether full buckets are reduced beside backward, and not behind it; with a size of theirs."""


WAYS = {
    "as it is": Way(),
    "copied, not reduced": Way(reduces=False),
    "preset": Way(copies="preset"),
    "half copied": Way(copies="half"),
    "memmove": Way(copies="memmove"),
    "buckets of 4 MiB": Way(4.0),
    "buckets of 8 MiB": Way(8.0),
    "buckets of 25 MiB": Way(25.0),
    "buckets of 50 MiB": Way(50.0),
    "beside backward": Way(25.0, beside=True),
    "beside, buckets of 8 MiB": Way(8.0, beside=True),
}


class Nothing:
    """In place of a reduction's Work."""

    has_ended = True

    def wait(self) -> None:
        """Has nothing to wait for."""

    def exception(self) -> None:
        """Has not failed."""


class Switch:
    """Has the library go the way that was chosen last, and notes how long its parts take."""

    def __init__(self, group: echelon.ProcessGroup) -> None:
        self.group = group
        self.way = Way()
        self.seconds: dict[str, float] = {}
        self._take, self._reduce = BucketMemory.store, reducer.BucketCollectives.launch
        BucketMemory.store = self._timed("copied to buckets", self._copy)
        reducer.BucketCollectives.launch = lambda *of: self._reduce(*of) if self.way.reduces else Nothing()
        reducer.GradientReducer.finish = self._timed("waited behind backward", reducer.GradientReducer.finish)
        gradient_sync.can_overlap = lambda _: self.way.beside
        reducer.can_overlap = lambda _: self.way.bucket_mb is not None

    def step(self, model: torch.nn.Module, batch: torch.Tensor, set_to_none: bool) -> Callable[[], None]:
        """Returns a training step that records the seconds of its phases, and the number of new pages."""
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        forget = self._timed("zero_grad", lambda: optimizer.zero_grad(set_to_none=set_to_none))
        forward = self._timed("forward", lambda: model(batch).square().mean())
        backward = self._timed("backward", lambda loss: loss.backward())
        update = self._timed("optimizer", optimizer.step)

        def step() -> None:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            forget()
            backward(forward())
            update()
            self.seconds["page faults, 1000"] = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 1e6

        return step

    def preset(self, model: echelon.DDP) -> None:
        """Has a gradient that there is none of be its bucket's memory, zeroed, before autograd adds to it."""
        homes = model._sync.reducer.buckets

        def before(_: torch.Tensor, index: int, parameter: torch.nn.Parameter) -> None:
            if self.way.copies == "preset" and parameter.grad is None:
                bucket, place = model._sync.reducer.buckets.homes[index]
                view = model._sync.reducer.buckets.memories[bucket]._views[place]
                view.zero_()
                parameter.grad = view

        for index, parameter in enumerate(homes._parameters):
            parameter.register_hook(functools.partial(before, index=index, parameter=parameter))

    def unchanged(self) -> float:
        """Returns the seconds that forward and optimizer took, in which no way differs: where memory lies, does."""
        return self.seconds["forward"] + self.seconds["optimizer"]

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        return call

    def _copy(self, memory: BucketMemory, index: int) -> None:
        gradient, view = memory._parameters[index].grad, memory._views[index]
        if self.way.copies not in ("half", "memmove") or gradient is None or gradient is view:
            self._take(memory, index)
            return
        if self.way.copies == "memmove":
            ctypes.memmove(view.data_ptr(), gradient.data_ptr(), gradient.nbytes)
        else:
            half = gradient.numel() // 2
            view.view(-1)[:half].copy_(gradient.view(-1)[:half])
        memory.expose(index)


class Measured(NamedTuple):
    """Times of one rank."""

    rounds: list[list[list[float]]]
    """By round: seconds of each step, of the slowest rank; then of the processors of all; then what forward and
    optimizer take of it, the mean over ranks."""
    parts: list[dict[str, float]]
    """By round: seconds of this rank's parts of a local step, and of one of DDP as it is."""


def measure(group: echelon.ProcessGroup, options: argparse.Namespace) -> Measured:
    """Measures on one rank."""
    torch.set_num_threads(1)
    torch.manual_seed(group.rank)
    task, switch, ways = TASKS[options.model], Switch(group), {name: WAYS[name] for name in options.ways}
    batch = torch.randn(task.batch)
    steps = {"local": switch.step(task.make(), batch, not options.keep_gradients)}
    models: dict[Any, Callable[[], None]] = {}
    for name, way in ways.items():
        kind = way.bucket_mb, way.copies == "preset"
        if kind not in models:  # ways with the same buckets share them, so that it does not count where they lie
            switch.way = way
            model = echelon.DDP(task.make(), group, bucket_mb=way.bucket_mb or 25.0)
            models[kind] = switch.step(model, batch, not options.keep_gradients)
            models[kind]()  # the order of the buckets is known then
            if way.copies == "preset":
                switch.preset(model)
        steps[name] = models[kind]
    names, rounds, parts, end = list(steps), [], [], time.monotonic() + options.seconds
    for number in range(WARMUP + options.rounds):
        late = torch.tensor(time.monotonic() > end and number > WARMUP)
        if group.all_reduce(late, "max"):
            break
        taken = {}
        parts.append({})
        for name in random.Random(number).sample(names, len(names)):  # who comes after whom counts, too
            switch.way = ways.get(name, Way())
            switch.seconds.clear()
            group.barrier()
            start, start_busy = time.perf_counter(), time.process_time()
            steps[name]()
            taken[name] = time.perf_counter() - start, time.process_time() - start_busy, switch.unchanged()
            if name in SHOWN:
                took = {"step": taken[name][0], **switch.seconds}
                parts[-1].update({f"{SHOWN[name]}{part}": seconds for part, seconds in took.items()})
        elapsed, busy, rest = torch.tensor([taken[name] for name in names], dtype=torch.float64).t().contiguous()
        reduced = (group.all_reduce(each, how) for each, how in ((elapsed, "max"), (busy, "sum"), (rest, "mean")))
        rounds.append([each.tolist() for each in reduced])
    return Measured(rounds[WARMUP:], parts[WARMUP:])


def main() -> None:
    parser = options_of(__doc__, rounds=18, ranks=2)
    parser.add_argument("--model", choices=TASKS, default="mlp10m")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no other round begins")
    parser.add_argument("--keep-gradients", action="store_true", help="zero_grad(set_to_none=False)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    ranks = echelon.spawn(measure, options.ranks, (options,))
    rounds = ranks[0].rounds
    print_environment(
        f"{options.ranks} ranks, 1 thread each; {options.model}; set_to_none={not options.keep_gradients}; "
        f"medians of {len(rounds)} rounds, in ms"
    )
    print_head("way | step | adds | processors of all, added | forward and optimizer add")
    for index, name in enumerate(["local", *options.ways]):
        added = (ms([each[of][index] - each[of][0] for each in rounds], 1) for of in range(3))
        print_row(name, ms([times[index] for times, *_ in rounds], 1), *added)
    print()
    print_head(" | ".join(["part", *(f"rank {rank}" for rank in range(options.ranks))]))
    for part in sorted(ranks[0].parts[-1]):
        print_row(part, *(ms([taken.get(part, 0.0) for taken in rank.parts], 1) for rank in ranks))


if __name__ == "__main__":
    main()
