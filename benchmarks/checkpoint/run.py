"""Time of checkpoints of a model with AdamW: beside a memcpy, dd, and torch.distributed.checkpoint.

Each rank has a share of the parameters, as a stage of a pipeline has. All ranks save and load together, and a turn
counts as the time of the slowest. Contestants take turns.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed.checkpoint as dcp
from harness import gloo, options_of, print_environment, print_head, print_row
from torch import Tensor, nn

import echelon
from echelon.checkpoint.ranks.loading import open_checkpoint
from echelon.checkpoint.ranks.saving import Saver
from echelon.checkpoint.state import Piece, Spec, State, Wanted

WIDTH = 2048
SAMPLES = 16
STEPS = 4
"""Undisturbed steps of a round, before each asynchronous save."""


class Trainer:
    """Share of a model with AdamW, and its step."""

    def __init__(self, group: echelon.ProcessGroup, num_layers: int) -> None:
        self.group = group
        torch.set_num_threads(1)
        torch.manual_seed(group.rank)
        names = [str(number) for number in range(num_layers) if number % group.world_size == group.rank]
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in names})
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), fused=True)
        self.inputs = torch.randn(SAMPLES, WIDTH)
        self.step()

    def step(self) -> None:
        """Trains one step, all ranks together."""
        value = self.inputs
        for layer in self.layers.values():
            value = torch.tanh(layer(value))
        value.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.group.barrier()

    def tensors(self) -> dict[str, Tensor]:
        """Returns parameters and moments by name."""
        found = {}
        for name, parameter in self.layers.named_parameters():
            found[name] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer/state/{name}/{key}"] = value
        return found


class Clock:
    """Times of the slowest rank, by name."""

    def __init__(self, group: echelon.ProcessGroup) -> None:
        self._group = group
        self.seconds: dict[str, list[float]] = {}

    def measure(self, name: str, act: Callable[[], Any]) -> Any:
        """Runs something on all ranks together, and returns its result."""
        self._group.barrier()
        begin = time.perf_counter()
        result = act()
        self.add(name, time.perf_counter() - begin)
        return result

    def add(self, name: str, seconds: float) -> None:
        """Adds a time; collective."""
        slowest = self._group.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max")
        self.seconds.setdefault(name, []).append(slowest.item())


def state_of(tensors: dict[str, Tensor]) -> State:
    """Returns the state of a rank with these tensors."""
    specs = {name: Spec(tuple(value.shape), value.dtype) for name, value in tensors.items()}
    return State(specs, [Piece(name, 0, value) for name, value in tensors.items()], {}, {})


def measure(group: echelon.ProcessGroup, folder: str, num_layers: int, rounds: int) -> dict[str, list[float]]:
    """Measures on one rank. Returns the seconds of each contestant by round, and the bytes of all ranks."""
    with gloo(group, f"{folder}/rendezvous"):
        trainer, clock = Trainer(group, num_layers), Clock(group)
        tensors = trainer.tensors()
        state = state_of(tensors)
        size = sum(value.numel() * value.element_size() for value in tensors.values())
        target = torch.ones(size, dtype=torch.uint8)
        saver = Saver(f"{folder}/echelon", group, keep=1)
        # The first save makes the buffer, and the first of torch imports and opens much.
        clock.measure("first async save", lambda: saver.save(1, state, wait=False)).wait()
        dcp.save(dict(tensors), checkpoint_id=f"{folder}/dcp-0")
        for number in range(rounds):
            clock.measure("memcpy", lambda: copy(tensors, target))
            # Names are bound by default arguments: the loop goes on.
            beside(
                trainer,
                clock,
                "async save",
                lambda step=10 + number: saver.save(step, state, wait=False),
                lambda handle: handle.done(),
            ).wait()
        target = torch.empty(0)
        for number in range(rounds):
            beside(
                trainer,
                clock,
                "dcp.async_save",
                lambda step=number: dcp.async_save(dict(tensors), checkpoint_id=f"{folder}/dcp-async-{step}"),
                lambda future: future.done(),
            ).result()
            remove(group, f"{folder}/dcp-async-{number}")
        total = int(group.all_reduce(torch.tensor(size)).item())
        for number in range(rounds):
            clock.measure("dd", lambda: group.rank or dd(folder, total))
            clock.measure("save", lambda step=100 + number: saver.save(step, state))
            remove(group, f"{folder}/dcp-0")
            clock.measure("dcp.save", lambda: dcp.save(dict(tensors), checkpoint_id=f"{folder}/dcp-0"))
        out = {name: torch.zeros_like(value) for name, value in tensors.items()}
        for _ in range(rounds):
            for kind in ("cold", "cached"):
                if kind == "cold":
                    forget(group, folder)
                clock.measure(f"load, {kind}", lambda: load(group, f"{folder}/echelon", out))
                clock.measure(f"dcp.load, {kind}", lambda: dcp.load(out, checkpoint_id=f"{folder}/dcp-0"))
        assert all(torch.equal(out[name], tensors[name]) for name in out)
        saver.close()
    return clock.seconds | {"bytes": [float(total)]}


def beside(trainer: Trainer, clock: Clock, name: str, start: Callable[[], Any], is_done: Callable[[Any], bool]) -> Any:
    """Trains, starts a save, and trains on until it has ended on all ranks. Returns what `start` returned."""
    for _ in range(STEPS):
        clock.measure(f"{name}: step before", trainer.step)
    handle = clock.measure(f"{name}: stall", start)
    while True:
        has_ended = trainer.group.all_reduce(torch.tensor(int(is_done(handle))), "min").item()
        if has_ended:
            return handle
        clock.measure(f"{name}: step while it writes", trainer.step)


def copy(tensors: dict[str, Tensor], target: Tensor) -> None:
    """Copies the bytes of tensors into memory, one after the other."""
    begin = 0
    for value in tensors.values():
        source = value.reshape(-1).view(torch.uint8)
        target[begin : begin + len(source)].copy_(source)
        begin += len(source)


def load(group: echelon.ProcessGroup, path: str, out: dict[str, Tensor]) -> None:
    """Loads the newest checkpoint into tensors."""
    checkpoint = open_checkpoint(path, group)
    assert checkpoint is not None
    checkpoint.read([Wanted(name, 0, value.view(-1)) for name, value in out.items()])


def dd(folder: str, size: int) -> None:
    """Writes as many bytes with dd."""
    path, block = f"{folder}/dd", 4 << 20
    command = ["dd", "if=/dev/zero", f"of={path}", f"bs={block}", f"count={-(-size // block)}", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)
    os.remove(path)


def remove(group: echelon.ProcessGroup, path: str) -> None:
    """Removes a folder."""
    group.barrier()
    if group.rank == 0:
        shutil.rmtree(path)
    group.barrier()


def forget(group: echelon.ProcessGroup, folder: str) -> None:
    """Drops all files from the page cache."""
    if group.rank == 0:
        for path in Path(folder).rglob("*"):
            if path.is_file():
                file = os.open(path, os.O_RDONLY)
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)
    group.barrier()


def report(num_ranks: int, seconds: dict[str, list[float]]) -> None:
    """Prints the rows of one number of ranks."""
    size = seconds["bytes"][0]
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"{num_ranks} ranks, {size / 1e9:.2f} GB in all, first asynchronous save {median['first async save']:.2f} s\n"
    )
    print_head("what | seconds | GB/s | beside")
    rows = (
        ("memcpy", "", ""),
        ("async save: stall", "memcpy", "x its time"),
        ("dcp.async_save: stall", "memcpy", "x its time"),
        ("async save: step while it writes", "async save: step before", "x its time"),
        ("dcp.async_save: step while it writes", "dcp.async_save: step before", "x its time"),
        ("dd", "", ""),
        ("save", "dd", "x its speed"),
        ("dcp.save", "dd", "x its speed"),
        ("dcp.load, cold", "", ""),
        ("load, cold", "dcp.load, cold", "x its speed"),
        ("dcp.load, cached", "", ""),
        ("load, cached", "dcp.load, cached", "x its speed"),
    )
    for name, other, what in rows:
        if name not in median:  # it ended before a step did
            continue
        speed = "" if "step" in name else f"{size / median[name] / 1e9:.2f}"
        factor = median[other] / median[name] if "speed" in what else median[name] / median[other] if other else 0
        print_row(name, f"{median[name]:.3f}", speed, f"{factor:.2f} {what} ({other})" if other else "")
    print(flush=True)


def main() -> None:
    parser: argparse.ArgumentParser = options_of(__doc__, rounds=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--parameters", type=float, default=200e6)
    parser.add_argument("--folder", default=".", help="folder on the disk to be measured")
    options = parser.parse_args()
    num_layers = round(options.parameters / WIDTH**2)
    print_environment(f"{num_layers * WIDTH**2 / 1e6:.0f} million parameters, medians of {options.rounds} rounds.")
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            arguments = (os.path.abspath(folder), num_layers, options.rounds)
            report(num_ranks, echelon.spawn(measure, num_ranks, arguments, timeout=300)[0])


if __name__ == "__main__":
    main()
