"""Metrics are rows of a CSV file, written by rank 0, and a run that goes on replaces the rows after its checkpoint."""

import importlib.util
import sys
import types

import pytest
import torch

import echelon
from echelon.errors import Closed, FileError, InvalidArgument
from echelon.logging import MetricsWriter


def train(group, folder, first, last):
    with MetricsWriter(folder, tensorboard=False) as metrics:
        for step in range(first, last):
            metrics.add(step, loss=torch.tensor(1 / (1 + step)), accuracy=group.rank + 0.5)


def test_rank_0_writes_rows_and_a_resumed_run_replaces_later_ones(tmp_path):
    folder = tmp_path / "runs" / "digits"
    echelon.simulate(train, 2, (folder, 0, 4))
    echelon.simulate(train, 2, (folder, 2, 3))
    text = (folder / "metrics.csv").read_text()
    assert text.splitlines() == ["step,loss,accuracy", "0,1.0,0.5", "1,0.5,0.5", "2,0.3333333432674408,0.5"]


def test_a_row_that_a_crash_has_cut_short_is_left_out(tmp_path):
    """Step 12 was cut to 1, and passed for an earlier one without numbers."""
    (tmp_path / "metrics.csv").write_text("step,loss\n11,0.5\n1")
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        metrics.add(12, loss=0.25)
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,loss", "11,0.5", "12,0.25"]


def test_a_row_is_there_at_once(tmp_path):
    metrics = MetricsWriter(tmp_path, tensorboard=False)
    metrics.add(1, loss=2)
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,loss", "1,2"]
    metrics.close()
    with pytest.raises(Closed, match="make another one"):
        metrics.add(2, loss=1)
    assert repr(metrics).endswith("closed>")


@pytest.fixture
def fake_tensorboard(monkeypatch):
    """A stand-in for TensorBoard, which records the calls."""
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append(("open", purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("close")

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "tensorboard" or find(name))
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return calls


def test_tensorboard_gets_the_same_numbers(tmp_path, fake_tensorboard):
    with MetricsWriter(tmp_path) as metrics:
        metrics.add(7, loss=torch.tensor([0.5]))
    assert fake_tensorboard == [("open", 7), ("loss", 0.5, 7), "close"]


@pytest.mark.slow
def test_the_real_tensorboard_reads_back_the_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'echelon[interop]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (range(4), range(2, 3)):  # the second run goes on from a checkpoint of step 1
        with MetricsWriter(tmp_path, tensorboard=True) as metrics:
            for step in steps:
                metrics.add(step, loss=torch.tensor(1 / (1 + step)), accuracy=len(steps))
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert sorted(found.Tags()["scalars"]) == ["accuracy", "loss"]
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [
        (0, 1.0),
        (1, 0.5),
        (2, pytest.approx(1 / 3)),
    ]
    assert [(event.step, event.value) for event in found.Scalars("accuracy")] == [(0, 4.0), (1, 4.0), (2, 1.0)]


def test_wrong_arguments(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        metrics.add(0, loss=1.0)
        for values, message in (
            ({"acc": 1.0}, "the metrics are acc, and those of metrics.csv loss"),
            ({"loss": torch.ones(2)}, "loss is of type Tensor: give a number"),
            ({"loss": "0.5"}, "loss is '0.5'"),
        ):
            with pytest.raises(InvalidArgument, match=message):
                metrics.add(1, **values)
        with pytest.raises(InvalidArgument, match="step is None"):
            metrics.add(None, loss=1.0)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write"), MetricsWriter(tmp_path / "file", tensorboard=False) as metrics:
        metrics.add(0, loss=1.0)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    with pytest.raises(InvalidArgument, match="pip install tensorboard"):
        MetricsWriter(tmp_path, tensorboard=True)
