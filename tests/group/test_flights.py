"""The flight recorder: the last operations of a rank, as data."""

import inspect
import json

import pytest
import torch

import echelon
from echelon.backends.simulated import SimulatedBackend
from echelon.backends.status import Question, Standing, status_of
from echelon.group.group import ProcessGroup
from echelon.operation_records import CAPACITY, TUNED_TABLE, FlightRecorder, write_records


def line_after(function, text):
    """Returns "file:line" of the line of a function that has `text` in it."""
    lines, start = inspect.getsourcelines(function)
    number = next(number for number, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{start + number}"


def exchange(group):
    group.all_reduce(torch.ones(2, 3))
    work = group.all_reduce(torch.ones(4), async_op=True)
    if group.rank == 0:
        group.send(torch.ones(3, dtype=torch.float64), 1, tag=5)
    else:
        group.recv(0, tag=5)
    work.wait()
    with pytest.raises(echelon.SizeMismatch):
        group.all_gather(torch.ones(1), out=torch.ones(7))
    return echelon.flight_recorder()[-4:]


def test_a_rank_remembers_what_it_called_where_and_how_it_ended(on_backend):
    for rank, records in enumerate(on_backend(exchange, 2)):
        message = "send to rank 1" if rank == 0 else "receive from rank 0"
        assert [(record.operation, record.sequence, record.num_bytes) for record in records] == [
            ("all_reduce(sum) of float32[2, 3]", 1, 24),
            ("all_reduce(sum) of float32[4]", 2, 16),
            (f"{message}, tag 5 of float64[3]", 0, 24),
            ("all_gather of rows of float32[]", 3, 4),
        ]
        assert [record.place for record in records] == [
            line_after(exchange, text)
            for text in ("torch.ones(2, 3)", "async_op", "group.send" if rank == 0 else "group.recv", "torch.ones(7)")
        ]
        assert {record.state for record in records} == {"done"}
        assert all(record.group == "world" and record.started <= record.ended for record in records)


def coalesced(group):
    tensors = [torch.ones(5), torch.ones(2).int()]
    group.all_gather_coalesced(tensors)
    group.gather_coalesced(tensors, 0)
    group.reduce_scatter_coalesced(tensors)
    return [record.num_bytes for record in echelon.flight_recorder()[-4:]]


def test_a_record_counts_the_bytes_of_the_tensors_not_of_their_packing(on_backend):
    assert on_backend(coalesced, 2) == [[28, 28, 20, 8]] * 2


def test_an_operation_in_flight_outlasts_any_number_of_later_ones():
    recorder = FlightRecorder()
    waiting = [recorder.begin("world", 1, number, number, "gather(dst=0)") for number in (1, 2)]
    for number in range(3 * CAPACITY):
        recorder.begin("pair", 2, number + 1, 0, "barrier").end()
    assert recorder.under_way() == waiting
    assert status_of(recorder, Question(1, 2, 2)).standing is Standing.SAME
    assert recorder.activity().startswith("in gather(dst=0), #1")
    assert [record.operation for record in recorder.records()[:3]] == ["gather(dst=0)", "gather(dst=0)", "barrier"]
    assert len(recorder.records()) == CAPACITY + 2
    for operation in waiting:
        operation.end()
    assert recorder.under_way() == []
    assert status_of(recorder, Question(1, 2, 2)).standing is Standing.PAST
    assert len(recorder.records()) == CAPACITY


def test_records_of_ended_operations_are_dropped():
    recorder = FlightRecorder()
    for _ in range(5):
        for operation in [recorder.begin("world", 1, 0, 0, "send") for _ in range(3 * CAPACITY)]:
            operation.end()
    assert len(recorder._pushed_out) <= 4 * CAPACITY


def fail(group):
    if group.rank == 0:
        group.barrier(timeout=0.01)
    group.recv(0)


def test_a_rank_that_fails_writes_its_records(tmp_path, monkeypatch):
    monkeypatch.setenv("ECHELON_FLIGHT_RECORDER", str(tmp_path / "flights"))
    with pytest.raises(echelon.Timeout):
        echelon.simulate(fail, 2)
    (line,) = (tmp_path / "flights" / "rank-0.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["operation"] == "barrier"
    assert record["state"] == "failed"
    assert record["error"].startswith("Timeout: rank 0 in barrier, #1 of group 'world'")
    assert record["place"] == line_after(fail, "barrier")


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ECHELON_FLIGHT_RECORDER", str(tmp_path / "file"))
    write_records(FlightRecorder(), 0)


def test_the_last_thousand_are_kept_and_no_tensor():
    group = ProcessGroup(SimulatedBackend.create_group(1)[0])
    for _ in range(CAPACITY + 5):
        group.barrier()
    records = echelon.flight_recorder(group)
    assert [record.sequence for record in records] == list(range(6, CAPACITY + 6))


def test_what_is_under_way_is_said_so():
    group = ProcessGroup(SimulatedBackend.create_group(2)[0])
    group.irecv(1, tag=3)
    (record,) = echelon.flight_recorder(group)
    assert (record.state, record.ended, record.num_bytes) == ("under way", None, 0)
    assert str(record).startswith("receive from rank 1, tag 3 of group 'world' at ")


def test_without_a_group_there_is_nothing():
    assert echelon.flight_recorder(ProcessGroup(SimulatedBackend.create_group(1)[0])) == ()


def test_what_init_does_itself_is_no_operation_of_the_user():
    """A rank that had called nothing was said to be past a broadcast of a group that nobody had made."""
    recorder = FlightRecorder()

    def broadcast():
        return begin()

    def begin():  # as far below the caller as in a group
        return recorder.begin(TUNED_TABLE, 2, 1, 7, "broadcast_object(src=0)")

    flight = broadcast()
    assert recorder.activity().startswith(f"in echelon.init at {__file__}:")
    flight.end()
    assert recorder.activity().startswith("before its first operation, now at ")
    assert recorder.records() == ()
    assert recorder.find(2, 1) is flight, "ranks that are still there may ask about it"
