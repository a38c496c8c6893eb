"""A process that a rank forks, such as a worker of a DataLoader, changes nothing of the rank's, and cannot be the rank.

Received tensors, those of `group.empty` and the gradients of DDP lie in memory that ranks share. What a child writes
there stays in the child. Groups, of which a child has neither threads nor connections, say so at once.
"""

import json
import multiprocessing
import os
import resource
import select
import signal
import threading
import time
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import echelon
from echelon.backends.shared.backend import share
from echelon.backends.shared.memory import mapping
from echelon.backends.tcp.backend import TcpBackend
from echelon.group.group import ProcessGroup
from tests.helpers.worlds import SECRET, free_address

# Simulated ranks refuse to fork.
ON_PROCESSES = pytest.mark.parametrize(
    "run", ["processes", pytest.param("gloo", marks=pytest.mark.slow)], indirect=True
)

LARGE = 100_000
"""Numbers in a message that is received where its sender wrote it."""


def in_child(function, seconds=10.0):
    """Returns what a function returns in a forked child, JSON-like, or how the child ended."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = json.dumps(function())
        except BaseException:
            text = json.dumps(traceback.format_exc())
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    try:
        if not select.select([reading], [], [], seconds)[0]:
            os.kill(pid, signal.SIGKILL)
            return "the child hangs"
        said = os.read(reading, 1 << 16)
    finally:
        os.close(reading)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return json.loads(said) if said else status


def exchange(group, value):
    """Sends and receives a large message; returns the tensor that came."""
    peer = (group.rank + 1) % group.world_size
    work = group.isend(torch.full((LARGE,), float(value)), peer)
    came = group.recv((group.rank - 1) % group.world_size)
    work.wait()
    return came


def sums(*tensors):
    return [tensor.sum().item() for tensor in tensors]


def overwrite(tensors):
    """Writes into tensors; returns their sums before and after."""
    before = sums(*tensors)
    for tensor in tensors:
        tensor.fill_(7.0)
    return [before, sums(*tensors)]


# Memory


def let_a_child_write(group):
    received = exchange(group, 1.0)
    shared = group.empty(1000).fill_(2.0)
    model = echelon.DDP(torch.nn.Linear(10, 1, bias=False), group)
    model(torch.ones(4, 10)).mean().backward()
    gradient = model.module.weight.grad
    tensors = [received, shared, gradient]
    group.barrier()
    child = in_child(lambda: overwrite(tensors))
    group.barrier()
    parent = sums(*tensors)
    group.all_reduce(shared)
    model(torch.ones(4, 10)).mean().backward()
    return child, parent, sums(shared, gradient), sums(exchange(group, 3.0))


@ON_PROCESSES
def test_what_a_child_writes_stays_there(run):
    for child, parent, later, message in run(let_a_child_write, 2):
        assert child == [[LARGE, 2000.0, 10.0], [7.0 * LARGE, 7000.0, 70.0]]
        assert parent == child[0]
        assert later == [4000.0, 20.0]
        assert message == [3.0 * LARGE]


def drop_what_a_child_has(group):
    """The child reads after the parent has dropped the tensor, whose memory serves other messages then."""
    received = exchange(group, 1.0)
    address = received.data_ptr()
    go, said = multiprocessing.Pipe(), multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        go[1].recv()
        said[1].send(received.sum().item())
        os._exit(0)
    del received
    again = [exchange(group, 5.0) for _ in range(20)]
    go[0].send("now")
    seen = said[0].recv() if said[0].poll(10.0) else None
    os.waitpid(pid, 0)
    return seen, any(tensor.data_ptr() == address for tensor in again)


def test_a_child_keeps_what_was_received_before_it(pool):
    for seen, is_used_again in pool.run(drop_what_a_child_has, 2, backend="shm"):
        assert is_used_again, "the test has to have its memory used again"
        assert seen == LARGE


def have_a_grandchild(group):
    received, shared = exchange(group, 1.0), group.empty(1000).fill_(1.0)

    def be_a_child():
        overwrite([received, shared])
        return [in_child(lambda: overwrite([received, shared])), sums(received, shared)]

    return in_child(be_a_child), sums(received, shared)


def test_a_grandchild_inherits_what_the_child_has_written(pool):
    for (grandchild, child), parent in pool.run(have_a_grandchild, 2, backend="shm"):
        assert grandchild[0] == child == [7.0 * LARGE, 7000.0]
        assert parent == [LARGE, 1000.0]


def outlive_the_group(group):
    """Tensors may live longer than the world that they came from."""
    with free_address() as own:
        address = group.broadcast_object(own)
        tcp = TcpBackend(group.rank, group.world_size, address, secret=SECRET, connect_timeout=20)
    with ProcessGroup(share(tcp, required=True, timeout=20.0)) as inner:
        received, shared = exchange(inner, 1.0), inner.empty(1000).fill_(1.0)
    del inner, tcp
    return in_child(lambda: overwrite([received, shared])), sums(received, shared)


def test_tensors_of_a_closed_group_are_a_childs_own_too(pool):
    for child, parent in pool.run(outlive_the_group, 2, backend="shm"):
        assert child == [[LARGE, 1000.0], [7.0 * LARGE, 7000.0]]
        assert parent == [LARGE, 1000.0]


class NoRoom:
    """The C library of a system that maps nothing more."""

    mremap, mprotect = mapping._libc.mremap, mapping._libc.mprotect

    @staticmethod
    def mmap(*_):
        return mapping._FAILED


def lack_room(group):
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    received, shared = exchange(group, 1.0), group.empty(1000).fill_(1.0)
    before, mapping._libc = mapping._libc, NoRoom
    try:
        outcomes = in_child(lambda: sums(shared)), in_child(lambda: overwrite([shared]))
    finally:
        mapping._libc = before
    return *outcomes, sums(received, shared)


def test_without_room_for_a_copy_a_write_ends_the_child(pool):
    for read, written, parent in pool.run(lack_room, 2, backend="shm"):
        assert read == [1000.0]
        assert written == -signal.SIGSEGV
        assert parent == [LARGE, 1000.0]


class Marked(Dataset):
    """Every item is the sum of a tensor, which is then overwritten."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __len__(self):
        return 8

    def __getitem__(self, number):
        before = sums(*self.tensors)
        for tensor in self.tensors:
            tensor.fill_(-float(number) - 1.0)
        return torch.tensor(before + sums(*self.tensors))


def load_data(group):
    model = echelon.DDP(torch.nn.Linear(10, 1, bias=False), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    received, shared = exchange(group, 1.0), group.empty(1000).fill_(2.0)
    model(torch.ones(4, 10)).mean().backward()
    tensors = [received, shared, model.module.weight.grad]
    values, kept = [], []
    for item in DataLoader(Marked(tensors), num_workers=2, multiprocessing_context="fork"):
        values.append(item[0].tolist())
        kept.append(sums(received, shared))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(4, 10)).mean().backward()
    return values, kept, model.module.weight.grad.tolist(), model.module.weight.tolist()


def test_workers_of_a_data_loader_disturb_no_training(pool):
    first, second = pool.run(load_data, 2, backend="shm", timeout=60.0)
    for values, kept, gradient, _ in (first, second):
        assert len(values) == 8
        assert values[0][:2] == [LARGE, 2000.0]
        assert all(each == [LARGE, 2000.0] for each in kept)
        assert gradient == [[1.0] * 10]
    assert first[3] == second[3]


# Groups


CALLS = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(3)),
    "all_reduce of another shape": lambda group: group.all_reduce(torch.ones(5)),
    "all_reduce beside": lambda group: group.all_reduce(torch.ones(3), async_op=True),
    "barrier": lambda group: group.barrier(),
    "send": lambda group: group.send(torch.ones(3), 1 - group.rank),
    "recv": lambda group: group.recv(1 - group.rank),
    "isend": lambda group: group.isend(torch.ones(LARGE), 1 - group.rank),
    "all_gather_object": lambda group: group.all_gather_object("x"),
    "empty": lambda group: group.empty(3),
    "subgroup": lambda group: group.subgroup([0, 1]),
}


def error_of(call, what):
    begun = time.monotonic()
    try:
        call(what)
    except echelon.Closed as error:
        return str(error) if time.monotonic() - begun < 5.0 else "late"  # a wait would take 20 s
    return "nothing was raised"


def use_in_a_child(group):
    group.all_reduce(torch.ones(3))
    part = group.subgroup([0, 1])

    def be_a_child():
        said = [error_of(call, each) for call in CALLS.values() for each in (group, part)]
        group.close()
        group.close()
        return said

    said = in_child(be_a_child)
    return os.getpid(), said, group.all_reduce(torch.ones(3)).tolist()


@ON_PROCESSES
def test_a_group_says_in_a_child_that_it_is_the_parents(run):
    for pid, said, total in run(use_in_a_child, 2):
        assert total == [2.0] * 3
        assert len(said) == 2 * len(CALLS)
        for text in said:
            assert f"belongs to process {pid}, and this is its forked child" in text, said
            assert "\n" not in text


def wait_in_a_child(group):
    """Of work that was begun in the parent, and that its threads alone could end."""
    works = [group.irecv(1 - group.rank), group.irecv(1 - group.rank, tag=1)]
    if group.rank == 0:
        works.append(group.all_reduce(torch.ones(3), async_op=True))
    said = in_child(lambda: [error_of(lambda each: each.wait(), work) for work in works])
    if group.rank == 1:
        works.append(group.all_reduce(torch.ones(3), async_op=True))
    group.barrier()  # until here no rank has sent anything
    group.send(torch.ones(1), 1 - group.rank)
    group.send(torch.ones(1), 1 - group.rank, tag=1)
    return os.getpid(), said, [work.wait().sum().item() for work in works]


@ON_PROCESSES
def test_work_of_the_parent_does_not_make_a_child_wait(run):
    for pid, said, results in run(wait_in_a_child, 2):
        assert all(f"process {pid}, and this is its forked child" in text for text in said), said
        assert results == [1.0, 1.0, 6.0]


def fork_while_busy(group, times):
    """Forks while another thread communicates, so that any lock may be held; returns what the children said."""
    is_over = threading.Event()

    def keep_busy():
        while not is_over.is_set():
            group.all_reduce(torch.ones(3), async_op=True).wait()
            exchange(group, 1.0)
            if bool(group.all_reduce(torch.tensor([float(is_over.is_set())])).item()):
                return

    part = group.subgroup([0, 1])
    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        said = [in_child(lambda: [error_of(call, part)[:5] for call in CALLS.values()]) for _ in range(times)]
    finally:
        is_over.set()
        thread.join(20.0)
    return said, thread.is_alive()


def test_a_fork_amid_communication_hangs_nobody(pool):
    for said, is_alive in pool.run(fork_while_busy, 2, 20, backend="shm"):
        assert not is_alive
        assert said == [["group"] * len(CALLS)] * 20
