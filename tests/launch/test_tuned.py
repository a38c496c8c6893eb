"""All ranks go by the table that rank 0 finds."""

import os
from pathlib import Path

import pytest
import torch

import echelon
from echelon.backends.simulated import SimulatedBackend
from echelon.collectives.plans.select import STATIC, Rule
from echelon.collectives.plans.tuning import to_text
from echelon.launch.tuned import agreed_table, default_path

RINGS = {"all_reduce": (Rule("ring"),)}


def test_the_path_follows_the_desktops_rules():
    assert default_path({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/echelon/tuned.json")
    assert default_path({"HOME": "/h"}) == Path("/h/.config/echelon/tuned.json")


@pytest.fixture
def alone():
    (backend,) = SimulatedBackend.create_group(1)
    return backend


def test_without_a_file_the_static_table_counts(alone, tmp_path):
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert agreed_table(alone, 1.0, home) is STATIC
    path = default_path(home)
    path.parent.mkdir()
    path.write_text(to_text(RINGS, {}))
    assert agreed_table(alone, 1.0, home) == RINGS
    for off in ("off", "OFF", "0"):
        assert agreed_table(alone, 1.0, {**home, "ECHELON_TUNED": off}) is STATIC
    other = tmp_path / "other.json"
    other.write_text(to_text({}, {}))
    assert agreed_table(alone, 1.0, {**home, "ECHELON_TUNED": str(other)}) == {}


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, echelon.LaunchError, "there is no such file; run `echelon tune --output "),
        (b"\xff", echelon.LaunchError, "cannot read "),
        (b" " * (1 << 20) + b"{}", echelon.LaunchError, "has more than 1048576 bytes and is no table of algorithms"),
        (b"{}", echelon.PlanError, "it is not a table of tuned collectives; run `echelon tune` again"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_one_line(alone, tmp_path, content, error, message):
    path = tmp_path / "tuned.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error) as caught:
        agreed_table(alone, 1.0, {"ECHELON_TUNED": str(path)})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def agree(group, paths):
    """Agrees as ranks that each look somewhere else."""
    environ = {"ECHELON_TUNED": paths[group.rank]}
    try:
        table = agreed_table(group.backend, 20.0, environ)
    except echelon.EchelonError as error:
        return type(error).__name__, str(error)
    tuned = echelon.ProcessGroup(group.backend, range(group.world_size), context=77, table=table)
    half = tuned.subgroup([0, 1])
    total = tuned.all_reduce(torch.ones(3)).sum().item()
    tables = (tuned.table, None if half is None else half.table)
    return [{name: tuple(rules) for name, rules in each.items()} for each in tables if each is not None], total


def test_only_the_file_of_rank_0_counts(pool, tmp_path):
    path, broken = tmp_path / "tuned.json", tmp_path / "broken.json"
    path.write_text(to_text(RINGS, {}))
    broken.write_text("{")
    found = pool.run(agree, 3, [str(path), "off", str(broken)])
    assert found == [([RINGS, RINGS], 9.0), ([RINGS, RINGS], 9.0), ([RINGS], 9.0)]
    found = pool.run(agree, 3, ["off", str(path), str(broken)])
    assert found[2] == ([dict(STATIC)], 9.0)


def test_all_ranks_are_told_that_rank_0_cannot_read_its_file(pool, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for path, kind in ((broken, "PlanError"), (tmp_path / "none.json", "LaunchError")):
        told = pool.run(agree, 3, [str(path), "off", "off"])
        assert len(set(told)) == 1
        assert told[0][0] == kind
        assert str(path) in told[0][1]


def table_of(group):
    return group.table


@pytest.mark.slow
def test_processes_that_are_started_go_by_it(monkeypatch, tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text(to_text(RINGS, {}))
    monkeypatch.setenv("ECHELON_TUNED", str(path))
    assert echelon.spawn(table_of, 2) == [RINGS] * 2
    assert echelon.init().table == RINGS
    assert "RANK" not in os.environ
    assert echelon.simulate(table_of, 2).results == [STATIC] * 2
