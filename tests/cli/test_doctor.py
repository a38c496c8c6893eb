import json

import pytest

from echelon.cli import main
from echelon.doctor import checkup
from echelon.doctor.checks import error, ok, warning

FOUND = [ok("torch", "2.13.0"), warning("clock", "not synchronised", "start chrony")]
BROKEN = [*FOUND, error("loopback", "down", "bring it up: `ip link set lo up`")]


@pytest.fixture
def found(monkeypatch):
    """Decides what the doctor finds."""

    def decide(findings):
        monkeypatch.setattr(checkup, "examine", lambda _: findings)

    return decide


def test_each_finding_is_a_row_with_what_to_do_below(capsys, found):
    found(BROKEN)
    assert main(["doctor"]) == 1
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "check              found",
        "torch     ok       2.13.0",
        "clock     warning  not synchronised",
        "                   → start chrony",
        "loopback  error    down",
        "                   → bring it up: `ip link set lo up`",
        "1 error, 1 warning",
    ]


def test_warnings_stop_nothing(capsys, found):
    found(FOUND)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 warning"
    found(FOUND[:1])
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all is well"


def test_json_has_the_same(capsys, found):
    found(BROKEN)
    assert main(["doctor", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["errors"] == 1
    assert printed["checks"][1] == {
        "check": "clock",
        "status": "warning",
        "found": "not synchronised",
        "fix": "start chrony",
    }


def test_this_host_is_looked_at(capsys, monkeypatch):
    monkeypatch.setenv("ECHELON_BACKEND", "bogus")
    assert main(["doctor", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert "ECHELON_BACKEND='bogus' is unknown" in [check["found"] for check in checks]
    assert {"loopback", "interfaces", "ports", "shared memory", "open files", "torch", "GPU", "NCCL", "MTU"} <= {
        check["check"] for check in checks
    }
