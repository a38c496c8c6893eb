"""Registry of the backends that a program may ask for by name.

A new backend is one file under `echelon.backends` and one line in `OPENERS`. `echelon.init`, ECHELON_BACKEND, `spawn`,
torch.distributed and the command line then know its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from echelon.backends.shared.memory.support import obstacle
from echelon.backends.torch_distributed.engines import ENGINES

if TYPE_CHECKING:
    from echelon.backends.base import Backend
    from echelon.backends.tcp.backend import TcpBackend

Opener: TypeAlias = "Callable[[TcpBackend, float], Backend]"
"""Makes a backend over the TCP connections of all ranks, within some seconds. All ranks call it.

Raises LaunchError if the host or torch lacks something that the backend needs.
"""


# The launcher reads names without importing torch, which takes seconds. So each opener imports its backend late.


def _share(tcp: TcpBackend, seconds: float, *, required: bool) -> Backend:
    from echelon.backends.shared.backend import share

    return share(tcp, required=required, timeout=seconds)


def _engage(tcp: TcpBackend, seconds: float, *, name: str) -> Backend:
    from echelon.backends.torch_distributed.backend import engage

    return engage(tcp, name, seconds)


OPENERS: Mapping[str, Opener] = {
    "auto": partial(_share, required=False),
    "shm": partial(_share, required=True),
    "tcp": lambda tcp, _: tcp,
    **{name: partial(_engage, name=name) for name in ENGINES},
}
"""By name: backends of ranks that are processes."""

NAMES = (*OPENERS, "simulated")
"""Names that a program may ask for. Simulated ranks are opened by `echelon.simulate`."""

OWN_NAMES = tuple(name for name in OPENERS if name not in ENGINES)
"""Backends that torch.distributed does not have itself."""


def on_this_host(name: str, num_ranks: int) -> str:
    """Returns the name of a backend, and in brackets the one that "auto" becomes if this host has all ranks.

    Without brackets for a rank alone, which sends nothing.
    """
    if name != "auto" or num_ranks < 2:
        return name
    return "auto (TCP)" if obstacle() else "auto (shared memory)"
