"""How near to the ideal does a 1F1B come that is written by hand for one model?

    python benchmarks/pipeline/experiments/by_hand.py               # 16 x (Linear 512 + ReLU)
    python benchmarks/pipeline/experiments/by_hand.py --width 8     # a tiny model

Two ranks run a loop with nothing in it but the layers, the backwards, a copy of each tensor into a slot of a file that
both map, and a counter that the other one reads until it has changed: no checks, no names, no random numbers, no loss
for all, no limits, and it waits for ever. What it takes over the ideal is what Python and the memory take. Echelon's
pipeline, torch's and the steps without messages take turns with it, as in run.py.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from pathlib import Path

import torch

import echelon
from echelon.pipeline.plan.action import actions_of

sys.path.extend(map(str, Path(__file__).parents[1:3]))
from harness import gloo, in_turns, ms, options_of, print_head, print_row, ratio
from run import (
    RANKS,
    Alone,
    Work,
    costs_of,
    equal_parts,
    every_rank,
    loss_of,
    our_pipeline,
    our_step,
    schedule_of,
    torch_step,
)

_COUNTERS = 4096
"""Bytes of the file before its slots."""


class ManualStep:
    """One rank of a 1F1B of two."""

    def __init__(self, work: Work, rank: int, path: str) -> None:
        self._work, self._rank = work, rank
        self._module = equal_parts(work.model(), RANKS)[rank]
        self._parameters = list(self._module.parameters())
        inputs, targets = work.batch()
        self._inputs, self._targets = inputs.chunk(work.microbatches), targets.chunk(work.microbatches)
        self._order = [action for step in schedule_of(work, rank, "1f1b").orders[rank] for action in actions_of(step)]
        numel, count = work.samples * work.width, work.microbatches
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, _COUNTERS + RANKS * count * numel * 4)
        memory = mmap.mmap(file, 0)
        os.close(file)
        self._counters = memoryview(memory)[:_COUNTERS].cast("Q")
        flat = torch.frombuffer(memory, dtype=torch.float32, offset=_COUNTERS)
        self._slots = flat.view(RANKS, count, work.samples, work.width)
        self._sent = self._received = 0

    def step(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        held: dict[int, torch.Tensor] = {}
        entered: dict[int, torch.Tensor] = {}
        for _, kind, microbatch in self._order:
            if kind == "F" and self._rank == 0:
                held[microbatch] = self._module(self._inputs[microbatch])
                self._send(microbatch, held[microbatch].detach())
            elif kind == "F":
                entered[microbatch] = self._receive(microbatch).detach().requires_grad_()
                loss = loss_of(self._module(entered[microbatch]), self._targets[microbatch])
                held[microbatch] = loss / self._work.microbatches
            elif self._rank == 0:
                held.pop(microbatch).backward(self._receive(microbatch))
            else:
                held.pop(microbatch).backward()
                gradient = entered.pop(microbatch).grad
                assert gradient is not None
                self._send(microbatch, gradient)

    def _send(self, microbatch: int, tensor: torch.Tensor) -> None:
        self._slots[self._rank, microbatch].copy_(tensor)
        self._sent += 1
        self._counters[self._rank * 8] = self._sent

    def _receive(self, microbatch: int) -> torch.Tensor:
        self._received += 1
        while self._counters[(1 - self._rank) * 8] < self._received:
            os.sched_yield()
        return self._slots[1 - self._rank, microbatch]


def run(group: echelon.ProcessGroup, work: Work, rounds: int, folder: str) -> dict[str, list[float]]:
    """Returns of each round the seconds of the slowest rank by contestant, and the ideal."""
    with gloo(group, f"{folder}/store"):
        pipe = our_pipeline(group, work, "1f1b")
        ours = our_step(pipe, work)
        ours()
        alone, hand = Alone(pipe, work, group.rank), ManualStep(work, group.rank, f"{folder}/slots")
        steps = {"by hand": hand.step, "Echelon": ours, "torch on Gloo": torch_step(work, group.rank, "1f1b")}
        seconds = in_turns(group, {**steps, "ideal": alone.step}, rounds).seconds
        rows = every_rank(group, alone.rounds[-rounds:])
    schedule = pipe.schedule
    return {**seconds, "ideal": [float(schedule.simulate(costs_of(one, schedule)).makespan) for one in rows]}


def main() -> None:
    parser = options_of(__doc__, rounds=31)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    work = Work(options.width, 16, 16, 8)
    with tempfile.TemporaryDirectory() as folder:
        seconds = echelon.spawn(run, RANKS, (work, options.rounds, folder))[0]
    print_head("1F1B | ms | of the ideal")
    for name, taken in seconds.items():
        print_row(name, ms(taken), f"{ratio(taken, seconds['ideal']):.2f}")


if __name__ == "__main__":
    main()
