"""Ranks in processes that are forked from the test's own, cheap enough to be killed.

A RankPool replaces a rank that was killed by one that imports torch, which takes seconds; these have it already.
"""

import ctypes
import gc
import json
import os
import select
import signal
import struct
import sys
import time
import traceback

import torch

from echelon.backends.connect import members, rendezvous
from echelon.backends.shared import backend as shared_backend
from echelon.backends.shared.backend import share
from echelon.backends.tcp import backend as tcp_backend
from echelon.backends.tcp.backend import TcpBackend
from echelon.backends.torch_distributed.backend import engage
from echelon.group.group import ProcessGroup
from tests.helpers.worlds import SECRET, free_address


def run_forked(function, world_size, *arguments, backend="tcp", timeout=20.0, rank_timeout=20.0, waits_for=None):
    """Runs `function(group, *arguments)` on every rank; returns what the survivors returned, JSON-like, by rank.

    The backend is "tcp", "shm" or "gloo", whose calls wait `rank_timeout` seconds. `waits_for`: the ranks that return;
    None: all. The others are killed then.
    """
    with free_address() as address:
        ranks = {
            rank: _fork(function, rank, world_size, address, backend, arguments, rank_timeout)
            for rank in range(world_size)
        }
        deadline = time.monotonic() + timeout
        try:
            return {
                rank: result
                for rank, (pid, pipe) in ranks.items()
                if (waits_for is None or rank in waits_for) and (result := _read(rank, pid, pipe, deadline)) is not None
            }
        finally:
            _end(ranks.values())


def connect_as_if_elsewhere(rank, *arguments, **options):
    """Takes the place of TcpBackend in this module: each rank then believes that two and two are on a machine."""
    for module in (members, rendezvous, tcp_backend, shared_backend):
        module.machine_id = lambda: f"machine {rank // 2}"
    return tcp_backend.TcpBackend(rank, *arguments, **options)


def fork_and_collect(functions, timeout=20.0, waits_for=None):
    """Runs functions at once, each in a process of its own; returns what they returned, JSON-like.

    `waits_for`: the functions, by number, that return; None: all. The others are killed then.
    """
    children = [_fork_to(function) for function in functions]
    deadline = time.monotonic() + timeout
    try:
        return [
            _read(number, pid, pipe, deadline)
            for number, (pid, pipe) in enumerate(children)
            if waits_for is None or number in waits_for
        ]
    finally:
        _end(children)


def seconds_after(clock):
    """Returns how long ago the victim was killed."""
    return time.monotonic() - struct.unpack("<d", clock[:8])[0]


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux: a signal for this process."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("rest", ctypes.c_int * 12),
    )


class _Time(ctypes.Structure):
    """`struct itimerspec`: no interval, and the seconds and nanoseconds of the monotonic clock when it is time."""

    _fields_ = (("interval", ctypes.c_long * 2), ("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def send_this_process(number, seconds, clock):
    """Has the kernel send this process a signal later, wherever it is then: in C, with the interpreter's lock held.

    A thread would come in between only where the others let go of that lock.
    """
    at = time.monotonic_ns() + int(seconds * 1e9)
    clock[:8] = struct.pack("<d", at / 1e9)
    library = ctypes.CDLL("librt.so.1", use_errno=True)
    timer = ctypes.c_void_p()
    event = _Event(signal=number)
    if library.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError(ctypes.get_errno(), "timer_create")
    when = _Time(seconds=at // 10**9, nanoseconds=at % 10**9)
    if library.timer_settime(timer, 1, ctypes.byref(when), None):
        raise OSError(ctypes.get_errno(), "timer_settime")


def _fork(function, rank, world_size, address, name, arguments, seconds=20.0):
    def be_a_rank():
        backend = TcpBackend(rank, world_size, address, secret=SECRET, connect_timeout=20, timeout=seconds)
        if name == "shm":
            backend = share(backend, required=True, timeout=20.0)
        elif name == "gloo":
            backend = engage(backend, name, timeout=20.0)
        result = function(ProcessGroup(backend), *arguments)
        backend.close()
        return result

    return _fork_to(be_a_rank)


def _fork_to(function):
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        gc.freeze()  # what is garbage of the parent's, an engine of Gloo say, joins threads that are not here
        torch.set_num_threads(1)  # the threads of OpenMP stayed in the parent
        text = json.dumps({"result": function()})
    except BaseException:
        text = json.dumps({"failed": traceback.format_exc()})
    os.write(writing, text.encode())
    os._exit(0)


def _end(children):
    for pid, pipe in children:
        os.close(pipe)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _read(rank, pid, pipe, deadline):
    """Returns the result of a rank, None if it died; a child of it may keep the pipe open."""
    pidfd = os.pidfd_open(pid)
    try:
        if not select.select([pipe, pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise AssertionError(f"rank {rank} did not return in time")
    finally:
        os.close(pidfd)
    if not select.select([pipe], [], [], 0)[0]:
        return None
    data = os.read(pipe, 1 << 16)
    if not data:
        return None
    outcome = json.loads(data)
    assert "failed" not in outcome, f"rank {rank}: {outcome['failed']}"
    return outcome["result"]
