"""An all-reduce or a message like one before leaves out what was checked then, and is the same call otherwise."""

import os
import re

import pytest
import torch

import echelon
from echelon.group.messages import PointToPoint
from echelon.operation_records import CAPACITY
from tests.helpers import forked_ranks
from tests.helpers.forked_ranks import run_forked


def refuse(*_):
    """Takes the place of the long way where nothing may take it."""
    raise AssertionError("it was made as if for the first time")


def reduce_twice(group):
    """Returns what the records of a first call and of one like it say, but for the line and the time."""
    runner, kinds = group._runner, []
    for dtype, op in ((torch.float32, "sum"), (torch.float32, "mean"), (torch.bfloat16, "max"), (torch.int64, "band")):
        first, second = (torch.arange(5).to(dtype) + group.rank for _ in range(2))
        group.all_reduce(first, op)
        runner._check = refuse
        assert group.all_reduce(second, op, timeout=5.0) is second
        del runner._check
        assert torch.equal(first, second)
        records = group.backend.flight_recorder.records()[-2:]
        kinds.append([(record.operation, record.num_bytes, record.state, record.error) for record in records])
        lines = [record.place.rpartition(":") for record in records]
        assert lines[0][0] == lines[1][0] == __file__
        assert int(lines[1][2]) == int(lines[0][2]) + 2
        assert records[1].sequence == records[0].sequence + 1
        assert records[1].ended >= records[1].started >= records[0].ended
    return kinds


def test_its_result_and_its_record_are_the_same():
    for kinds in run_forked(reduce_twice, 2, backend="shm").values():
        assert [first for first, _ in kinds] == [second for _, second in kinds]
        assert [first[0] for first, _ in kinds] == [
            "all_reduce(sum) of float32[5]",
            "all_reduce(mean) of float32[5]",
            "all_reduce(max) of bfloat16[5]",
            "all_reduce(band) of int64[5]",
        ]


def reduce_what_only_looks_alike(group):
    """Tensors of a known shape and dtype that need more than their memory combined."""
    ones, one, complexes = torch.ones(5), torch.ones(1), torch.full((5,), 1 + 2j)
    for known in (ones, one, complexes):
        group.all_reduce(known.clone())
    assert group.all_reduce(torch.ones(10)[::2]).tolist() == [2.0] * 5
    parameter = torch.nn.Parameter(torch.ones(5))
    assert group.all_reduce(parameter) is parameter
    assert parameter.tolist() == [2.0] * 5
    negative = torch.tensor([1j]).conj().imag
    assert negative.is_neg()
    assert group.all_reduce(negative).tolist() == [-2.0]
    conjugate = complexes.conj()
    assert group.all_reduce(conjugate).tolist() == [2 - 4j] * 5
    for wrong, what in ((None, "NoneType"), (ones.to_sparse(), "sparse"), (torch.ones(1).expand(5), "share memory")):
        with pytest.raises(echelon.UnsupportedOp, match=what):
            group.all_reduce(wrong)
    with pytest.raises(echelon.UnsupportedOp, match="no meaning"):
        group.all_reduce(ones, "band")
    other = group.subgroup([0, 1])
    other.all_reduce(ones)
    other.close()
    with pytest.raises(echelon.Closed):
        other.all_reduce(ones)
    return True


def test_what_only_looks_alike_is_checked():
    assert list(run_forked(reduce_what_only_looks_alike, 2, backend="shm").values()) == [True, True]


def call_a_group_long_ago(group):
    """Only rank 0 makes the last calls of a group like earlier ones. More calls of another follow than are recorded."""
    ones, other = torch.ones(2), group.subgroup([0, 1])
    for _ in range(3):
        other.all_reduce(ones)
    for _ in range(3):
        other.all_reduce(ones, timeout=50.0 if group.rank else None)
    for _ in range(CAPACITY + 10):
        group.all_reduce(ones)
    recorder = group.backend.flight_recorder
    assert recorder.find(other.context, 6) is None
    return recorder.latest(other.context).sequence


def test_the_last_call_of_each_group_is_remembered_until_ranks_compare_it():
    assert list(run_forked(call_a_group_long_ago, 2, backend="shm").values()) == [6, 6]


def repeat_every_kind(group):
    """Makes each collective three times, and once more where the runner may not be asked."""
    rank, runner = group.rank, group._runner
    rows, both, part = torch.arange(4.0) + rank, torch.zeros(8), torch.zeros(2)
    calls = {
        "all_reduce": (lambda: group.all_reduce(rows.clone()), [1.0, 3.0, 5.0, 7.0]),
        "reduce": (lambda: group.reduce(rows.clone(), 1), [1.0, 3.0, 5.0, 7.0] if rank else [0.0, 1.0, 2.0, 3.0]),
        "broadcast": (lambda: group.broadcast(rows.clone(), 1), [1.0, 2.0, 3.0, 4.0]),
        "all_gather": (lambda: group.all_gather(rows, both), [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]),
        "gather": (lambda: group.gather(rows, 0, both), None if rank else [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]),
        "scatter": (lambda: group.scatter(rows, 1, part), [3.0, 4.0] if rank else [1.0, 2.0]),
        "reduce_scatter": (lambda: group.reduce_scatter(rows, out=part), [5.0, 7.0] if rank else [1.0, 3.0]),
        "all_to_all": (
            lambda: group.all_to_all(rows, rows.new_empty(4)),
            [2.0, 3.0, 3.0, 4.0] if rank else [0.0, 1.0, 1.0, 2.0],
        ),
        "barrier": (group.barrier, None),
        "new all_gather": (lambda: group.all_gather(rows), [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]),
        "new gather": (lambda: group.gather(rows, 0), None if rank else [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]),
        "new reduce_scatter": (lambda: group.reduce_scatter(rows), [5.0, 7.0] if rank else [1.0, 3.0]),
        "new all_to_all": (lambda: group.all_to_all(rows), [2.0, 3.0, 3.0, 4.0] if rank else [0.0, 1.0, 1.0, 2.0]),
    }
    for kind, (call, want) in calls.items():
        for turn in range(4):
            runner.call = refuse if turn == 3 else type(runner).call.__get__(runner)
            got = call()
            assert want is None if got is None else got.tolist() == want, f"{kind}, #{turn}: {got}"
        del runner.call
    num_known = len(runner.known._kept)
    # A gather to another rank is the same with `out` and without.
    assert num_known == len(calls) - rank
    assert group.all_gather(rows) is not group.all_gather(rows)
    for _ in range(5):
        group.barrier(timeout=5.0)
    assert len(runner.known._kept) == num_known
    changed = both._version
    group.all_gather(rows, both)
    assert both._version == changed + 1
    records = group.backend.flight_recorder.records()
    assert [record.sequence for record in records] == list(range(1, 4 * len(calls) + 9))
    assert {record.place.rpartition(":")[0] for record in records} == {__file__}
    # Rank 1 has one row more than the last times: rank 0 learns that in the meeting.
    more = torch.arange(4.0 + rank)
    for _ in range(3):
        want = [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0, 4.0]
        assert group.all_gather(more, torch.empty(9) if rank else both.new_empty(9)).tolist() == want
    assert group.all_gather(rows, both).tolist() == calls["all_gather"][1]
    for _ in range(3):
        assert group.all_gather(more).tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    assert group.all_gather(rows).tolist() == calls["all_gather"][1]
    with pytest.raises(echelon.SizeMismatch):
        group.all_gather(more, both)
    return True


def test_every_kind_is_made_by_the_library_alone():
    assert list(run_forked(repeat_every_kind, 2, backend="shm").values()) == [True, True]


def gather_without_a_spin(group):
    """Gathers into new tensors. Nobody spins, so the first rank of each meeting goes on in Python."""
    waiter, runner, late = group._runner._executor._host.waiter._state, group._runner, []
    waiter.spin = waiter.yields = 0
    runner.go_on = lambda begun, *rest: late.append(len(begun)) or type(runner).go_on(runner, begun, *rest)
    rows, totals = torch.arange(4.0) + group.rank, []
    for _ in range(20):
        totals += [group.all_gather(rows).tolist(), group.reduce_scatter(rows).tolist()]
    group.barrier()
    return totals, late.count(3)


def test_a_rank_that_waits_gets_its_result_in_a_new_tensor_too():
    outcomes = run_forked(gather_without_a_spin, 2, backend="shm")
    for rank, (totals, _) in outcomes.items():
        assert totals == [[0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0], [5.0, 7.0] if rank else [1.0, 3.0]] * 20
    # All but the first two of each kind, less the meetings at which both saw each other at once.
    assert sum(num_late for _, num_late in outcomes.values()) > 10


def gather_beside_symmetric(group):
    """Small gathers in a group that has symmetric tensors, then one whose blocks no longer lie beside their notes."""
    rank, runner = group.rank, group._runner
    small, large = group.empty(4).fill_(rank), group.empty(1 << 19).fill_(rank)
    for turn in range(4):
        runner.call = refuse if turn == 3 else type(runner).call.__get__(runner)
        assert group.all_gather(small).tolist() == [0.0] * 4 + [1.0] * 4
    del runner.call
    # Rank 1 has more than fits beside its note. Rank 0 repeats its call with a tensor elsewhere: the place of the
    # earlier one, in symmetric memory, does not count any more.
    got = group.all_gather(large if rank else torch.full((4,), 7.0))
    assert torch.equal(got, torch.cat([torch.full((4,), 7.0), torch.ones(1 << 19)]))
    return True


def test_small_gathers_beside_symmetric_tensors_are_made_by_the_library():
    assert list(run_forked(gather_beside_symmetric, 2, backend="shm").values()) == [True, True]


def come_late_to_known(group):
    for _ in range(3):
        group.all_reduce(torch.ones(4))
    if group.rank == 1:
        group.recv(0)
        return "nothing", ""
    group.timeout = 0.3
    try:
        group.all_reduce(torch.ones(4))
    except echelon.Timeout as error:
        group.send(torch.ones(1), 1)
        return str(error), group.backend.flight_recorder.records()[-2].error
    return "nothing", ""


def test_a_known_call_that_others_do_not_make_times_out():
    text, recorded = run_forked(come_late_to_known, 2, backend="shm")[0]
    assert "all_reduce(sum) of float32[4], #4" in text
    assert re.search(r"waited \d+\.\d s for rank 1", text), text
    assert recorded == f"Timeout: {text}"


def close_known(group):
    other = group.subgroup([0, 1])
    for each in (group, other, group):
        for _ in range(3):
            each.all_reduce(torch.ones(4))
    group.close()
    for each in (group, other):
        with pytest.raises(echelon.Closed):
            each.all_reduce(torch.ones(4))
    return True


def test_a_known_call_of_a_closed_backend_is_refused():
    assert list(run_forked(close_known, 2, backend="shm").values()) == [True, True]


def disagree_later(group):
    for op in ("sum", "max"):
        group.all_reduce(torch.ones(4), op)
    try:
        group.all_reduce(torch.ones(4), ("sum", "max")[group.rank])
    except echelon.CollectiveMismatch as error:
        return str(error), group.backend.flight_recorder.records()[-1].error
    return "nothing", ""


def test_ranks_that_disagree_are_told_both_sides():
    for text, recorded in run_forked(disagree_later, 2, backend="shm").values():
        assert "all_reduce(sum) of float32[4], #3" in text
        assert "all_reduce(max) of float32[4], #3" in text
        assert recorded == f"CollectiveMismatch: {text}"


def come_late(group):
    group.all_reduce(torch.ones(4))
    if group.rank == 1:
        group.recv(0)
        return "nothing"
    try:
        group.all_reduce(torch.ones(4), timeout=0.2)
    except echelon.Timeout as error:
        group.send(torch.ones(1), 1)
        return str(error)
    return "nothing"


def test_its_time_is_up_in_the_same_way():
    text = run_forked(come_late, 2, backend="shm")[0]
    assert "all_reduce(sum) of float32[4], #2" in text
    assert re.search(r"waited \d+\.\d s for rank 1", text), text


def swap_twice(group):
    """Returns what the records of a first message and of one like it say, but for the line and the time."""
    peer = 1 - group.rank
    ways = PointToPoint._prepare_send, PointToPoint._prepare_receive
    for known in (ways, (refuse, refuse)):
        PointToPoint._prepare_send, PointToPoint._prepare_receive = known
        group.send(torch.full((5,), float(group.rank)), peer, 3)
        assert group.recv(peer, 3).tolist() == [peer] * 5
        group.send(torch.ones(5), peer, 3)
        assert group.recv(peer, 3, out=torch.empty(5)).tolist() == [1.0] * 5
        if known is ways:
            PointToPoint._prepare_send = refuse  # of that tag, shape and dtype there was one before
            group.isend(torch.ones(5), peer, 3).wait()
            PointToPoint._prepare_send = ways[0]
            # A `recv` that finds its message there prepares nothing: a later one that finds none would be refused.
            assert group.irecv(peer, 3, out=torch.empty(5)).wait().tolist() == [1.0] * 5
    PointToPoint._prepare_send, PointToPoint._prepare_receive = ways
    records = group.backend.flight_recorder.records()
    assert {record.place.rpartition(":")[0] for record in records} == {__file__}
    return [(record.operation, record.num_bytes, record.state, record.error) for record in records]


def test_the_records_of_messages_are_the_same():
    for rank, records in run_forked(swap_twice, 2, backend="shm").items():
        send = [f"send to rank {1 - rank}, tag 3 of float32[5]", 20, "done", ""]
        recv = [f"receive from rank {1 - rank}, tag 3 of float32[5]", 20, "done", ""]
        assert records == [send, recv] * 5


def swap_what_only_looks_alike(group):
    """Messages of a known kind that need more than their memory copied, and calls that are wrong."""
    peer = 1 - group.rank

    def swap(tensor, out=None):
        group.send(tensor, peer)
        return group.recv(peer, out=out)

    for length in (1, 5):
        swap(torch.ones(length))
        swap(torch.ones(length), torch.empty(length))
    assert swap(torch.arange(10.0)[::2]).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert swap(torch.nn.Parameter(torch.ones(5))).tolist() == [1.0] * 5
    assert swap(torch.tensor([1j]).conj().imag).tolist() == [-1.0]
    kept = torch.nn.Parameter(torch.zeros(5))
    assert swap(torch.ones(5), kept) is kept
    assert kept.tolist() == [1.0] * 5
    ones = torch.ones(5)
    for wrong, what in ((None, "NoneType"), (ones.to_sparse(), "sparse")):
        with pytest.raises(echelon.UnsupportedOp, match=what):
            group.send(wrong, peer)
    with pytest.raises(echelon.UnsupportedOp, match="contiguous"):
        group.recv(peer, out=torch.ones(10)[::2])
    for rank, error in ((group.rank, echelon.SelfSend), (2, echelon.InvalidRank), (float(peer), echelon.InvalidRank)):
        with pytest.raises(error):
            group.send(ones, rank)
        with pytest.raises(error):
            group.recv(rank)
    for tag in (-1, 1.5, "1", [1], None):
        with pytest.raises(echelon.SizeMismatch, match="a tag from 0 to 4294967295, got"):
            group.send(ones, peer, tag)
        with pytest.raises(echelon.SizeMismatch, match="a tag from 0 to 4294967295, got"):
            group.recv(peer, tag)
    other = group.subgroup([0, 1])
    for _ in range(4):
        other.send(ones, peer)
        other.recv(peer)
    other.close()
    with pytest.raises(echelon.Closed):
        other.send(ones, peer)
    with pytest.raises(echelon.Closed):
        other.recv(peer)
    return True


def test_messages_that_only_look_alike_are_checked():
    assert list(run_forked(swap_what_only_looks_alike, 2, backend="shm").values()) == [True, True]


def repeat_messages(group):
    """Sends and receives like earlier ones, where Python's part of a message may not be asked."""
    peer, ones, out = 1 - group.rank, torch.ones(5), torch.empty(5)
    messages = group.backend.messages

    def await_record():
        while not messages.poller.look_for(messages.links[peer].receiver):
            pass

    def swap():
        group.send(ones, peer)
        await_record()  # so no receive waits
        return group.recv(peer), out

    def swap_into():
        group.send(ones, peer, 7)
        await_record()
        return group.recv(peer, 7, out=out), out

    for call in (swap, swap_into):
        for turn in range(5):
            ones.fill_(10.0 * turn + group.rank)
            if turn > 2:
                group._last_sends.clear()
                group._last_receives.clear()
                group._sending = group._receiving = refuse
            got, wanted = call()
            assert (got is wanted) == (call is swap_into)
            assert got.tolist() == [10.0 * turn + peer] * 5
        del group._sending, group._receiving
    assert messages.parting.sent[peer].value == messages.mailbox.claimed[peer].value == 10
    changed = out._version
    swap_into()
    assert out._version > changed
    records = group.backend.flight_recorder.records()
    assert {record.place.rpartition(":")[0] for record in records} == {__file__}
    assert [record.operation for record in records[2:10:2]] == [f"send to rank {peer}, tag 0 of float32[5]"] * 4
    assert [record.operation for record in records[3:10:2]] == [f"receive from rank {peer}, tag 0 of float32[5]"] * 4
    assert {(record.num_bytes, record.state, record.error) for record in records} == {(20, "done", "")}
    return True


def test_repeated_messages_are_made_by_the_library_alone():
    assert list(run_forked(repeat_messages, 2, backend="shm").values()) == [True, True]


def change_repeated_messages(group):
    """Other shapes, dtypes, waiting receives and modes come between messages that are repeated."""
    peer = group.rank ^ 1
    for turn in range(40):
        length = (3, 3, 3, 4)[turn % 4]
        dtype = torch.float32 if turn % 7 else torch.int64
        tensor = torch.full((length,), turn).to(dtype)
        if turn % 5 == 4:
            work = group.irecv(peer)
            group.send(tensor, peer)
            got = work.wait()
        elif turn % 11 == 10:
            with torch.inference_mode():
                group.send(tensor, peer)
                got = group.recv(peer)
        else:
            group.send(tensor, peer)
            got = group.recv(peer)
        assert got.dtype == dtype
        assert got.tolist() == [turn] * length, f"#{turn}: {got}"
    group.send(torch.ones(3), peer)
    with pytest.raises(echelon.SizeMismatch):
        group.recv(peer, out=torch.ones(4))
    group.send(torch.ones(3), peer)
    assert group.recv(peer, out=torch.zeros(3)).tolist() == [1.0] * 3
    return True


def test_other_messages_between_repeated_ones_arrive_as_they_were_sent():
    assert list(run_forked(change_repeated_messages, 2, backend="shm").values()) == [True, True]


def test_so_do_they_where_collectives_do_not_share_memory(monkeypatch):
    assert list(run_forked(change_repeated_messages, 2, backend="gloo").values()) == [True] * 2
    monkeypatch.setattr(forked_ranks, "TcpBackend", forked_ranks.connect_as_if_elsewhere)
    assert list(run_forked(change_repeated_messages, 4, backend="shm").values()) == [True] * 4


def lose_a_peer(group):
    """Rank 1 ends amid messages that are repeated."""
    for _ in range(5):
        if group.rank == 0:
            group.send(torch.ones(2), 1)
        group.barrier()
        if group.rank == 1:
            group.recv(0)
    if group.rank == 1:
        os._exit(1)
    with pytest.raises(echelon.PeerFailed, match="rank 1"):
        group.recv(1)
    with pytest.raises(echelon.PeerFailed, match="rank 1"):
        group.send(torch.ones(2), 1)
    return True


def test_a_repeated_message_to_a_dead_rank_fails():
    assert run_forked(lose_a_peer, 2, waits_for=[0], backend="shm")[0] is True
