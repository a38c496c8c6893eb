import json

from echelon.bench import figures
from echelon.bench.figures import Case, Measured, Row

SUM = Case.of("all_reduce", 4, 1 << 20, "float32", 4, "sum", 0)
SENT = Case.of("broadcast", 4, 8, "int64", 8, "sum", 3)
ROWS = [
    Row(SUM, (Measured("tcp", 1234.5e-6, 0), Measured("gloo", 0.0125, 0))),
    Row(SENT, (Measured("tcp", 12.5e-6, 2), Measured("gloo", 0.0025, 1))),
]
TABLE = """\
#                                                              tcp                              gloo
#       size      count       type      op root       time   algbw   busbw wrong       time   algbw   busbw wrong  ratio
#        (B) (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
     1048576     262144    float32     sum    -     1234.5   0.849   1.274     0      12500   0.084   0.126     0   10.1
           8          1      int64       -    3      12.50   0.001   0.001     2     2500.0   0.000   0.000     1  200.0
# wrong values: 3, FAILED
# mean bus bandwidth: 0.637 GB/s
# ratio: the time of gloo over ours"""


def test_the_table():
    printed = [figures.titles(["tcp", "gloo"]), *map(figures.line, ROWS), figures.summary(ROWS)]
    assert "\n".join(printed) == TABLE


def test_without_a_peer_there_is_no_ratio():
    alone = [Row(SUM, ROWS[0].measured[:1])]
    printed = [figures.titles(["tcp"]), figures.line(alone[0]), figures.summary(alone)]
    assert "ratio" not in "\n".join(printed)
    assert printed[2].startswith("# wrong values: 0, OK")


def test_the_same_for_machines():
    values = json.loads(figures.to_json({"num_ranks": 4}, ROWS))
    assert values["num_ranks"] == 4
    assert values["rows"][1]["root"] == 3
    assert values["rows"][0]["op"] == "sum"
    assert values["rows"][1]["subjects"]["gloo"] == {"seconds": 0.0025, "algbw": 3.2e-6, "busbw": 3.2e-6, "wrong": 1}
