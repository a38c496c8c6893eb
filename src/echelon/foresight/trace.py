"""A rank's step as a value: its kernels, communication, waits and memory, in the order of the host. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["matmul", "attention", "other"]
"""Kinds of kernels that a device model tells apart."""

Phase: TypeAlias = Literal["forward", "backward", "recompute", "optimizer", "other"]
"""Parts of a step. "recompute" is a forward pass repeated by activation checkpointing."""

MemoryKind: TypeAlias = Literal["parameters", "gradients", "optimizer", "activations", "communication", "other"]

GIB = 1 << 30
"""Bytes of a GiB."""
DEFAULT_STREAM = 0
"""Number of the stream on which a program computes unless it makes others."""
TF32 = "tf32"
"""Dtype of a kernel that computes float32 by TensorFloat-32, which torch allows by `set_float32_matmul_precision`."""
COMPLEX_PRODUCTS = 4
"""Products of real numbers in one of complex numbers."""
CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
"""Operators whose products have a matrix that is not stored, with the inputs under each position of the window."""
CHANNELS_LAST = "to_channels_last"
"""Name of a kernel by which cuDNN changes the layout of images, for a convolution or after it."""
UNKNOWN_STORAGE = -1
"""Storage of bytes that are an unknown part of a tensor, such as the rows that an embedding reads."""


class Kernel(NamedTuple):
    """A kernel, or a group of `launches` kernels, that computes on one stream."""

    stream: int
    """Number of the stream, see `DEFAULT_STREAM`."""
    name: str
    """Name of the operator without namespace and overload, such as "mm"."""
    kind: Kind
    flops: int
    """Floating-point operations, two for each multiply-add. 0 for kind "other"."""
    dtype: str
    """Type of the first floating-point input, such as "bfloat16"."""
    shape: tuple[int, ...]
    """(batch, m, n, k) of a matrix product, (batch, heads, queries, keys, head_dim) of attention, else ()."""
    reads: tuple[tuple[int, int], ...]
    """(storage, bytes) of each input."""
    writes: tuple[tuple[int, int], ...]
    """(storage, bytes) of each output."""
    launches: int
    phase: Phase
    place: int
    """Index of the program's line in `Trace.places`. -1 if there is none."""
    module: int
    """Index of the module in `Trace.modules`. -1 if there is none."""
    is_compiled: bool = False
    """Whether the program compiles it together with its neighbours, by torch.compile."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all inputs and outputs."""
        return sum(size for _, size in (*self.reads, *self.writes))


class Collective(NamedTuple):
    """A collective on the communication stream of its group."""

    stream: int
    """Stream that was current. The collective begins after the earlier work on it. With `blocking` the stream waits."""
    number: int
    """Number by which `Wait` refers to the collective, unique in the trace."""
    kind: str
    """Kind as in `echelon.backends.collective`, such as "all_reduce"."""
    group: int
    """Index of the group in `Trace.groups`."""
    num_bytes: int
    """Bytes of the whole array: the output of an all-gather, the input of a reduce-scatter."""
    dtype: str
    op: str
    """Reduction, such as "sum". Empty for a collective that does not reduce."""
    root: int
    """World rank of the root. -1 if there is none."""
    blocking: bool
    """True if the stream waits for the end at once."""
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    phase: Phase
    place: int
    module: int


class Message(NamedTuple):
    """A send or a receive."""

    stream: int
    number: int
    is_send: bool
    peer: int
    """World rank of the other side."""
    group: int
    tag: int
    num_bytes: int
    dtype: str
    blocking: bool
    batch: int
    """Number of the batch_isend_irecv call, whose messages begin together. -1 if it stands alone."""
    phase: Phase
    place: int
    module: int
    is_ordered: bool = True
    """Whether it begins after earlier messages between the two ranks. Echelon's messages are matched by their tags."""

    @property
    def kind(self) -> str:
        """Kind, as collectives have one: "send" or "receive"."""
        return "send" if self.is_send else "receive"

    def ends(self, rank: int) -> tuple[int, int]:
        """Returns the ranks that send it and receive it. `rank` is the one that recorded it."""
        return (rank, self.peer) if self.is_send else (self.peer, rank)


class Wait(NamedTuple):
    """The stream waits for the end of a collective or a message."""

    stream: int
    number: int
    place: int


class RecordEvent(NamedTuple):
    """An event is recorded on a stream."""

    stream: int
    event: int


class WaitEvent(NamedTuple):
    """The stream waits for an event."""

    stream: int
    event: int


class HostWait(NamedTuple):
    """The host waits: for an event, for a stream, or for all streams of the device."""

    stream: int
    """-1: all streams."""
    event: int
    """-1: all earlier work of the stream."""
    place: int


class Copy(NamedTuple):
    """A copy between the host and its GPU, by a copy engine of the GPU."""

    stream: int
    """Stream on which it is done. If the host waits for it, a `HostWait` for this stream follows."""
    to_gpu: bool
    num_bytes: int
    phase: Phase
    place: int
    module: int


class HostKernel(NamedTuple):
    """An operator on tensors of the host, which the host computes itself."""

    name: str
    num_bytes: int
    """Bytes of all inputs and outputs."""
    launches: int
    """Tensors of an operator on a list, which takes one after another."""
    phase: Phase
    place: int
    module: int


class Allocate(NamedTuple):
    """A storage gets memory. A storage that is resized is freed and allocated again."""

    storage: int
    num_bytes: int
    """As PyTorch's caching allocator rounds it: a multiple of 512."""
    kind: MemoryKind
    place: int
    module: int
    stream: int = 0
    """Stream that was current. The caching allocator gives a freed block to its own stream only."""
    on_host: bool = False
    """Whether it is memory of the host, not of the GPU."""


class Free(NamedTuple):
    """A storage gives its memory back."""

    storage: int


Communication: TypeAlias = Collective | Message
Entry: TypeAlias = (
    Kernel | Collective | Message | Wait | RecordEvent | WaitEvent | HostWait | Allocate | Free | Copy | HostKernel
)


Order: TypeAlias = Collective | Message | Wait | RecordEvent | WaitEvent | HostWait
"""Entries that order communication."""


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""Number of a layer in the name of a module."""


def alike_layers(module: str) -> str:
    """Returns the name of a module without numbers of layers, as "layers.*.attention"."""
    return _NUMBER.sub("*", module)


class Group(NamedTuple):
    """A process group."""

    ranks: tuple[int, ...]
    """World ranks, in the order of the group."""
    name: str
    """Description or name of its mesh dimension, such as "dp". Empty if it has none."""
    number: int = 0
    """Number among the program's groups of the same ranks, in the order in which they were made."""


@dataclass(frozen=True)
class Trace:
    """One step of one rank."""

    rank: int
    world_size: int
    entries: tuple[Entry, ...]
    live: tuple[Allocate, ...]
    """Storages that are alive when the step begins."""
    groups: tuple[Group, ...]
    places: tuple[str, ...]
    """Lines of the program, as "train.py:42"."""
    modules: tuple[str, ...]
    """Qualified names of modules, as "layers.2.attention"."""
    is_step: bool
    """False if the program has no optimizer: the entries are then those of the whole program."""
    assumptions: tuple[str, ...] = ()
    """Assumed values and approximations, each with its line."""
    skipped: tuple[str, ...] = ()
    """Writes to files that were skipped, each with its line."""
    measured: tuple[tuple[int, float], ...] = ()
    """(entry, seconds of the program since the pair before), for each call into the recording and the end of the step,
    where the step ran with real tensors. Empty if it did not."""
    computed: tuple[tuple[int, int, object], ...] = ()
    """(first entry, entry after the last one, step) of the steps of a schedule, such as "0F3" of a pipeline."""
    earlier: tuple[Order, ...] = ()
    """Communication, waits and events of the program before the step."""
    first_gpu: tuple[int, str] | None = None
    """Number of the rank on its host, and the line that names CUDA first, if the rank's tensors are on cuda:0 and NCCL
    communicates them between ranks of the host. None: it names another GPU, none at all, or sees its own alone."""
    has_expandable_segments: bool = False
    """Whether segments of PyTorch's allocator grow, as by PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""

    def kernel(self, index: int) -> Kernel:
        """Returns an entry that is a kernel."""
        entry = self.entries[index]
        assert isinstance(entry, Kernel)
        return entry

    def communication(self, index: int) -> Communication:
        """Returns an entry that is a collective or a message."""
        entry = self.entries[index]
        assert isinstance(entry, Collective | Message)
        return entry

    def copy(self, index: int) -> Copy:
        """Returns an entry that is a copy between the host and its GPU."""
        entry = self.entries[index]
        assert isinstance(entry, Copy)
        return entry

    def line(self, entry: Kernel | Communication | Allocate | Copy, unknown: str = "an unknown line") -> str:
        """Returns the line of an entry, as "train.py:42"."""
        return self.places[entry.place] if entry.place >= 0 else unknown

    def where(self, entry: Kernel | Communication | Allocate | Copy, unknown: str = "an unknown line") -> str:
        """Returns line and module of an entry, as "train.py:42 in layers.2.attention"."""
        module = f" in {self.modules[entry.module]}" if entry.module >= 0 else ""
        return self.line(entry, unknown) + module
