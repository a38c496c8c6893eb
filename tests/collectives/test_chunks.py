"""What is being sent is not written, and what can be sent in place is not copied."""

from contextlib import nullcontext

import pytest
import torch

from echelon.backends.work import Work
from echelon.collectives.calls.chunks import FlatChunks, RowChunks
from echelon.collectives.calls.run import Channel, run
from echelon.collectives.plans.algorithms import build
from echelon.collectives.plans.plan import Copy, Plan, Recv, Reduce, Send
from echelon.collectives.plans.select import Selector
from tests.helpers.collective_calls import call_of


class LateBackend:
    """Sends a tensor no sooner than its Work is waited for; whatever is received is there at once."""

    def __init__(self, comes):
        self.comes = comes
        self.sent = []
        self.messages = self

    def will_wait(self):
        return nullcontext()

    def now(self):
        return 0.0

    def irecv(self, src, tag, *, out=None, note="", must_fit=True, combine=None):
        assert out is None or combine is None, "not in these plans"
        work = Work(self, "receive")
        work.complete(self.comes.clone() if out is None else out.copy_(self.comes))
        return work

    def isend(self, tensor, dst, tag, *, note=""):
        return Late(self.sent, tensor)


class Late:
    has_ended = False

    def __init__(self, sent, tensor):
        self.sent, self.tensor = sent, tensor

    def wait(self, timeout):
        self.sent.append(self.tensor.tolist())


def play(plan, own, comes):
    """Runs rank 0 and returns what it sent."""
    backend = LateBackend(comes)
    ranks = range(plan.num_ranks)
    record = call_of(1, "plan", deadline=1.0)
    channel = Channel(backend, ranks, 0, 1, record, Selector((0,) * plan.num_ranks))
    run(plan, channel, FlatChunks.equal(own, plan.num_chunks), torch.Tensor.add_)
    return backend.sent


def test_a_chunk_is_not_combined_before_it_is_sent():
    own = torch.tensor([1.0, 2.0])
    assert play(build("all_reduce", "recursive_doubling", 2), own, torch.tensor([10.0, 20.0])) == [[1.0, 2.0]]
    assert own.tolist() == [11.0, 22.0]


def test_a_chunk_is_not_overwritten_before_it_is_sent():
    own = torch.tensor([1.0, 2.0])
    swap = Plan.from_text("swap: 2 ranks, 1 chunks\nrank 0: 0>1 0<1\nrank 1: 0>0 0<0")
    assert play(swap, own, torch.tensor([10.0, 20.0])) == [[1.0, 2.0]]
    assert own.tolist() == [10.0, 20.0]


def test_parts_are_sent_from_where_they_are_and_received_to_where_they_go():
    flat = torch.arange(10)
    parts = FlatChunks.equal(flat, 4)
    assert [parts.part(number).tolist() for number in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    one = parts.outgoing(Send(1, (1, 2)))
    assert [(piece.tolist(), piece.data_ptr()) for piece in one] == [([3, 4, 5, 6, 7], flat[3:].data_ptr())]
    for step in (Recv(1, (3, 0)), Reduce(1, (3, 0))):
        two = parts.places(step, frozenset())
        assert [piece.data_ptr() for piece in two] == [flat[8:].data_ptr(), flat.data_ptr()]
        assert parts.places(step, frozenset({0})) == [None, None], "chunk 0 is being sent"
    parts.copy(Copy(3, 2))
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 8, 9]


def test_a_tensor_of_its_own_is_sent_as_it_is_and_several_as_their_rows():
    tensors = RowChunks(3, {0: torch.ones(2, 3), 1: torch.zeros(0, 3)})
    assert tensors.outgoing(Send(1, (0,)))[0] is tensors[0]
    counts, rows = tensors.outgoing(Send(1, (0, 1)))
    assert (counts.tolist(), rows.shape) == ([2, 0], (2, 3))
    other = RowChunks(3, {})
    other.keep(Recv(0, (1, 2)), [counts, rows], None)
    assert (other[1].shape, other[2].shape) == ((2, 3), (0, 3))
    other.copy(Copy(1, 0))
    assert other[0] is other[1]


def test_what_is_not_there_is_noticed():
    with pytest.raises(AssertionError):
        RowChunks(2, {})[0]
