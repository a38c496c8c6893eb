"""An all-reduce like one before leaves out what was checked then, and is the same call otherwise."""

import pytest
import torch

import echelon
from echelon.calls import collectives
from tests.backends.forked import run_forked


def refuse(*_):
    """Takes the place of the long way where nothing may take it."""
    raise AssertionError("it was made as if for the first time")


def reduce_twice(group):
    """Returns what the records of a first call and of one like it say, but for the line and the time."""
    long_way, kinds = collectives.operations.all_reduce, []
    for dtype, op in ((torch.float32, "sum"), (torch.float32, "mean"), (torch.bfloat16, "max"), (torch.int64, "band")):
        first, second = (torch.arange(5).to(dtype) + group.rank for _ in range(2))
        group.all_reduce(first, op)
        collectives.operations.all_reduce = refuse
        assert group.all_reduce(second, op, timeout=5.0) is second
        collectives.operations.all_reduce = long_way
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
    assert "waited 0.2 s for rank 1" in text
