"""What do the copies of a large operation cost, made one way or another, by all ranks at once and while nobody waits?

    python benchmarks/shared_memory/experiments/copies.py --ranks 2
    python benchmarks/shared_memory/experiments/copies.py --ranks 4

Any tensor passes through slots of 512 KiB (2 MiB with more than 2 ranks): it is copied into the rank's own, and out of
a peer's. That, without a word of protocol, is what operations on any tensor cannot do without. Beside it what could be
done instead: other pieces, numpy, a copy by the kernel out of the peer's own memory (process_vm_readv), and memory that
all ranks map, from end to end.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import echelon

sys.path.extend(map(str, Path(__file__).parents[1:3]))
from harness import in_turns, ms, options_of, print_environment, print_head, print_row
from subjects import map_together

BYTES = 64 << 20
SLOTS = 4
TURNS = 8
Copy = Callable[[int, int, int], None]
"""From an address to an address, so many bytes."""


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def by_torch(source: int, target: int, num_bytes: int) -> None:
    """Copies as `Tensor.copy_` does."""
    _tensor(target, num_bytes).copy_(_tensor(source, num_bytes))


def by_numpy(source: int, target: int, num_bytes: int) -> None:
    """Copies as `numpy.copyto` does."""
    np.copyto(_tensor(target, num_bytes).numpy(), _tensor(source, num_bytes).numpy())


def by_memmove(source: int, target: int, num_bytes: int) -> None:
    """Copies as the C library does."""
    ctypes.memmove(target, source, num_bytes)


def out_of(process: int) -> Copy:
    """Returns a copy by the kernel out of another process's memory."""
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t

    def copy(source: int, target: int, num_bytes: int) -> None:
        here, there = _Span(target, num_bytes), _Span(source, num_bytes)
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        if read(ctypes.c_int(process), ctypes.byref(here), one, ctypes.byref(there), one, none) != num_bytes:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    return copy


def _tensor(address: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.float32)


def ways(group: echelon.ProcessGroup) -> dict[str, Callable[[], None]]:
    """Returns the measured copies by name. Each moves 64 MiB on every rank."""
    rank, count = group.rank, group.world_size
    own, result = torch.ones(BYTES // 4), torch.ones(BYTES // 4)
    mapped = map_together(group, BYTES // 4)
    mine, theirs = mapped[rank], mapped[(rank + 1) % count]
    known = group.all_gather(torch.tensor([[os.getpid(), own.data_ptr()]]))
    process, address = (int(number) for number in known[(rank + 1) % count])

    def through(copy: Copy, piece: int, source: torch.Tensor, target: torch.Tensor, into: bool) -> Callable[[], None]:
        def act() -> None:
            start, end = source.data_ptr(), target.data_ptr()
            for number, begin in enumerate(range(0, BYTES, piece)):
                slot = number % SLOTS * piece
                copy(start + (begin if into else slot), end + (slot if into else begin), piece)

        return act

    def all_reduce(piece: int) -> Callable[[], None]:
        pieces, slots = own.split(piece // 4), theirs.split(piece // 4)

        def act() -> None:
            for number, here in enumerate(pieces):
                by_memmove(here.data_ptr(), mine.data_ptr() + number % SLOTS * piece, piece)
                torch.add(here, slots[number % SLOTS], out=here)

        return act

    found: dict[str, Callable[[], None]] = {}
    for piece in (128 << 10, 512 << 10, 2 << 20):
        for name, copy in (("copy_", by_torch), ("numpy.copyto", by_numpy), ("memmove", by_memmove)):
            found[f"into slots, {piece >> 10} KiB, {name}"] = through(copy, piece, own, mine, True)
            found[f"out of slots, {piece >> 10} KiB, {name}"] = through(copy, piece, theirs, result, False)
    found["into slots, and added out of them, 512 KiB"] = all_reduce(512 << 10)
    for piece in (1 << 20, BYTES):
        kernel = out_of(process)
        found[f"out of the peer's memory, {piece >> 20} MiB, process_vm_readv"] = lambda copy=kernel, piece=piece: [
            copy(address + begin, result.data_ptr() + begin, piece) for begin in range(0, BYTES, piece)
        ]  # type: ignore[misc]
    found["between mapped tensors, copy_"] = lambda: by_torch(theirs.data_ptr(), mine.data_ptr(), BYTES)
    found["between mapped tensors, memmove"] = lambda: by_memmove(theirs.data_ptr(), mine.data_ptr(), BYTES)
    return found


def measure(group: echelon.ProcessGroup) -> dict[str, list[float]]:
    """Returns the seconds of the slowest rank by way."""
    torch.set_num_threads(1)
    return in_turns(group, ways(group), TURNS, warmup=1).seconds


def main() -> None:
    ranks = options_of(__doc__, ranks=2).parse_args().ranks
    seconds = echelon.spawn(measure, ranks, backend="shm")[0]
    print_environment(f"64 MiB by each of {ranks} ranks at once, the slowest one, medians of {TURNS} turns")
    print_head("copy | ms")
    for name, taken in seconds.items():
        print_row(name, ms(taken, 1))


if __name__ == "__main__":
    main()
