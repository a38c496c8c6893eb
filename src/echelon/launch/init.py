"""`echelon.init`: the group of all ranks, for any launcher, and its end with the program.

Strategy. `init` takes the first of these: a group provided by the calling code (simulated ranks, spawn), torchrun's
store, another launcher, nothing at all (world size 1). The secret is ECHELON_SECRET; else one that the ranks of one
host share in a file; else, under torchrun only, one in its store.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Never, cast

import torch
import torch.distributed as dist

from echelon.arguments import check_default_timeout
from echelon.backends.base import Backend
from echelon.backends.tcp.backend import TcpBackend
from echelon.backends.torch_distributed.engines import ENGINES, check_available
from echelon.backends.work import DEFAULT_TIMEOUT
from echelon.errors import InvalidArgument, LaunchError, describe_exit_of, status_of
from echelon.group.group import ProcessGroup, check_group
from echelon.launch import environment
from echelon.launch.backends import OPENERS
from echelon.launch.environment import Environment
from echelon.launch.interface import with_local_address
from echelon.launch.report import ExitWatch, advise_on_uncaught, report_uncaught, reported_start, watch_exit
from echelon.launch.secret_file import SecretFile
from echelon.launch.torch_store import connect_default_group, connect_elastic
from echelon.launch.tuned import agreed_table
from echelon.operation_records import FlightRecord, FlightRecorder


def choose_device(name: str, backend: str, local_rank: int) -> torch.device:
    """Returns the device on which a rank has its tensors.

    Args:
        name: "auto", "cpu", "cuda" (the GPU with the number of the rank on its host) or "cuda:1". "auto" is "cuda" if
            the backend's collectives take GPU tensors, else "cpu".
        backend: name of the backend.
        local_rank: this rank's number on its host.

    Raises:
        LaunchError: there is no such device, or no such backend here.
    """
    if backend in ENGINES:
        check_available(backend)
    if name == "auto":
        name = "cuda" if "cuda" in ENGINES.get(backend, ()) else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LaunchError(f"device={name!r} is unknown: use 'auto', 'cpu', 'cuda' or 'cuda:0'") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise LaunchError(f"device={name!r} is not supported: use 'auto', 'cpu', 'cuda' or 'cuda:0'")
    count, index = torch.cuda.device_count(), local_rank if device.index is None else device.index
    if index >= count:
        raise LaunchError(
            f"device={name!r}: rank {local_rank} of this host would have GPU {index}, but torch sees {count}: start at "
            "most as many ranks as there are GPUs, or name one by device='cuda:0'"
        )
    return torch.device("cuda", index)


CONNECT_TIMEOUT = 60.0
"""Seconds in which all ranks have to find each other."""

_latest: deque[FlightRecorder] = deque(maxlen=1)
"""Flight recorder of the latest group of `init`. Kept after the group is gone, to explain a failure."""
_opened: deque[weakref.ref[ProcessGroup]] = deque(maxlen=1)
"""Latest group of `init` that is not closed. Weak, so that it keeps no group alive."""
_provided: ContextVar[ProcessGroup | None] = ContextVar("echelon_provided_group", default=None)


@contextmanager
def provide(group: ProcessGroup) -> Iterator[None]:
    """Makes `init` return `group` inside the with block, in this thread.

    `simulate` and `spawn` use this, so that a script which calls `echelon.init()` runs there unchanged.
    """
    token = _provided.set(group)
    try:
        yield
    finally:
        _provided.reset(token)


def provided_group() -> ProcessGroup | None:
    """Returns the group that the calling code has provided to this thread. None if it has provided none."""
    return _provided.get()


def current_group() -> ProcessGroup | None:
    """Returns the provided group, else the latest open one of `init`. None if there is neither."""
    provided = _provided.get()
    return provided if provided is not None else next((group for one in _opened if (group := one())), None)


class _Current:
    """Default of parameters that are a group."""

    def __repr__(self) -> str:
        return "CURRENT"


# Not None, which `subgroup` returns on ranks outside of it: such a rank would take part in the group of all ranks.
CURRENT = cast("ProcessGroup", _Current())
"""Stands for the group of `echelon.init()`, or of the simulated rank, where a call is given none."""


def given_or_current(group: object) -> ProcessGroup:
    """Returns the group that a call was given. For `CURRENT` the current one.

    Raises:
        InvalidArgument: `group` is no group, or there is no current one.
    """
    found = current_group() if group is CURRENT else check_group(group)
    if found is None:
        raise InvalidArgument("there is no group yet: call group = echelon.init() first and keep it, or pass group=")
    return found


def init(
    backend: str = "auto", timeout: float = DEFAULT_TIMEOUT, device: str = "auto", **of_torch: Never
) -> ProcessGroup:
    """Returns the group of all ranks of this job. Blocks until all ranks are connected.

    The launcher decides which ranks there are: `echelon run`, `echelon.spawn`, torchrun and other launchers that set
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, srun, mpirun, mpiexec, or `echelon.simulate`. Without a launcher the
    world size is 1. If all ranks have called `torch.distributed.init_process_group`, the group has the same ranks, and
    they find each other through torch's store. At the end of the program the group is closed. If the program ends with
    an exception or with `sys.exit` of an error status, this rank has failed: the other ranks get PeerFailed.

    Each call returns another group with connections of its own, so every rank makes the same number of calls. Keep the
    group and pass it on. A program that makes one group after another should close each; an open group keeps its memory
    and connections. On simulated ranks and in `echelon.spawn` all calls return the same group.

    The ranks prove to each other that they know the job's secret, ECHELON_SECRET. `echelon run` makes one. If it is not
    set, ranks of one host share one through a file that only their user can read. Under torchrun on several hosts, rank
    0 makes one and shares it through torch's store, which authenticates nobody. That keeps out a stranger who finds
    the port of a rank, but not one who can reach the store. Set ECHELON_SECRET yourself if that matters.

    Args:
        backend: "shm" (shared memory between ranks of one host, TCP between hosts), "tcp", or "auto": shared memory
            if the system supports it. The environment variable ECHELON_BACKEND overrides "auto". With "gloo", "nccl",
            "mpi" and "ucc" that c10d backend does the collectives; messages still go over TCP.
        timeout: default timeout of the group's blocking calls, seconds.
        device: device of this rank's tensors: "auto", "cpu", "cuda" or "cuda:1". It becomes `group.device`, and torch's
            current GPU if it is one. "auto" is a GPU of its own if the backend takes GPU tensors, else "cpu".
        of_torch: arguments of `torch.distributed.init_process_group` alone. They are refused.

    Raises:
        LaunchError: the environment or the arguments are invalid. Three subclasses: InvalidRank, InvalidWorldSize, and
            PlanError for a tuned table of collectives.
        ConnectError: the ranks did not all find each other within 60 s (or `timeout`, if that is shorter).
        AuthenticationError: a rank has another secret.
    """
    with reported_start():
        for name in of_torch:
            raise LaunchError(
                f"{name} is no argument here: ranks and addresses come from the launcher, such as echelon run -n 2 "
                "script.py"
            )
        timeout = check_default_timeout(timeout, LaunchError)
        provided = _provided.get()
        if provided is not None:
            return _accept(provided, backend, device)  # its owner closes it, not the end of the program
        group, tells = _open(backend, timeout, device)
    if tells:
        end_with_program(group)
    else:
        advise_on_uncaught()
    _opened.append(weakref.ref(group))
    group.when_closed(_opened.clear)
    return group


def _open(backend: str, timeout: float, device: str) -> tuple[ProcessGroup, bool]:
    """Returns the group of all ranks, and whether there may be other ranks, which need to know how this one ends."""
    name = environment.read_backend(os.environ, backend)
    if name == "simulated":
        raise LaunchError(
            "backend='simulated' exists only inside echelon.simulate(fn, world_size): call that, or use 'auto'"
        )
    launched, patience = environment.read(os.environ), min(timeout, CONNECT_TIMEOUT)
    place = choose_device(device, name, 0 if launched is None else launched.local_rank)
    # The ranks of torch's default process group count if the program has made one: it listens on the master port.
    # torchrun's own store serves both.
    attaches = dist.is_initialized() and (name in ENGINES or launched is None or not launched.elastic)
    tcp = connect_default_group(timeout, patience) if attaches else _connect(launched, timeout)
    # Before the first group exists, so that no two ranks choose algorithms by different tables.
    table = agreed_table(tcp, patience)
    connected = carry(tcp, name, patience, place)
    group = ProcessGroup(connected, table=table)
    _latest.append(connected.flight_recorder)
    return group, launched is not None or attaches


def end_with_program(group: ProcessGroup) -> None:
    """Closes a group at the end of the program, or aborts it if the program ends with an error.

    Keeps the group alive until it is closed.
    """
    at_end = partial(_close, group, watch_exit())
    atexit.register(at_end)
    group.when_closed(partial(atexit.unregister, at_end))
    group.when_closed(report_uncaught(group))


def flight_recorder(group: ProcessGroup | None = None) -> tuple[FlightRecord, ...]:
    """Returns the last 1,000 operations of this rank, oldest first: each with its call, line of code and result.

    Operations are collectives, and messages between two ranks. Of tensors only shapes and sizes are recorded.

    Args:
        group: any group of this rank. None: the latest group of `init`.

    Raises:
        InvalidArgument: `group` is no group.
    """
    found = _provided.get() if group is None else check_group(group)
    recorder = found.backend.flight_recorder if found is not None else next(iter(_latest), None)
    return recorder.records() if recorder is not None else ()


def _accept(provided: ProcessGroup, backend: str, device: str) -> ProcessGroup:
    environment.read_backend({}, backend)  # a name that no backend has
    # Simulated ranks stand for ranks of any backend, so that a program need not be changed for them.
    if backend not in ("auto", provided.backend.name) and provided.backend.name != "simulated":
        raise LaunchError(
            f"backend={backend!r}: this rank was started with {provided.backend.name!r}: use 'auto' to accept any"
        )
    if provided.device.type == "cuda":
        if device == "cpu":
            provided.backend.device = torch.device("cpu")
        else:
            torch.cuda.set_device(provided.device)
    return provided


def carry(tcp: TcpBackend, name: str, timeout: float, device: torch.device | None = None) -> Backend:
    """Returns the backend of that name over connections that exist already. Blocks; all ranks call it.

    Args:
        tcp: backend that connects all ranks.
        name: "auto", "shm", "tcp", or a c10d backend.
        timeout: seconds for the ranks to agree.
        device: device of this rank's tensors. None: the choice of `choose_device` for ranks of one host.

    Raises:
        LaunchError: "shm" was asked for, and a rank of this host cannot share memory; or torch lacks the c10d backend.
    """
    device = choose_device("auto", name, tcp.rank) if device is None else device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = OPENERS[name](tcp, timeout)
    backend.device = device
    return backend


def _connect(launched: Environment | None, timeout: float) -> TcpBackend:
    if launched is None or (launched.world_size == 1 and not launched.elastic):
        return TcpBackend(0, 1, "", timeout=timeout, secret=b"")  # connects to nobody, so it needs no secret
    connect_timeout = min(timeout, CONNECT_TIMEOUT)
    # A file is for one host only: others could not read it.
    if launched.secret is not None or not launched.is_one_host:
        return _connect_ranks(launched, timeout, connect_timeout)
    with SecretFile(launched.job) as file:
        backend = _connect_ranks(replace(launched, secret=file.secret()), timeout, connect_timeout)
        if launched.rank == 0:
            file.remove()
        # No rank returns before rank 0 has removed the file: a second `init` of the job would read the old secret.
        backend.messages.barrier(connect_timeout)
        return backend


def _connect_ranks(launched: Environment, timeout: float, connect_timeout: float) -> TcpBackend:
    launched.check_secret()
    launched = with_local_address(launched, os.environ)
    if launched.elastic:
        return connect_elastic(launched, timeout, connect_timeout)
    return TcpBackend(
        launched.rank,
        launched.world_size,
        launched.address,
        timeout=timeout,
        secret=launched.secret,
        run_id=launched.run_id,
        restart=launched.restart,
        local_address=launched.local_address,
        connect_timeout=connect_timeout,
    )


def _close(group: ProcessGroup, watch: ExitWatch) -> None:
    code = watch.code()
    if status_of(code):
        group.abort(f"it {describe_exit_of(code)}, {group.backend.flight_recorder.activity()}")
    else:
        group.close()
