"""Subjects take turns; on simulated ranks times are exact, and a planted mistake is counted."""

import pytest

import echelon
from echelon.bench.measure import measure, measure_case
from echelon.bench.request import Case, Request
from echelon.bench.subject import EchelonSubject, Subject

NETWORK = echelon.Network(latency=2.0**-10, bandwidth=2.0**20)


class Broken(Subject):
    """A subject with a mistake: on one rank, one element of the result is another."""

    name = "broken"

    def __init__(self, group):
        self._inner = EchelonSubject(group)
        self._is_broken = group.rank == 1

    def call(self, case, tensor, out):
        inner = self._inner.call(case, tensor, out)

        def call():
            result = inner()
            if self._is_broken and result is not None:
                result.view(-1)[-1] += 1
            return result

        return call


def both(group):
    rows = []
    request = Request("all_gather", smallest="96", largest="960", factor=10, dtype="int32")
    measure(group, request, [EchelonSubject(group), Broken(group)], rows.append)
    return [(row.case.size, [(found.subject, found.seconds, found.wrong) for found in row.measured]) for row in rows]


def test_a_planted_mistake_is_counted_and_takes_the_same_time():
    for rows in echelon.simulate(both, 3, network=NETWORK).results:
        assert rows == [
            (
                size,
                [(name, (2 + size * 2 / 3 / 1024) / 1024, wrong) for name, wrong in (("simulated", 0), ("broken", 1))],
            )
            for size in (96, 960)
        ]


def ping(group):
    case = Case.of("send_recv", group.world_size, 1 << 10)
    return measure_case(group, case, [EchelonSubject(group)], 3).measured[0].seconds


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_time_of_a_message_is_that_of_one_way(world_size):
    assert set(echelon.simulate(ping, world_size, network=NETWORK).results) == {2 / 1024}


def on_processes(group):
    rows = measure(
        group, Request("all_reduce", largest="64K", factor=8192, turns=2, iterations=3), [EchelonSubject(group)], id
    )
    return [(row.case.size, row.measured[0].wrong, row.measured[0].seconds > 0) for row in rows]


def test_processes_agree_on_what_they_measured(pool):
    assert pool.run(on_processes, 2) == [[(8, 0, True), (1 << 16, 0, True)]] * 2
