"""Where does the time go that DDP adds to a step, and what do other ways to copy and to add gradients make of it?

    python benchmarks/ddp/experiments/tried.py                   # 2 ranks, the MLP of 10M, set_to_none=True
    python benchmarks/ddp/experiments/tried.py --keep-gradients  # set_to_none=False
    python benchmarks/ddp/experiments/tried.py --model gpt40m --rounds 8 --ways "as it is" "preset"

Over shared memory. A step of a local model, of DDP as it is, and of DDP with one thing changed, in turns of random
order, all ranks together: milliseconds that each adds to the local step, of the slowest rank and of all processors.
Then the parts of a local step and of one of DDP as it is, by rank. Some of the ways are wrong on purpose: they show
what a part costs.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import echelon
from echelon.backends.shared.collectives import reducing
from echelon.backends.shared.memory.waiting import SpinThenSleep
from echelon.data_parallel import gradient_sync, reducer
from echelon.data_parallel.bucket_set import BucketMemory

sys.path.extend(map(str, Path(__file__).parents[1:3]))
from harness import ms, options_of, print_environment, print_head, print_row
from run import TASKS

KIBIBYTE = 1 << 10
WARMUP = 3

SHOWN = {"local": "local: ", "as it is": "DDP: ", "straight": "straight: "}
"""The ways of which parts are shown."""


class Way(NamedTuple):
    """Change of the library that is tried."""

    bucket_mb: float | None = None
    """None: one bucket holds all, as it does behind backward."""
    copies: str = "copy_"
    """How a new gradient comes into its bucket: copy_, memmove, half of it (wrong), or added to zeros by autograd
    (preset); or straight: only what other ranks add up, and this rank's slice is added up from the new gradients."""
    divides: bool = True
    """Whether sums of n ranks are divided by n, and not multiplied by 1 / n."""
    slice_bytes: int = 256 * KIBIBYTE
    """How much is added and written at a time."""
    reduces: bool = True
    """Whether buckets are reduced at all; wrong if not."""
    beside: bool = False
    """Whether full buckets are reduced beside backward, and not behind it; with a size of theirs."""
    sleeps: bool = False
    """Whether a rank that waits for others sleeps at once, and does not first look again and give its core away."""


WAYS = {
    "as it is": Way(),
    "copied, not reduced": Way(reduces=False),
    "preset": Way(copies="preset"),
    "half copied": Way(copies="half"),
    "straight": Way(copies="straight"),
    "straight, beside, buckets of 8 MiB": Way(8.0, copies="straight", beside=True),
    "memmove": Way(copies="memmove"),
    "multiplied": Way(divides=False),
    "slices of 64 KiB": Way(slice_bytes=64 * KIBIBYTE),
    "slices of 1 MiB": Way(slice_bytes=1024 * KIBIBYTE),
    "buckets of 4 MiB": Way(4.0),
    "buckets of 8 MiB": Way(8.0),
    "buckets of 25 MiB": Way(25.0),
    "buckets of 50 MiB": Way(50.0),
    "beside backward": Way(25.0, beside=True),
    "beside, buckets of 8 MiB": Way(8.0, beside=True),
    "sleeps at once": Way(sleeps=True),
}


class Nothing:
    """In place of a reduction's Work."""

    has_ended = True

    def wait(self) -> None:
        """Has nothing to wait for."""

    def exception(self) -> None:
        """Has not failed."""


class Straight:
    """New gradients of one bucket. Only the slices that other ranks add up are copied to it."""

    def __init__(self, memory: BucketMemory, group: echelon.ProcessGroup) -> None:
        self.fresh: dict[int, torch.Tensor] = {}
        self._memory, self._rank = memory, group.rank
        size = -(-memory.flat.numel() // group.world_size // reducing._ALIGNMENT) * reducing._ALIGNMENT
        self._begin, self._end = group.rank * size, (group.rank + 1) * size
        self._starts = [view.storage_offset() for view in memory._views]

    def take(self, index: int, gradient: torch.Tensor) -> None:
        """Copies a new gradient outside of this rank's slice, and keeps it until the slice is added up."""
        view = self._memory._views[index]
        assert gradient.stride() == view.stride()
        self.fresh[index] = gradient
        to, new = self._flat(view), self._flat(gradient)
        begin, end = (min(max(edge - self._starts[index], 0), len(to)) for edge in (self._begin, self._end))
        with torch.no_grad():
            to[:begin].copy_(new[:begin])
            to[end:].copy_(new[end:])
        self._memory.expose(index)

    def add(self, everywhere: Sequence[torch.Tensor]) -> None:
        """Adds up this rank's slice from its new gradients and the other ranks' copies."""
        fresh, self.fresh = self.fresh, {}
        for index, gradient in fresh.items():
            start = self._starts[index]
            begin, end = max(self._begin, start), min(self._end, start + gradient.numel())
            if begin >= end:
                continue
            own = self._flat(gradient)[begin - start : end - start]
            parts = [own if rank == self._rank else flat[begin:end] for rank, flat in enumerate(everywhere)]
            targets = [flat[begin:end] for flat in everywhere]
            pieces = [torch.split(each, reducing._SLICE_BYTES // each.itemsize) for each in (*parts, *targets)]
            for piece in zip(*pieces, strict=True):
                (first, second, *others), (target, *copies) = piece[: len(parts)], piece[len(parts) :]
                torch.add(first, second, out=target)
                for other in others:
                    target.add_(other)
                target.div_(len(parts))
                for copy in copies:
                    copy.copy_(target)

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class Switch:
    """Has the library go the way that was chosen last, and notes how long its parts take."""

    def __init__(self, group: echelon.ProcessGroup) -> None:
        self.group = group
        self.way = Way()
        self.seconds: dict[str, float] = {}
        self._take, self._reduce = BucketMemory.store, reducer.BucketCollectives.launch
        self._slices, self._meet_with = reducing._reduce_slices, reducing.meet_with
        self._straight: dict[int, Straight] = {}
        self._reduced = 0
        BucketMemory.store = self._timed("copied to buckets", self._copy)
        reducer.BucketCollectives.launch = lambda *of: self._reduce(*of) if self.way.reduces else Nothing()
        reducer.GradientReducer.finish = self._timed("waited behind backward", reducer.GradientReducer.finish)
        reducing._reduce_slices = self._timed("added and written", self._add)
        reducing.meet_with = self._timed("waited for all to come", self._meet)
        reducing.exit_barrier = self._timed("waited for all to be done", reducing.exit_barrier)
        self._wait, SpinThenSleep.wait = SpinThenSleep.wait, lambda *of: self._wait_in_the_way(*of)
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

    def _wait_in_the_way(self, waiter: SpinThenSleep, *of: Any) -> None:
        ranges = waiter._spins, waiter._yields
        if self.way.sleeps:
            waiter._spins = waiter._yields = range(0)
        try:
            self._wait(waiter, *of)
        finally:
            waiter._spins, waiter._yields = ranges

    def _meet(self, shared: Any, call: Any, flat: torch.Tensor, *of: Any) -> Any:
        # Noted here: the tensors of all ranks come to `_add` by another mapping of the same memory.
        self._reduced = flat.data_ptr()
        return self._meet_with(shared, call, flat, *of)

    def _copy(self, memory: BucketMemory, index: int) -> None:
        gradient, view = memory._parameters[index].grad, memory._views[index]
        if self.way.copies == "straight" and gradient is not None and gradient is not view:
            if memory.flat.data_ptr() not in self._straight:
                self._straight[memory.flat.data_ptr()] = Straight(memory, self.group)
            self._straight[memory.flat.data_ptr()].take(index, gradient)
            return
        if self.way.copies not in ("half", "memmove") or gradient is None or gradient is view:
            self._take(memory, index)
            return
        if self.way.copies == "memmove":
            ctypes.memmove(view.data_ptr(), gradient.data_ptr(), gradient.nbytes)
        else:
            half = gradient.numel() // 2
            view.view(-1)[:half].copy_(gradient.view(-1)[:half])
        memory.expose(index)

    def _add(self, shared: Any, call: Any, everywhere: Sequence[torch.Tensor], operator: Any) -> None:
        reducing._SLICE_BYTES = self.way.slice_bytes
        straight = self._straight.get(self._reduced) if self.way.copies == "straight" else None
        if straight is not None and straight.fresh:
            straight.add(everywhere)
            reducing.exit_barrier(shared, call)
            return
        if self.way.divides:
            self._slices(shared, call, everywhere, operator)
            return
        for first, *others in reducing._pieces_of_slices(shared, everywhere):
            for other in others:
                first.add_(other)
            first.mul_(1 / (1 + len(others)))
            for other in others:
                other.copy_(first)
        reducing.exit_barrier(shared, call)


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
