"""Steps that end when a function of the program returns."""

import contextlib

import pytest
import torch

import echelon
from echelon import LaunchError
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
