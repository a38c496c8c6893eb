"""Bandwidths are those of nccl-tests, and the table shows them."""

import json
from fractions import Fraction

import pytest

from echelon.bench import table
from echelon.bench.request import OPERATIONS, Case
from echelon.bench.table import Measured, Row, bus_factor

SUM = Case.of("all_reduce", 4, 1 << 20)
SENT = Case.of("broadcast", 4, 8, "int64", "sum", 3)
ROWS = [
    Row(SUM, (Measured("tcp", 1234.5e-6, 0), Measured("gloo", 0.0125, 0))),
    Row(SENT, (Measured("tcp", 12.5e-6, 2), Measured("gloo", 0.0025, 1))),
]
TABLE = """\
#                                  tcp                      gloo
#       size      count       time   busbw wrong       time   busbw wrong  ratio
#        (B) (elements)       (us)  (GB/s)             (us)  (GB/s)
     1048576     262144     1234.5   1.274     0      12500   0.126     0   10.1
           8          1      12.50   0.001     2     2500.0   0.000     1  200.0
# wrong values: 3, FAILED
# mean bus bandwidth: 0.637 GB/s
# ratio: the time of gloo over ours"""


def test_the_table_beside_a_peer_fits_80_columns():
    printed = [table.titles(["tcp", "gloo"]), *map(table.line, ROWS), table.summary(ROWS)]
    assert "\n".join(printed) == TABLE
    assert max(map(len, TABLE.splitlines())) <= 80


def test_without_a_peer_there_is_no_ratio():
    alone = [Row(SUM, ROWS[0].measured[:1])]
    printed = [table.titles(["tcp"]), table.line(alone[0]), table.summary(alone)]
    assert "ratio" not in "\n".join(printed)
    assert printed[2].startswith("# wrong values: 0, OK")


def test_the_same_for_machines():
    values = json.loads(table.to_json({"num_ranks": 4}, ROWS))
    assert values["num_ranks"] == 4
    assert values["rows"][1]["root"] == 3
    assert values["rows"][0]["op"] == "sum"
    assert values["rows"][1]["subjects"]["gloo"] == {"seconds": 0.0025, "algbw": 3.2e-6, "busbw": 3.2e-6, "wrong": 1}


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64])
def test_bus_bandwidth_is_what_of_the_array_must_cross_a_link(n):
    parts = Fraction(n - 1, n)
    expected = {"all_reduce": 2 * parts, "broadcast": 1, "reduce": 1, "send_recv": 1, "barrier": 0}
    assert {operation: bus_factor(operation, n) for operation in OPERATIONS} == {
        operation: expected.get(operation, parts) for operation in OPERATIONS
    }


def test_bandwidths():
    case = Case.of("all_reduce", 4, 8_000_000)
    row = Row(case, (Measured("tcp", 0.004, 0), Measured("gloo", 0.01, 0)))
    assert row.algorithm_bandwidth(row.measured[0]) == pytest.approx(2.0)
    assert row.bus_bandwidth(row.measured[0]) == pytest.approx(3.0)
    assert row.ratio == pytest.approx(2.5)
    nothing = Measured("simulated", 0.0, 0)
    assert row.bus_bandwidth(nothing) == Row(case, (nothing,)).ratio == 0
