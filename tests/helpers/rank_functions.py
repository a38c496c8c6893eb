"""What ranks run in the tests of this folder. Each function is found by its name in another process."""

import contextvars
import multiprocessing
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


def start_method(_):
    return multiprocessing.get_start_method()


def total(group, factor):
    tensor = torch.full((3,), float(group.rank + 1))
    group.all_reduce(tensor)
    return tensor * factor


def init_again(group):
    return echelon.init() is group


def totals_of_another_world(group, environs):
    """Joins, twice, the world that the rank's own of `environs` describes, as if this process had been started so."""
    environ = environs[group.rank]
    os.environ.update(environ)
    try:
        return [contextvars.Context().run(_total_of_the_world) for _ in range(2)]
    finally:
        for name in environ:
            del os.environ[name]


def _total_of_the_world():
    with echelon.init() as world:
        return world.all_reduce(torch.tensor(world.rank + 1.0)).item()


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
            signal.alarm(50)
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


def same(group, value):
    return value


def large(group):
    return torch.ones(1 << 22)


def left_open(group):
    """Ends without waiting for the other ranks; what was sent must still arrive."""
    if group.rank == 0:
        group.isend(torch.arange(1 << 20), 1)
        return None
    return group.recv(0).sum().item()
