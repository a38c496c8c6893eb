"""What ranks run in the tests of this folder. Each function is found by its name in another process."""

import contextvars
import os
import signal
import threading

import torch

import echelon
from echelon.errors import PeerFailed


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def who(group):
    return group.rank, group.world_size


def total(group, factor):
    tensor = torch.full((3,), float(group.rank + 1))
    group.all_reduce(tensor)
    return tensor * factor


def init_again(group):
    return echelon.init() is group


def total_of_another_world(group, environ):
    """Joins the world that `environ` describes, as if this process had been started with it."""
    os.environ.update(environ, RANK=str(group.rank))
    try:
        with contextvars.Context().run(echelon.init) as other:
            assert other is not group
            return other.all_reduce(torch.tensor(other.rank + 1.0)).item()
    finally:
        for name in (*environ, "RANK"):
            del os.environ[name]


def init_other_backend(group):
    echelon.init(backend="simulated")


def num_threads(group):
    return torch.get_num_threads()


def pid(group):
    return os.getpid()


def raise_on(group, rank):
    if group.rank == rank:
        raise KeyError(f"rank {rank} has no key")
    group.barrier()


def kill_on(group, rank):
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()


def kill_after_blame(group):
    """Rank 0 blames rank 1 before rank 1 dies."""
    if group.rank == 1:
        group.recv(0)
        os.kill(os.getpid(), signal.SIGKILL)
    group.send(torch.zeros(1), 1)
    raise PeerFailed(1, "not heard of for long")


def kill_while_a_child_lives(group, rank):
    """A child that was forked keeps everything open that its parent had open."""
    group.barrier()
    if group.rank == rank:
        if os.fork() == 0:
            signal.alarm(20)
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()


def exit_with(group, status):
    os._exit(status)


def hang_after_failure(group):
    if group.rank == 0:
        raise ValueError("the cause")
    signal.pause()


def hang(group):
    signal.pause()


def raise_unpicklable(group):
    raise Unpicklable("one", "two")


def return_unpicklable(group):
    return threading.Lock()


def large(group):
    return torch.ones(1 << 22)


def left_open(group):
    """Ends without waiting for the other ranks; what was sent must still arrive."""
    if group.rank == 0:
        group.isend(torch.arange(1 << 20), 1)
        return None
    return group.recv(0).sum().item()
