"""Where does the time go that DDP adds to a step, and what do other ways to copy and to add gradients make of it?

    python benchmarks/ddp/tried.py                              # 2 ranks, the MLP of 10M, zero_grad(set_to_none=True)
    python benchmarks/ddp/tried.py --keep-gradients             # set_to_none=False
    python benchmarks/ddp/tried.py --model gpt40m --rounds 8 --ways "as it is" "preset"

Over shared memory. A step of a local model, of DDP as it is, and of DDP with one thing changed, in turns of changing
order, all ranks together: milliseconds that each adds to the local step, of the slowest rank and of all processors.
Then the parts of a step of DDP as it is, by rank. Some of the ways are wrong on purpose: they show what a part costs.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from run import TASKS, WARMUP, training_step

import echelon
from echelon.backends.shared import reducing
from echelon.data_parallel import reducer
from echelon.data_parallel.bucket_memory import BucketMemory

KIBIBYTE = 1 << 10


class Way(NamedTuple):
    """What is different."""

    bucket_mb: float = 25.0
    copies: str = "copy_"
    """How a new gradient comes into its bucket: copy_, memmove, half of it (wrong), or added to zeros by autograd."""
    divides: bool = True
    """Whether sums of 2 ranks are divided by 2, and not multiplied by a half."""
    slice_bytes: int = 256 * KIBIBYTE
    """How much is added and written at a time."""
    reduces: bool = True
    """Whether buckets are reduced at all; wrong if not."""


WAYS = {
    "as it is": Way(),
    "copied, not reduced": Way(reduces=False),
    "preset": Way(copies="preset"),
    "half copied": Way(copies="half"),
    "memmove": Way(copies="memmove"),
    "times a half": Way(divides=False),
    "slices of 64 KiB": Way(slice_bytes=64 * KIBIBYTE),
    "slices of 1 MiB": Way(slice_bytes=1024 * KIBIBYTE),
    "buckets of 4 MiB": Way(4.0),
    "buckets of 8 MiB": Way(8.0),
    "buckets of 50 MiB": Way(50.0),
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

    def __init__(self) -> None:
        self.way = Way()
        self.seconds: dict[str, float] = {}
        self._take, self._reduce = BucketMemory.take, reducer.GradientReducer._reduce
        self._slices = reducing._reduce_slices
        BucketMemory.take = self._timed("copied to buckets", self._copy)
        reducer.GradientReducer._reduce = lambda *of: self._reduce(*of) if self.way.reduces else Nothing()
        reducer.GradientReducer.finish = self._timed("waited behind backward", reducer.GradientReducer.finish)
        reducing._reduce_slices = self._timed("added and written", self._add)
        reducing.meet_with = self._timed("waited for all to come", reducing.meet_with)
        reducing.part_together = self._timed("waited for all to be done", reducing.part_together)

    def preset(self, model: echelon.DDP) -> None:
        """Has a gradient that there is none of be its bucket's memory, zeroed, before autograd adds to it."""
        homes = model._reducer._homes

        def before(_: torch.Tensor, index: int, parameter: torch.nn.Parameter) -> None:
            if self.way.copies == "preset" and parameter.grad is None:
                bucket, place = model._reducer._homes._homes[index]
                view = model._reducer._homes.memories[bucket]._views[place]
                view.zero_()
                parameter.grad = view

        for index, parameter in enumerate(homes._parameters):
            parameter.register_hook(functools.partial(before, index=index, parameter=parameter))

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
        memory.give(index)

    def _add(self, shared: Any, call: Any, everywhere: Sequence[torch.Tensor], operator: Any) -> None:
        reducing._SLICE_BYTES = self.way.slice_bytes
        if self.way.divides:
            self._slices(shared, call, everywhere, operator)
            return
        for first, second in reducing._pieces_of_slices(shared, everywhere):
            second.copy_(torch.add(first, second, out=first).mul_(0.5))
        reducing.part_together(shared, call)


class Measured(NamedTuple):
    """What one rank took."""

    rounds: list[tuple[list[float], list[float]]]
    """By round: seconds of each step, of the slowest rank; then of the processors of all."""
    parts: list[dict[str, float]]
    """By round: seconds of this rank's parts of DDP as it is."""


def measure(group: echelon.ProcessGroup, options: argparse.Namespace) -> Measured:
    """Measures on one rank."""
    torch.set_num_threads(1)
    torch.manual_seed(group.rank)
    task, switch, ways = TASKS[options.model], Switch(), {name: WAYS[name] for name in options.ways}
    batch = torch.randn(task.batch)
    steps = {"local": training_step(task.make(), batch, not options.keep_gradients)}
    for name, way in ways.items():
        model = echelon.DDP(task.make(), group, bucket_mb=way.bucket_mb)
        steps[name] = training_step(model, batch, not options.keep_gradients)
        if way.copies == "preset":
            steps[name]()  # the order of the buckets is known then
            switch.preset(model)
    names, rounds, parts = list(steps), [], []
    for number in range(WARMUP + options.rounds):
        shift, taken = number % len(names), {}
        for name in names[shift:] + names[:shift]:
            switch.way = ways.get(name, Way())
            switch.seconds.clear()
            group.barrier()
            start, start_busy = time.perf_counter(), time.process_time()
            steps[name]()
            taken[name] = time.perf_counter() - start, time.process_time() - start_busy
            if name == "as it is":
                parts.append({"step": taken[name][0], "local step": 0.0, **switch.seconds})
        if parts:
            parts[-1]["local step"] = taken["local"][0]
        elapsed, busy = torch.tensor([taken[name] for name in names], dtype=torch.float64).t().contiguous()
        rounds.append((group.all_reduce(elapsed, "max").tolist(), group.all_reduce(busy, "sum").tolist()))
    return Measured(rounds[WARMUP:], parts[WARMUP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=TASKS, default="mlp10m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--keep-gradients", action="store_true", help="zero_grad(set_to_none=False)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    print(f"{platform.platform()}, Python {platform.python_version()}, torch {torch.__version__}")
    print(f"{options.ranks} ranks, 1 thread each; {options.model}; set_to_none={not options.keep_gradients}; ", end="")
    print(f"medians of {options.rounds} rounds, in ms\n")
    ranks = echelon.spawn(measure, options.ranks, (options,))
    rounds = ranks[0].rounds
    print("| way | step | adds | processors of all, added |\n|---|---|---|---|")
    for index, name in enumerate(["local", *options.ways]):
        step = statistics.median(times[index] for times, _ in rounds)
        adds, busy = (statistics.median(each[of][index] - each[of][0] for each in rounds) for of in (0, 1))
        print(f"| {name} | {step * 1e3:.1f} | {adds * 1e3:.1f} | {busy * 1e3:.1f} |")
    if ranks[0].parts:
        print("\n| part | " + " | ".join(f"rank {rank}" for rank in range(options.ranks)) + " |")
        print("|---|" + "---|" * options.ranks)
        for part in ranks[0].parts[-1]:
            each = [statistics.median(taken.get(part, 0.0) for taken in rank.parts) * 1e3 for rank in ranks]
            print(f"| {part} | {' | '.join(f'{value:.1f}' for value in each)} |")


if __name__ == "__main__":
    main()
