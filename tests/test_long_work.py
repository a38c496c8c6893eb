"""Lines on long work of the library."""

import io
import re
import sys
import time

import pytest
import torch
from torch import nn

from echelon import long_work
from echelon.pipeline import split
from echelon.pipeline.cut import cut


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.second(self.first(x))


def stderr_of(monkeypatch, rank="0"):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(long_work, "_FIRST", 0.01)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    return sys.stderr


def test_tracing_and_timing_a_model_are_told(monkeypatch):
    written = stderr_of(monkeypatch)

    def slow(function, words):
        def run(*args):
            until = time.monotonic() + 20
            while words not in written.getvalue() and time.monotonic() < until:
                time.sleep(0.001)
            return function(*args)

        return run

    monkeypatch.setattr(cut, "trace", slow(cut.trace, "tracing the Net"))
    monkeypatch.setattr(cut, "_best", slow(cut._best, "timing 2 parts of the model"))
    split(Net(), 2, example=(torch.ones(4, 2),))
    lines = set(re.sub(r"\d+ s", "N s", written.getvalue()).splitlines())
    assert lines == {f"echelon: {what}, N s so far" for what in ("tracing the Net", "timing 2 parts of the model")}


@pytest.mark.parametrize("rank", ["1", "15"])
def test_other_ranks_say_nothing(monkeypatch, rank):
    written = stderr_of(monkeypatch, rank)
    with long_work.told_by_rank_0("tracing the Net"):
        time.sleep(0.05)
    assert written.getvalue() == ""


def test_a_closed_stream_does_not_stop_the_work(monkeypatch):
    stderr_of(monkeypatch).close()
    with long_work.told_by_rank_0("tracing the Net"):
        time.sleep(0.05)
