"""A receive whose time is up is withdrawn, and loses no message: one that comes just then is returned."""

import signal

import pytest
import torch

from echelon.backends.delivery import Receive
from echelon.backends.formats.wire import Tag
from echelon.backends.matching import Mailbox
from echelon.backends.tcp.parting import Parting
from echelon.backends.work import Work
from echelon.errors import Timeout
from echelon.operation_records import FlightRecorder

GO = 7
GONE = 8


def receive(group, how, out):
    match how:
        case "recv":
            return group.recv(1, out=out, timeout=0.0)
        case "recv_any":
            return group.recv_any(timeout=0.0).tensor


def receive_when_it_is_late(group, how, step, num_elements):
    """Rank 1 sends as soon as the receive of rank 0 has run out of time, which is about to do `step`."""
    if group.rank == 1:
        for value in (1.0, 2.0):
            group.recv(0, tag=GO)
            group.send(torch.full((num_elements,), value), 0)
            group.send(torch.ones(1), 0, tag=GONE)
        return []
    part = group.backend.messages if step == "cancel" else group.backend.control
    original = getattr(part, step)

    def stepping(*args):
        setattr(part, step, original)
        group.send(torch.ones(1), 1, tag=GO)
        group.recv(1, tag=GONE)
        return original(*args)

    found = []
    for _ in range(2):
        setattr(part, step, stepping)
        found.append(float(receive(group, how, torch.zeros(num_elements))[-1]))
    return found


@pytest.mark.parametrize("num_elements", [2, 100_000])
@pytest.mark.parametrize(("how", "step"), [("recv", "ask"), ("recv_any", "ask"), ("recv", "cancel")])
def test_a_message_that_comes_while_a_receive_times_out_is_returned(on_backend, how, step, num_elements):
    assert on_backend(receive_when_it_is_late, 2, how, step, num_elements)[0] == [1.0, 2.0]


class Interrupted(Exception):
    """Raised by the handler of a signal."""


def interrupt(*_):
    raise Interrupted


def receive_after_an_interruption(group):
    if group.rank == 1:
        group.recv(0, tag=GO)
        group.send(torch.ones(3), 0)
        return None
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            group.recv(1)
    finally:
        signal.signal(signal.SIGALRM, before)
    group.send(torch.ones(1), 1, tag=GO)
    return group.recv(1).tolist()


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_a_receive_that_a_signal_breaks_off_takes_no_message(pool, backend):
    assert pool.run(receive_after_an_interruption, 2, backend=backend)[0] == [1.0, 1.0, 1.0]


def test_a_receive_that_has_its_message_is_not_withdrawn():
    mailbox = Mailbox()
    work = Work(None, "receive")
    mailbox.post(Receive(work, 1, Tag(1, 0, 0), None, None))
    mailbox.take(1, Tag(1, 0, 0), torch.ones(2), "")
    mailbox.withdraw(work, Timeout("late"))
    assert work.result().tolist() == [1.0, 1.0]
    assert not mailbox.failures.has_any


def test_a_rank_that_still_waits_for_messages_does_not_say_how_many_it_got():
    """It has given up: one may be on its way, and whoever sent it is not to blame."""
    mailbox = Mailbox()
    parting = Parting(0, FlightRecorder(), mailbox)
    parting.join(1, (0, 1, 2))
    mailbox.post(Receive(Work(None, "receive"), 1, Tag(1, 0, 0), None, None))
    assert not list(parting.words_for(1))
    assert [word.context for word in parting.words_for(2)] == [0]
