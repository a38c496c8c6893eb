"""What is wrong is counted, and what is right is not."""

import pytest
import torch

import echelon
from echelon.backends.operators import operator
from echelon.bench.measure import measure_case
from echelon.bench.request import DTYPES, OPERATIONS, OPERATORS, REDUCTIONS, Case
from echelon.bench.subject import EchelonSubject
from echelon.bench.workload import Workload
from echelon.errors import UnsupportedOp


def case_of(operation, num_ranks, num_elements, dtype="float32", op="sum", root=0):
    return Case(operation, num_ranks, num_elements, dtype, op, root)


def results(group, cases):
    """Returns what is wrong in the result of this rank, as it is and with one element changed."""
    found = []
    for case in cases:
        workload = Workload(case, group.rank)
        result = EchelonSubject(group).call(case, workload.input(), workload.output())()
        wrong = workload.count_wrong(result)
        if result is not None and result.numel():
            result.view(-1)[result.numel() // 2] *= 2
        found.append((wrong, workload.count_wrong(result), sum(segment.length for segment in workload.segments())))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_what_groups_give_is_right_and_one_element_more_or_less_is_counted(num_ranks):
    operations = [operation for operation in OPERATIONS if operation != "send_recv" or num_ranks > 1]
    cases = [
        case_of(operation, num_ranks, count, root=root)
        for operation in operations
        for count in (1, 7, 1000)
        for root in (0, num_ranks - 1)
    ]
    for rank, found in enumerate(echelon.simulate(results, num_ranks, (cases,)).results):
        for case, (wrong, changed, expected) in zip(cases, found, strict=True):
            assert wrong == 0, (rank, case)
            assert changed == min(1, expected), (rank, case)


def accepted(dtype, op):
    try:
        return bool(operator(op, getattr(torch, dtype)))
    except UnsupportedOp:
        return False


def wrong_values(group, cases):
    return [measure_case(group, case, [EchelonSubject(group)], 1).measured[0].wrong for case in cases]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_op_is_right(dtype):
    cases = [
        case_of(operation, 4, 1000, dtype, op) for operation in REDUCTIONS for op in OPERATORS if accepted(dtype, op)
    ]
    cases.append(case_of("all_to_all", 4, 1000, dtype))
    assert echelon.simulate(wrong_values, 4, (cases,)).results[0] == [0] * len(cases)


def test_rounding_is_not_wrong_but_more_than_that_is():
    workload = Workload(case_of("all_reduce", 3, 1000), 0)
    right = sum(Workload(case_of("all_reduce", 3, 1000), rank).input().double() for rank in range(3))
    assert workload.count_wrong(right.float()) == 0
    assert workload.count_wrong((right * (1 + 2e-7)).float()) == 0
    assert workload.count_wrong((right * (1 + 1e-6)).float()) == 1000
    assert workload.count_wrong(torch.full((1000,), torch.nan)) == 1000


def test_a_result_of_another_kind_is_wrong_in_all_elements():
    workload = Workload(case_of("all_gather", 3, 10), 0)
    assert workload.count_wrong(None) == 30
    assert workload.count_wrong(torch.zeros(29)) == 30
    assert workload.count_wrong(torch.zeros(30, dtype=torch.int32)) == 30


def test_parts_in_the_wrong_places_are_noticed():
    workload = Workload(case_of("all_to_all", 4, 1 << 12), 2)
    came = [Workload(workload.case, rank).input().chunk(4) for rank in range(4)]
    assert workload.count_wrong(torch.cat([parts[2] for parts in came])) == 0
    assert workload.count_wrong(torch.cat([parts[1] for parts in came])) > 1 << 13
    assert workload.count_wrong(torch.cat([parts[2] for parts in reversed(came)])) > 1 << 13


def test_what_is_longer_than_a_piece_is_compared_whole(monkeypatch):
    monkeypatch.setattr("echelon.bench.workload._PIECE", 64)
    workload = Workload(case_of("broadcast", 2, 1000), 1)
    right = Workload(workload.case, 0).input()
    assert workload.count_wrong(right) == 0
    right[[63, 64, 999]] += 1
    assert workload.count_wrong(right) == 3
