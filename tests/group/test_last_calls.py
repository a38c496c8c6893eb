"""A call too many is noticed even if it was a rank's very last, and no rank had to wait for it."""

import re
import time
from pathlib import Path

import pytest
import torch

import echelon
from echelon.backends.delivery import Receive
from echelon.backends.formats import wire
from echelon.backends.formats.wire import Tag
from echelon.backends.matching import Mailbox
from echelon.backends.tcp.parting import MAX_TALLIES, Parting
from echelon.backends.work import Work
from echelon.operation_records import FlightRecorder
from tests.helpers.forked_ranks import run_forked


def close(group):
    """Returns the error of closing the group: type and text."""
    try:
        group.close()
    except echelon.EchelonError as error:
        return type(error).__name__, str(error)
    return "closed", ""


def last_call(group, kind):
    match kind:
        case "broadcast":
            group.broadcast(torch.ones(3), src=0)
        case "reduce":
            group.reduce(torch.ones(3), dst=1)
        case "gather":
            group.gather(torch.ones(3), dst=1)
        case "other":  # as many calls as rank 1 makes, and other ones
            group.broadcast(torch.ones(3), src=0)
        case "send":
            group.send(torch.ones(3), 1, tag=4)
        case "async":
            group.all_reduce(torch.ones(3), async_op=True)
        case "subgroup":
            group.subgroup([0, 1]).broadcast(torch.ones(3), src=0)


def one_call_too_many(group, kind, folder):
    """Rank 0 makes a call that rank 1 does not make, and closes first."""
    called, closed = Path(folder, "called"), Path(folder, "closed")
    group.barrier()
    if group.rank == 0:
        last_call(group, kind)
        while not called.exists():
            time.sleep(0.001)
        outcome = close(group)
        closed.touch()
        return outcome
    if kind == "other":
        group.broadcast(torch.ones(2), src=1)
    if kind == "subgroup":
        group.subgroup([0, 1])
    called.touch()
    while not closed.exists():
        time.sleep(0.001)
    return close(group)


CALLS = [
    ("broadcast", "tcp", "closed", "barrier, #1 .*1 in all, but rank 0 closed it after broadcast.*#2 .*, 2 in all"),
    ("reduce", "tcp", "closed", r"barrier, #1 .*1 in all, but rank 0 closed it after reduce\(sum, dst=1\).*#2 "),
    ("gather", "tcp", "closed", r"barrier, #1 .*1 in all, but rank 0 closed it after gather\(dst=1\).*#2 "),
    (
        "other",
        "tcp",
        "closed",
        r"broadcast\(src=1\) of float32\[2\], #2 .* after broadcast\(src=0\) of float32\[3\], #2 ",
    ),
    (
        "subgroup",
        "tcp",
        "closed",
        "no collective of it, 0 in all, but rank 0 closed it after broadcast.*#1 of group 'wo",
    ),
    ("send", "tcp", "closed", "without having received a message from rank 0, tag 4"),
    ("send", "shm", "closed", "without having received a message from rank 0, tag 4"),
    ("async", "shm", "Closed", "barrier, #1 .*1 in all, but rank 0 closed it after all_reduce"),
    ("async", "tcp", "Closed", "barrier, #1 .*1 in all, but rank 0 closed it after all_reduce"),
]


@pytest.mark.parametrize(("kind", "backend", "first", "second"), CALLS)
def test_the_rank_that_closes_last_is_told_of_a_call_too_many(kind, backend, first, second, tmp_path):
    (name, message), told = run_forked(one_call_too_many, 2, kind, str(tmp_path), backend=backend).values()
    assert name == first
    if first == "Closed":
        assert "all_reduce(sum) of float32[3], #2 of group 'world' at " in message
        assert message.endswith(" was still under way when rank 0 closed: wait for it before")
    kind, message = told
    assert kind == "CollectiveMismatch"
    assert re.search(second, message), message
    assert "\n" not in message


def send_to_one_that_has_closed(group, folder):
    """Rank 0 sends what rank 1 does not receive; rank 1 closes first, and rank 0 hears of that before it closes."""
    closed = Path(folder, "closed")
    if group.rank == 0:
        group.send(torch.ones(3), 1)
        group.send(torch.ones(3), 1)
        while not closed.exists():
            time.sleep(0.001)
        return close(group)
    group.recv(0)
    outcome = close(group)
    closed.touch()
    return outcome


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_the_sender_is_told_of_a_message_that_nobody_received(backend, tmp_path):
    sender, receiver = run_forked(send_to_one_that_has_closed, 2, str(tmp_path), backend=backend).values()
    assert sender[0] == "CollectiveMismatch"
    assert "rank 0 has sent 2 messages to rank 1, which closed its group after it had received 1: " in sender[1]
    assert receiver[0] == "CollectiveMismatch"  # it came before rank 1 closed


def end_differently(group, kind):
    """Ends with different numbers of calls, and in good order."""
    group.barrier()
    other = group.subgroup([0, 1])
    match kind:
        case "part of the ranks":
            if other is not None:
                other.broadcast(torch.ones(3), src=0)
            if group.rank == 1:
                group.recv_any()
            if group.rank == 2:
                group.send(torch.ones(3), 1)
        case "a receive withdrawn":
            if group.rank == 0:
                with pytest.raises(echelon.Timeout):
                    group.recv(1, timeout=0.0)
            group.barrier()
            if group.rank == 1:
                group.isend(torch.ones(3), 0)
        case "a failure":
            if group.rank < 2:
                with pytest.raises(echelon.CollectiveMismatch):
                    other.all_reduce(torch.ones(2 + group.rank))
            if group.rank == 2:
                group.isend(torch.ones(3), 0)
        case "an exception":
            if group.rank == 1:
                group.isend(torch.ones(3), 0)  # to a rank that may be gone
            if group.rank == 0:
                try:
                    raise ValueError("bad")
                except ValueError:
                    group.close()
        case "calls that are refused":
            with pytest.raises(echelon.EchelonError):
                group.all_reduce(torch.ones(3), "nonsense")
            if group.rank == 0:
                with pytest.raises(echelon.InvalidRank):
                    group.send(torch.ones(3), 9)
        case "receives that do not fit":
            if group.rank == 0:
                group.send(torch.ones(3), 1)
            if group.rank == 1:
                with pytest.raises(echelon.SizeMismatch):
                    group.recv(0, out=torch.ones(4))
        case "a message received late":
            if group.rank == 0:
                group.isend(torch.ones(100_000), 1).wait()
            if group.rank == 1:
                group.irecv(0).wait()
    if kind != "an exception":
        group.close()
    return "closed"


KINDS = [
    "part of the ranks",
    "a receive withdrawn",
    "a failure",
    "an exception",
    "calls that are refused",
    "receives that do not fit",
    "a message received late",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_ranks_that_may_end_with_different_calls_are_not_accused(kind, backend):
    outcomes = run_forked(end_differently, 3, kind, backend=backend)
    assert list(outcomes.values()) == ["closed"] * 3


def send_more(group):
    if group.rank == 0:
        group.send(torch.ones(3), 1, tag=4)


def withdraw(group):
    if group.rank == 1:
        with pytest.raises(echelon.Timeout):
            group.recv(0, timeout=0.0)
    group.barrier()
    if group.rank == 0:
        group.send(torch.ones(3), 1)


def test_simulated_ranks_are_told_of_a_message_that_nobody_received():
    with pytest.raises(echelon.CollectiveMismatch, match=r"rank 1 has returned .* a message from rank 0, tag 4"):
        echelon.simulate(send_more, 2)
    echelon.simulate(withdraw, 2)


def test_a_rank_says_only_so_much_about_its_calls():
    recorder = FlightRecorder()
    parting = Parting(0, recorder, Mailbox())
    for context in range(1, 1000):
        parting.join(context, (0, 1))
        recorder.begin("group", context, 1, 7, "barrier")
    words = list(parting.words_for(1))
    assert len(words) == MAX_TALLIES
    assert [word.context for word in words] == [0, *range(1000 - MAX_TALLIES + 1, 1000)]
    for word in words:
        parting.hear(1, word)
    assert parting.difference() is None
    with pytest.raises(echelon.ProtocolError, match="more than 256 TALLY frames"):
        parting.hear(1, wire.Frame(wire.FrameKind.TALLY))


def test_a_rank_that_waits_for_a_message_does_not_say_how_many_it_has_received():
    """One may be on its way that this rank would have received."""
    mailbox = Mailbox()
    parting = Parting(0, FlightRecorder(), mailbox)
    assert [tally.sequence for tally in parting.words_for(1)] == [0]
    mailbox.post(Receive(Work(None, "receive from rank 1"), 1, Tag(step=3), None, ""))
    assert list(parting.words_for(1)) == []
    assert [tally.sequence for tally in parting.words_for(2)] == [0]


def count(group):
    group.all_reduce(torch.ones(1))


def leave_one_out(group):
    for step in range(4):
        group.all_reduce(torch.ones(1))
        if group.rank == 1 and step == 1:
            continue
        count(group)
    return ""


def left_one_out(group):
    try:
        return leave_one_out(group)
    except echelon.CollectiveMismatch as error:
        return str(error)


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_the_line_of_the_call_that_a_closed_rank_left_out_is_named(backend):
    message = run_forked(left_one_out, 2, backend=backend)[0]
    first = leave_one_out.__code__.co_firstlineno
    helper = f"{__file__}:{count.__code__.co_firstlineno + 1}, called from {__file__}:{first + 5}"
    own = f"{__file__}:{first + 2}, called from {__file__}:{left_one_out.__code__.co_firstlineno + 2}"
    assert "rank 1 has closed its group" in message
    if backend == "shm":  # its native library notes no callers
        helper, own = (each.partition(", called")[0] for each in (helper, own))
    assert f"; their lines differ from #4 on, {helper} on rank 0 and {own} on rank 1: every rank must call" in message


def test_a_rank_that_closes_leaves_as_many_lines_as_a_frame_holds():
    recorder = FlightRecorder()
    here, there = Parting(0, recorder, Mailbox()), Parting(1, FlightRecorder(), Mailbox())
    here.join(5, (0, 1))

    def begin(number):  # in place of the group's method, whose caller has the line
        recorder.begin("group", 5, number, 7, "barrier")

    for number in range(1, 1000):
        begin(number)
    for word in here.words_for(1):
        assert len(word.note.encode()) <= wire.MAX_NOTE_BYTES
        there.hear(0, word)
    lines = there.lines_left(0, 5)
    assert max(lines) == 999
    assert 800 < len(lines) < 999
    assert len(set(lines.values())) == 1
    assert there.lines_left(1, 5) == {}
