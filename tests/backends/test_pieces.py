"""Messages that are combined while they arrive."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.backends import delivery
from echelon.backends.delivery import Receive, ReduceOnArrival
from echelon.backends.formats.wire import Tag
from echelon.backends.matching import Mailbox
from echelon.backends.memory import bytes_of
from echelon.backends.work import Work
from echelon.errors import PeerFailed, Timeout


@given(st.integers(1, 40), st.lists(st.integers(1, 50), max_size=60), st.sampled_from([torch.float32, torch.int64]))
def test_every_value_is_combined_once_however_it_arrives(count, sizes, dtype):
    came = torch.arange(1, count + 1, dtype=dtype)
    own, calls = torch.full((count,), 100, dtype=dtype), []

    def subtract(mine, other):
        calls.append(len(mine))
        mine.sub_(other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivery, "PIECE_BYTES", 32)
        place = ReduceOnArrival(own, subtract)
        data, done = bytes_of(came), 0
        for size in [*sizes, *[1000] * (data.nbytes // 32 + 1)]:
            if done < data.nbytes:
                room = place.room(done)[:size]
                room[:] = data[done : done + room.nbytes]
                done += room.nbytes
                place.wrote(done)
    assert torch.equal(own, 100 - came)
    assert max(calls) * dtype.itemsize <= 32
    assert sum(calls) == count


def arriving(own, parts=1):
    """A message of two floats for a receive that combines it, of which some parts have come."""
    mailbox = Mailbox()
    work = Work(None, "receive")
    mailbox.post(Receive(work, 1, Tag(7, 1), own, "", combine=torch.Tensor.add_))
    delivery = mailbox.arrive(1, Tag(7, 1), (2,), torch.float32, "")
    delivery.room(0)[: 4 * parts] = bytes_of(torch.tensor([5.0, 6.0]))[: 4 * parts]
    delivery.wrote(4 * parts)
    return mailbox, work, delivery


def test_nothing_is_combined_after_the_receive_was_withdrawn():
    own = torch.zeros(2)
    mailbox, work, delivery = arriving(own)
    mailbox.withdraw(work, Timeout("late"), [delivery])
    assert delivery.room(4) is None
    delivery.wrote(8)
    delivery.finish()
    assert own.tolist() == [0, 0]
    again = Work(None, "receive")
    mailbox.post(Receive(again, 1, Tag(7, 1), None, ""))
    assert not again.is_completed(), "half a message was given to the next receive"


def test_nothing_is_combined_after_the_group_has_failed():
    own = torch.zeros(2)
    mailbox, work, delivery = arriving(own)
    cause = mailbox.fail_context(7, PeerFailed(3, "gone"), [delivery])
    assert work.exception() is cause
    assert delivery.room(4) is None
    delivery.wrote(8)
    assert own.tolist() == [0, 0]


def test_a_message_that_is_there_whole_is_combined_as_well():
    own = torch.ones(2)
    mailbox, work = Mailbox(), Work(None, "receive")
    mailbox.take(1, Tag(), torch.tensor([5.0, 6.0]), "")
    mailbox.post(Receive(work, 1, Tag(), own, "", combine=torch.Tensor.add_))
    assert work.result() is own
    assert own.tolist() == [6, 7]
