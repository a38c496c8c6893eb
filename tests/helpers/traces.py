"""Traces of steps, written by hand for the player."""

from types import MappingProxyType

from echelon.foresight.play.cluster import Cluster
from echelon.foresight.play.device import Device
from echelon.foresight.trace import (
    Allocate,
    Collective,
    Copy,
    Free,
    Group,
    HostKernel,
    HostWait,
    Kernel,
    Message,
    RecordEvent,
    Trace,
    Wait,
    WaitEvent,
)

PLAIN = Device(
    name="plain",
    peak=MappingProxyType({"bfloat16": 1000.0, "float32": 500.0}),
    memory_bytes=1 << 30,
    memory_bandwidth=100.0,
    num_sms=10,
    per_host=8,
    local_bandwidth=10.0,
    matmul_share=1.0,
    attention_share=0.5,
    memory_share=1.0,
    tile_seconds=0.0,
    kernel_seconds=0.0,
    launch_seconds=0.0,
    communication_sms=0,
    host_link=20.0,
    host_link_share=0.5,
    host_memory_bandwidth=80.0,
    host_memory_share=0.5,
)
"""A device of round numbers: 100 bytes take a second, and calls take none. So do 10 bytes of a copy from or to the
host, and 5 of an operator there, since 8 ranks share its memory."""

LINKS = Cluster(hosts=(2, 2), bandwidth=1.0, latency=1.0, local_bandwidth=10.0, local_latency=0.0)
"""Two hosts of two ranks. Between them a second of latency, then a byte per second; 10 inside a host."""


class Step:
    """A step under construction. Each call appends an entry at the line of its number."""

    def __init__(self, rank=0, world_size=4, groups=((0, 1),)):
        self.rank, self.world_size = rank, world_size
        self.groups = tuple(Group(tuple(ranks), f"g{index}") for index, ranks in enumerate(groups))
        self.entries, self.places = [], []
        self.live = ()

    def _place(self):
        self.places.append(f"train.py:{len(self.places) + 1}")
        return len(self.places) - 1

    def kernel(self, seconds, stream=0, name="add", reads=None, writes=(), phase="forward", launches=1, **more):
        """A kernel that moves the bytes of `seconds` on PLAIN, unless its reads are given."""
        reads = ((-1, round(seconds * 100)),) if reads is None else reads
        about = {"flops": 0, "kind": "other", "dtype": "float32", "shape": (), "module": -1, **more}
        kernel = {"stream": stream, "name": name, "reads": reads, "writes": writes, "launches": launches}
        self.entries.append(Kernel(**kernel, **about, phase=phase, place=self._place()))
        return self

    def collective(self, number, num_bytes, group=0, stream=0, blocking=False, kind="all_gather", root=-1):
        place = self._place()
        self.entries.append(
            Collective(
                stream, number, kind, group, num_bytes, "float32", "", root, blocking, (), (), "forward", place, -1
            )
        )
        return self

    def message(self, number, peer, num_bytes, send, stream=0, blocking=True, batch=-1, group=0):
        place = self._place()
        self.entries.append(
            Message(stream, number, send, peer, group, 0, num_bytes, "float32", blocking, batch, "forward", place, -1)
        )
        return self

    def send(self, number, peer, num_bytes=10, **options):
        return self.message(number, peer, num_bytes, True, **options)

    def receive(self, number, peer, num_bytes=10, **options):
        return self.message(number, peer, num_bytes, False, **options)

    def wait(self, number, stream=0):
        self.entries.append(Wait(stream, number, self._place()))
        return self

    def record(self, event, stream=0):
        self.entries.append(RecordEvent(stream, event))
        return self

    def wait_event(self, event, stream=0):
        self.entries.append(WaitEvent(stream, event))
        return self

    def host_wait(self, stream=-1, event=-1):
        self.entries.append(HostWait(stream, event, self._place()))
        return self

    def copy(self, num_bytes, to_gpu=True, stream=0):
        self.entries.append(Copy(stream, to_gpu, num_bytes, "forward", self._place(), -1))
        return self

    def on_host(self, num_bytes, launches=1):
        self.entries.append(HostKernel("add", num_bytes, launches, "optimizer", self._place(), -1))
        return self

    def allocate(self, storage, num_bytes, kind="activations", stream=0, on_host=False):
        self.entries.append(Allocate(storage, num_bytes, kind, -1, -1, stream, on_host))
        return self

    def free(self, storage):
        self.entries.append(Free(storage))
        return self

    def trace(self):
        return Trace(
            self.rank,
            self.world_size,
            tuple(self.entries),
            self.live,
            self.groups,
            tuple(self.places),
            ("model",),
            is_step=True,
        )
