"""What collectives over messages copy, in bytes: as little as there is to copy."""

import pytest
import torch

from echelon._torch_private.tensors import DispatchMode
from echelon.backends.tcp import reader
from echelon.group.group import ProcessGroup
from tests.helpers.worlds import start, tcp_world

MIB = 1 << 20
COPIES = {"copy_", "clone", "cat", "_to_copy", "contiguous", "index_put_"}


class Counter(DispatchMode):
    """Counts the bytes that torch copies in one thread. What sockets read and write is not torch's."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in COPIES:
            self.num_bytes += result.nbytes
        return result


def copied(num_ranks, act):
    """Returns what each rank copies in a call."""

    def run(backend):
        group = ProcessGroup(backend)
        with Counter() as counter:
            act(group)
        group.barrier()
        return counter.num_bytes

    with tcp_world(num_ranks) as world:
        joins = [start(run, backend) for backend in world]
        return [join() for join in joins]


MINE = torch.ones(MIB // 4)
"""What each rank gives: 1 MiB."""
CASES = {
    "all_reduce": (lambda group: group.all_reduce(MINE.clone()), [1, 1, 1]),  # the clone is the test's own
    "reduce": (lambda group: group.reduce(MINE, 1) if group.rank != 1 else group.reduce(MINE.clone(), 1), [0, 1, 0]),
    "broadcast": (lambda group: group.broadcast(torch.empty(MIB // 4), 0), [0, 0, 0]),
    "all_gather": (lambda group: group.all_gather(MINE), [1, 1, 1]),
    "all_gather(out=)": (lambda group: group.all_gather(MINE, out=torch.empty(3 * MIB // 4)), [1, 1, 1]),
    "gather": (lambda group: group.gather(MINE, 0), [1, 0, 0]),
    "scatter": (lambda group: group.scatter(torch.ones(3 * MIB // 4) if group.rank == 0 else None, 0), [1, 0, 0]),
    "reduce_scatter": (lambda group: group.reduce_scatter(torch.ones(3 * MIB // 4)), [0, 0, 0]),
    "reduce_scatter(out=)": (
        lambda group: group.reduce_scatter(torch.ones(3 * MIB // 4), out=torch.empty(MIB // 4)),
        [0, 0, 0],
    ),
    "all_to_all": (lambda group: group.all_to_all(torch.ones(3 * MIB // 4)), [1, 1, 1]),
    "uneven all_gather": (lambda group: group.all_gather(MINE[: MIB // 8 * (1 + group.rank % 2)]), [2.5, 3, 2.5]),
}


@pytest.fixture(autouse=True)
def _time_to_ask(monkeypatch):
    """A message that nobody has asked for in time is copied once more: here every rank has the time, however busy."""
    monkeypatch.setattr(reader, "_PAUSE_SECONDS", 10.0)


@pytest.mark.parametrize("name", CASES)
def test_no_more_is_copied_than_needed(name):
    act, wanted = CASES[name]
    assert [round(num_bytes / MIB, 2) for num_bytes in copied(3, act)] == wanted
