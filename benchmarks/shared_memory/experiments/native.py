"""What would a small native part make of small messages?

    python benchmarks/shared_memory/experiments/native.py

A prototype in C, compiled by gcc when this runs, does what 8 bytes need: write them where the peer reads them, count,
look until the peer has counted. It is measured in a loop in C, and called for each operation through ctypes, as a
native part of Echelon would be; beside Echelon itself, in turns. The prototype checks nothing: no arguments, no
disagreement, no timeout, no death, no record of what was called.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import echelon

sys.path.append(str(Path(__file__).parents[2]))
from harness import in_turns, print_environment, print_head, print_row

RANKS = 2
TURNS, CALLS = 21, 1000
SOURCE = """
#include <stdatomic.h>
#include <stdint.h>

typedef struct { _Atomic uint64_t count; char pad[56]; struct { float values[2]; char pad[56]; } places[2]; } Room;

static uint64_t count;

/* Writes two numbers, and waits for the peer's. Places alternate, so nobody writes where a peer still reads. */
void all_reduce(Room *rooms, int rank, float *values) {
    uint64_t now = ++count;
    Room *mine = &rooms[rank], *theirs = &rooms[1 - rank];
    mine->places[now & 1].values[0] = values[0];
    mine->places[now & 1].values[1] = values[1];
    atomic_store_explicit(&mine->count, now, memory_order_release);
    while (atomic_load_explicit(&theirs->count, memory_order_acquire) < now) {}
    for (int i = 0; i < 2; i++)
        values[i] = rooms[0].places[now & 1].values[i] + rooms[1].places[now & 1].values[i];
}

/* The same in one direction, there and back. */
void put(Room *rooms, int rank, float *values) {
    Room *mine = &rooms[rank];
    uint64_t now = atomic_load_explicit(&mine->count, memory_order_relaxed) + 1;
    mine->places[now & 1].values[0] = values[0];
    mine->places[now & 1].values[1] = values[1];
    atomic_store_explicit(&mine->count, now, memory_order_release);
}

static uint64_t received;

void get(Room *rooms, int rank, float *values) {
    uint64_t now = ++received;
    Room *theirs = &rooms[1 - rank];
    while (atomic_load_explicit(&theirs->count, memory_order_acquire) < now) {}
    values[0] = theirs->places[now & 1].values[0];
    values[1] = theirs->places[now & 1].values[1];
}

void many_all_reduces(Room *rooms, int rank, float *values, long times) {
    for (long i = 0; i < times; i++) all_reduce(rooms, rank, values);
}

void many_exchanges(Room *rooms, int rank, float *values, long times) {
    for (long i = 0; i < times; i++) {
        if (rank == 0) { put(rooms, rank, values); get(rooms, rank, values); }
        else { get(rooms, rank, values); put(rooms, rank, values); }
    }
}
"""


def compiled(folder: Path) -> Path:
    """Returns the prototype as a shared library."""
    source, library = folder / "native.c", folder / "native.so"
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-O2", "-std=c11", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def both_ways(send: Callable[[], object], recv: Callable[[], object], rank: int) -> Callable[[int], None]:
    """Returns a function that sends and receives a number of times; half of that is one way."""
    first, second = (send, recv) if rank == 0 else (recv, send)

    def run(times: int) -> None:
        for _ in range(times):
            first()
            second()

    return run


def repeated(act: Callable[[], object]) -> Callable[[int], None]:
    def run(times: int) -> None:
        for _ in range(times):
            act()

    return run


def measure(group: echelon.ProcessGroup, folder: str) -> dict[str, float]:
    """Returns microseconds by operation: the medians over turns."""
    torch.set_num_threads(1)
    rank, peer = group.rank, 1 - group.rank
    rooms = []
    for number in range(2):  # all-reduces and messages count apart
        with open(Path(folder) / f"rooms{number}", "r+b") as file:
            rooms.append(ctypes.c_char.from_buffer(mmap.mmap(file.fileno(), 4096)))
    native = ctypes.CDLL(str(Path(folder) / "native.so"))
    tensor = torch.ones(2)
    values, out = ctypes.c_void_p(tensor.data_ptr()), torch.empty(2)
    first, second = (ctypes.c_void_p(ctypes.addressof(room)) for room in rooms)
    ways: dict[str, tuple[Callable[[int], object], int]] = {
        "all_reduce, C alone": (lambda times: native.many_all_reduces(first, rank, values, ctypes.c_long(times)), 1),
        "all_reduce, C called by Python": (repeated(lambda: native.all_reduce(first, rank, values)), 1),
        "all_reduce, Echelon": (repeated(lambda: group.all_reduce(tensor)), 1),
        "one way, C alone": (lambda times: native.many_exchanges(second, rank, values, ctypes.c_long(times)), 2),
        "one way, C called by Python": (
            both_ways(lambda: native.put(second, rank, values), lambda: native.get(second, rank, values), rank),
            2,
        ),
        "one way, Echelon": (both_ways(lambda: group.send(tensor, peer), lambda: group.recv(peer, out=out), rank), 2),
    }
    acts = {name: partial(run, CALLS) for name, (run, _) in ways.items()}
    seconds = in_turns(group, acts, TURNS, before=lambda: tensor.fill_(0.0)).seconds
    return {name: statistics.median(seconds[name]) / CALLS / parts * 1e6 for name, (_, parts) in ways.items()}


def main() -> None:
    if shutil.which("gcc") is None:
        sys.exit("gcc is not here: install it (Debian: apt-get install gcc)")
    with tempfile.TemporaryDirectory() as folder:
        compiled(Path(folder))
        for number in range(2):
            (Path(folder) / f"rooms{number}").write_bytes(bytes(4096))
        found = echelon.spawn(measure, RANKS, (folder,))[0]
    print_environment()
    print_head("8 bytes, 2 ranks | us")
    for name, microseconds in found.items():
        print_row(name, f"{microseconds:.2f}")


if __name__ == "__main__":
    main()
