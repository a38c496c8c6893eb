"""Steps that end when a function of the program returns."""

import contextlib
import itertools
from functools import partial

import pytest
import torch

import echelon
from echelon import LaunchError, UnsupportedOp
from echelon.foresight.record import steps
from echelon.foresight.record.run import record
from echelon.foresight.trace import Kernel

CALLS = []


def forward(x):
    return x * 2


class Server:
    def __init__(self):
        self.weight = torch.ones(64, 64, device="cuda")

    def answer(self, x):
        CALLS.append("answer")
        if len(CALLS) == 1:
            raise KeyError("the first one fails")
        return (x @ self.weight).relu()


def serve():
    CALLS.clear()
    server = Server()
    x = torch.ones(8, 64, device="cuda")
    for _ in range(9):
        try:
            x = server.answer(forward(x))
        except KeyError:
            CALLS.append("failed")
    raise AssertionError("went on after the last step")


def names(trace):
    return [entry.name for entry in trace.entries if isinstance(entry, Kernel)]


@pytest.mark.parametrize("until", ["answer", "Server.answer", "tests.foresight.test_until.Server.answer"])
def test_a_step_ends_when_the_function_returns(until):
    seen = echelon.foresee(serve, 1, until=until)
    (trace,) = seen.traces.values()
    assert trace.is_step
    assert names(trace) == ["mul", "mm", "relu"]
    # An exception is no return: of four calls two have ended a step, and the roles are confirmed by none.
    assert CALLS == ["answer", "failed", "answer", "answer"]


def train():
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())

    def train_step():
        for _ in range(3):
            model(torch.ones(1, 64, device="cuda")).sum().backward()
            optimizer.step()

    for _ in range(2):
        train_step()


@pytest.mark.slow
def test_optimizers_do_not_end_such_a_step():
    (by_optimizers,) = record(train, 1).values()
    seen = echelon.foresee(train, 1, until="train_step")
    assert names(seen.traces[0]).count("addmm") == 3 * names(by_optimizers).count("addmm") == 3


def test_a_function_that_is_never_called_is_an_error_with_names_like_it():
    with pytest.raises(LaunchError, match=r"until='train_stop': rank 0 called no function.*train\.train_step"):
        echelon.foresee(train, 1, until="train_stop")


def test_a_function_that_never_returns_is_told_apart_from_one_that_is_not_called():
    def fail():
        raise KeyError

    def program():
        with contextlib.suppress(KeyError):
            fail()

    with pytest.raises(
        LaunchError, match="until='fail': rank 0 called this function, but it has not returned: name a "
    ):
        echelon.foresee(program, 1, until="fail")


@pytest.mark.parametrize("until", ["", "train step", 3, "a..b"])
def test_bad_names_are_refused_before_anything_runs(until):
    with pytest.raises(LaunchError, match="give the name of a function"):
        echelon.foresee(pytest.fail, 1, until=until)


def endless(has_optimizer=True, num_backwards=None, num_accumulated=None):
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([weight]) if has_optimizer else None
    rounds = itertools.count(1) if num_backwards is None else range(1, num_backwards + 1)
    for each in rounds:
        weight.sum().backward()
        if num_accumulated is not None and each % num_accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_backwards_without_a_step_of_an_optimizer_are_refused_at_their_line():
    with pytest.raises(UnsupportedOp, match=r"1,000 backwards.*test_until\.py:\d+, without.* call optimizer\.step\(\)"):
        record(endless, 1)


def test_many_backwards_before_each_step_are_no_mistake(monkeypatch):
    monkeypatch.setattr(steps, "MOST_BACKWARDS", 20)
    trace = record(partial(endless, num_accumulated=15), 1, full=True)[0]
    assert trace.is_step
    assert sum(isinstance(each, Kernel) and each.name == "sum" for each in trace.entries) == 15


def test_many_backwards_of_a_program_without_an_optimizer_are_no_mistake(monkeypatch):
    monkeypatch.setattr(steps, "MOST_BACKWARDS", 20)
    assert not record(partial(endless, has_optimizer=False, num_backwards=30), 1)[0].is_step


def test_many_backwards_before_a_function_returns_are_no_mistake(monkeypatch):
    monkeypatch.setattr(steps, "MOST_BACKWARDS", 20)
    seen = echelon.foresee(rounds, 1, until="endless")
    assert all(each.is_step for each in seen.traces.values())


def rounds():
    while True:
        endless(num_backwards=30)
