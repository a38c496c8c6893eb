"""A checkpoint of any layout loads into any other, bit for bit."""

import pytest
import torch

import echelon
from tests.helpers.checkpoint_layouts import LAYOUTS, loaded, trained_and_saved, united

QUICK = {"single", "zero 3", "1f1b 3", "zb-v 2", "zero 2 pp 2"}


def saved_by(name, path):
    return united(echelon.simulate(trained_and_saved, LAYOUTS[name].world_size, (name, path)).results)


def loaded_by(name, path):
    return united(echelon.simulate(loaded, LAYOUTS[name].world_size, (name, path)).results)


def assert_equal(got, expected):
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in LAYOUTS])
def test_every_layout_loads_it(name, tmp_path):
    expected = saved_by(name, str(tmp_path))
    for other in QUICK if name in QUICK else LAYOUTS:
        assert_equal(loaded_by(other, str(tmp_path)), expected)
