"""Compiled kernels, approximated: each run of elementwise kernels and reductions becomes one kernel. Pure.

torch.compile joins operators between matrix products, attention and communication. The joined kernel reads each tensor
that was not made inside the run once, and writes each that is used after it. Tensors that live only inside the run need
no memory.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from echelon.foresight.trace import UNKNOWN_STORAGE, Allocate, Entry, Free, Kernel, Trace

NOT_FUSED = (
    # Optimizers and FSDP's copies run outside of the compiled module.
    "_foreach",
    "_fused_ad",
    "_fused_sgd",
    "split_with_sizes_copy",
    "_chunk_cat",
    "chunk_cat",
    "all_gather_copy",
    # Kernels of their own in a compiled program.
    "embedding",
    "sort",
    "topk",
    "scatter",
    "index_put",
    "multinomial",
    "randint",
)
"""Prefixes of the names of operators that stay as they are."""


def fuse(trace: Trace) -> Trace:
    """Returns the trace with its compiled kernels joined. Phases are not mixed, and neither are streams."""
    if not any(type(entry) is Kernel and entry.is_compiled for entry in trace.entries):
        return trace
    fusing = _Fusing()
    for entry in trace.entries:
        fusing.take(entry)
    return replace(trace, entries=fusing.finish())


def is_fusable(kernel: Kernel) -> bool:
    """Whether a kernel can become a part of a larger one."""
    may_be = kernel.is_compiled and kernel.kind == "other" and kernel.phase != "optimizer"
    return may_be and not kernel.name.startswith(NOT_FUSED)


class _Fusing:
    def __init__(self) -> None:
        self._out: list[Entry] = []
        self._kernels: list[Kernel] = []
        self._memory: list[Allocate | Free] = []

    def take(self, entry: Entry) -> None:
        kind = type(entry)
        if kind is Allocate or kind is Free:
            # A kernel's results are allocated before it.
            self._memory.append(entry)  # type: ignore[arg-type]
            return
        if kind is Kernel and is_fusable(entry):  # type: ignore[arg-type]
            assert isinstance(entry, Kernel)
            if self._kernels and (self._kernels[0].stream, self._kernels[0].phase) != (entry.stream, entry.phase):
                self._flush()
            self._kernels.append(entry)
            return
        self._flush()
        self._out.append(entry)

    def finish(self) -> tuple[Entry, ...]:
        self._flush()
        return tuple(self._out)

    def _flush(self) -> None:
        kernels, memory = self._kernels, self._memory
        self._kernels, self._memory = [], []
        # A kernel alone keeps its name, by which a device may know its time.
        if len(kernels) < 2:
            self._out += [*kernels, *memory]
            return
        made: set[int] = set()
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        # Reads of unknown parts of tensors are all kept: they may be of different storages.
        parts = count(1)
        for kernel in kernels:
            for storage, size in kernel.reads:
                if storage == UNKNOWN_STORAGE:
                    reads[-1 - next(parts)] = size
                elif storage not in made:
                    reads[storage] = max(size, reads.get(storage, 0))
            for storage, size in kernel.writes:
                made.add(storage)
                writes[storage] = max(size, writes.get(storage, 0))
        inside = self._inside(memory)
        kept = tuple((storage, size) for storage, size in writes.items() if storage not in inside)
        first = kernels[0]
        taken = tuple((storage if storage >= 0 else UNKNOWN_STORAGE, size) for storage, size in reads.items())
        fused = first._replace(name="fused", flops=0, reads=taken, writes=kept, launches=1)
        self._out.append(fused)
        self._out += [each for each in memory if each.storage not in inside]

    def _inside(self, memory: list[Allocate | Free]) -> set[int]:
        """Returns storages that are allocated and freed in the run."""
        allocated = {each.storage for each in memory if type(each) is Allocate}
        return allocated & {each.storage for each in memory if type(each) is Free}
