"""Process groups of torch's own, beside those of the tests' ranks."""

import os
from contextlib import contextmanager

import torch

KEPT = []
"""Groups of torch that are not destroyed before the process ends. The destructor holds the interpreter's lock while it
joins threads, and one that still destroys a collective of a backward waits for that lock, for the sake of the context
that the collective has kept of that backward."""


@contextmanager
def gloo(group, path):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=group.rank, world_size=group.world_size
    )
    KEPT.append(torch.distributed.group.WORLD)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
