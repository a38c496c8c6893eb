"""Default groups of torch.distributed for tests: over Echelon, over Gloo, and of this process alone."""

import contextlib
import os
import socket
from datetime import timedelta

import torch.distributed as dist

# The names of torch 2.13, and those of the versions before it.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

KEPT = []
"""Groups of Gloo that are not destroyed before the process ends. The destructor holds the interpreter's lock while it
joins threads, and one that still destroys a collective of a backward waits for that lock, for the sake of the context
that the collective has kept of that backward."""


def begin(group, path, backend="echelon", timeout=20.0):
    """Makes torch's default group of the ranks of `group`; a file stands in for torch's store."""
    import echelon.interop.torch_distributed  # noqa: F401 # registers the backend

    dist.init_process_group(
        backend,
        store=dist.FileStore(path, group.world_size),
        rank=group.rank,
        world_size=group.world_size,
        timeout=timedelta(seconds=timeout),
    )


def as_default_group(group, path, backend, function, *arguments):
    """Calls `function(rank, *arguments)` while the default group is there, and returns its result."""
    begin(group, path, backend)
    try:
        return function(group.rank, *arguments)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def gloo(group, path):
    """Makes torch's default group over Gloo, beside `group`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    begin(group, str(path), "gloo", timeout=300.0)
    KEPT.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def mesh_of_one():
    """Gives a device mesh of torch over this process alone."""
    from torch.distributed.device_mesh import init_device_mesh  # takes a second

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def free_port():
    """Returns a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def launched(group):
    """Sets the variables that torchrun sets, with a port that rank 0 has found free."""
    environ = {"RANK": group.rank, "LOCAL_RANK": group.rank}
    environ |= {"WORLD_SIZE": group.world_size, "LOCAL_WORLD_SIZE": group.world_size}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": group.broadcast_object(free_port(), src=0)}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in environ.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
