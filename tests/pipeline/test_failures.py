"""A step that fails on one rank fails on all of them, at once, and all are told where and why."""

import mmap
import os
import re
import signal
import struct
import time

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline, schedules
from echelon.pipeline.run import interpreter, pipeline
from echelon.pipeline.run.runtime import Failures, _reason
from tests.helpers.forked_ranks import run_forked
from tests.helpers.models import gradients
from tests.helpers.named_schedules import sizes_of
from tests.helpers.one_process import make_batch, make_model, train_alone

AT_ONCE = 2.0
"""Seconds; the timeouts are ten times as long."""


def simulate(fn, world_size, *args):
    return echelon.simulate(fn, world_size, args, timeout=20.0, late_sends=True).results


def step(pipe, batch):
    inputs, target = batch
    return pipe.step(inputs if pipe.is_first else None, target=target if pipe.is_last else None)


class Fault:
    """Happens in one place, while it is armed."""

    def __init__(self, place):
        self.place, self.is_armed = place, False

    def pass_by(self, place):
        if self.is_armed and place == self.place:
            raise ValueError(f"the {place} is broken")

    def loss(self, output, target):
        self.pass_by("loss")
        return nn.functional.mse_loss(output, target)

    def metrics(self, output, target):
        self.pass_by("metrics")
        return {"error": (output - target).abs().mean()}


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        fault.pass_by("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.fault.pass_by("backward")
        return gradient, None


class Faulty(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.layers, self.fault = make_model(1), fault

    def forward(self, x):
        return Passes.apply(self.layers(x), self.fault)


def caught(function, *arguments):
    began = time.monotonic()
    try:
        function(*arguments)
    except Exception as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        return type(error).__name__, text, time.monotonic() - began
    return "no error", "", time.monotonic() - began


def fail_and_begin_anew(group, name, place):
    fault = Fault(place)
    schedule = schedules.build(name, *sizes_of(name, group.world_size, 4, 2))
    stages = [Faulty(fault) if stage == 1 else make_model(1) for stage in range(schedule.num_stages)]
    batch = make_batch(schedule.num_microbatches)

    def make():
        return Pipeline(stages, group, schedule, loss_fn=fault.loss, metrics=fault.metrics)

    pipe = make()
    step(pipe, batch)
    fault.is_armed = True
    failed, again = caught(step, pipe, batch), caught(step, pipe, batch)
    fault.is_armed = False
    other = caught(pipe.forward, batch[0])
    held = sum(stage.num_held for stage in pipe.stages)
    anew = make()
    for parameter in anew.parameters():
        parameter.grad = None
    step(anew, batch)
    return failed, again, other, held, {name: parameter.grad for name, parameter in anew.named_parameters()}


@pytest.mark.parametrize("place", ["forward", "loss", "backward", "metrics"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_an_exception_anywhere_is_raised_everywhere_and_ends_the_pipeline(run, name, place):
    results = run(fail_and_begin_anew, 2, name, place)
    num_stages = 2 if name == "1f1b" else 4
    stage = 1 if place in ("forward", "backward") else num_stages - 1
    rank = 1 if name == "1f1b" or stage == 1 else 0
    if place == "backward":
        kind, words = ("I", "input gradient") if name == "zb-v" else ("B", "backward")
    else:
        kind, words = "F", "forward"
    where = f"in {stage}{kind}0, {words} of microbatch 0 in stage {stage}"
    for this, (failed, again, other, held, _) in enumerate(results):
        assert failed[0] == ("ValueError" if this == rank else "PeerFailed"), failed
        said = f"on rank {rank} {where}" if this == rank else f"rank {rank} failed: ValueError {where}: the {place} is"
        assert said in failed[1]
        assert f"the {place} is broken" in failed[1]
        for kind, message, _ in (again, other):
            assert kind == "Closed"
            assert f"ended in an earlier step (rank {rank} failed: ValueError {where}" in message
            assert "make a new Pipeline" in message
        assert max(failed[2], again[2], other[2]) < AT_ONCE
        assert held == 0
    model = nn.Sequential(*[make_model(1) for _ in range(num_stages)])
    train_alone(model, make_batch(4), 4)
    for _, _, _, _, got in results:
        for name, gradient in got.items():
            assert torch.equal(gradient, gradients(model)[name.replace("layers.", "")])


def test_an_error_without_frames_has_a_reason():
    """As under sys.tracebacklimit = 0."""
    assert _reason(ValueError("blown"), " in F0") == "ValueError in F0: blown"
    assert _reason(KeyboardInterrupt(), " in F0") == "KeyboardInterrupt in F0"


def fail_in_one_replica(group):
    mesh = echelon.Mesh(group, dp=2, pp=2)
    fault = Fault("loss")
    fault.is_armed = group.rank == 1
    pipe = Pipeline([make_model(1) for _ in range(2)], mesh["pp"], "gpipe", 4, fault.loss, data_parallel=mesh["dp"])
    group.barrier()  # a pipeline that is still being made would fail there
    error = caught(step, pipe, make_batch(4))
    return error[:2], group.all_reduce(torch.ones(1)).item()


def test_a_rank_that_fails_ends_the_step_of_the_other_replicas(run):
    """They do not wait for its gradients, though it lives on and its other groups can be used."""
    for rank, ((kind, message), total) in enumerate(run(fail_in_one_replica, 4)):
        assert kind == ("ValueError" if rank == 1 else "PeerFailed")
        assert rank == 1 or "rank 1 failed: ValueError in 1F0" in message
        assert total == 4


def notice_late(group):
    """The group knows another cause already when this rank notices a failure."""
    group.backend.control.revoke(group.context, group.ranks, echelon.PeerFailed(1, "the cause"))
    failures = Failures(group, [], lambda: None)
    with pytest.raises(echelon.PeerFailed) as caught, failures.told():
        raise echelon.PeerFailed(0, "a consequence")
    return caught.value.rank


def test_a_rank_that_notices_a_consequence_raises_the_first_cause():
    assert simulate(notice_late, 2) == [1, 1]


def die_in_a_step(group, place, clock):
    """Returns, on a survivor: who it says failed, what it says, and how many seconds after the death."""

    def die():
        clock[:8] = struct.pack("<d", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)

    fault = Fault(place)
    fault.pass_by = lambda passed: die() if fault.is_armed and passed == place else None
    stages = [make_model(1), Faulty(fault), make_model(1)]
    pipe = Pipeline(stages, group, "1f1b", 4, fault.loss)
    step(pipe, make_batch(4))
    fault.is_armed = True
    try:
        step(pipe, make_batch(4))
    except echelon.PeerFailed as error:
        after = time.monotonic() - struct.unpack("<d", clock[:8])[0]
        return error.rank, str(error), after, caught(step, pipe, make_batch(4))[:2]
    return None


@pytest.mark.parametrize("backend", ["tcp", "shm"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_rank_that_is_killed_in_a_step_is_named_by_the_others(backend, place):
    with mmap.mmap(-1, 8) as clock:
        outcomes = run_forked(die_in_a_step, 3, place, clock, backend=backend)
    assert sorted(outcomes) == [0, 2]
    for rank, (failed, message, after, again) in outcomes.items():
        assert failed == 1, message
        assert f"noticed by rank {rank} in receive from rank 1, the" in message
        assert after < AT_ONCE
        assert again[0] == "Closed"
        assert "rank 1 failed" in again[1]


def stop_in_a_step(group, place):
    """Returns, on a survivor: what kind of error ended its step, and what it says."""
    fault = Fault(place)
    fault.pass_by = lambda passed: os.kill(os.getpid(), signal.SIGSTOP) if fault.is_armed and passed == place else None
    pipe = Pipeline([make_model(1), Faulty(fault), make_model(1)], group, "1f1b", 4, fault.loss)
    step(pipe, make_batch(4))
    fault.is_armed = True
    pipe._group.timeout = 1.0
    return caught(step, pipe, make_batch(4))[:2]


def test_a_rank_that_is_stopped_in_a_step_is_named_by_the_others():
    """Its process lives, so nothing but time tells; it never returns, and `run_forked` ends it."""
    outcomes = run_forked(stop_in_a_step, 3, "backward", backend="shm", waits_for=(0, 2))
    assert sorted(outcomes) == [0, 2]
    for kind, message in outcomes.values():
        assert kind in ("Timeout", "PeerFailed"), "of its own wait, or told by the one whose time was up first"
        assert re.search(r"for rank 1, which did not answer rank [02] within 1 s", message)


class Fuse(nn.Module):
    def forward(self, x):
        if len(x) == 1:
            raise RuntimeError("the fuse has blown")
        return x


def blow(group):
    pipe = Pipeline([make_model(1), Fuse(), make_model(1)], group, "zb-h1", 3, nn.functional.mse_loss)
    try:
        step(pipe, make_batch(5))
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def test_an_exception_reaches_every_rank_with_the_line_it_comes_from(pool):
    for results in (simulate(blow, 3), pool.run(blow, 3)):
        assert results[1] == ("RuntimeError", "the fuse has blown")
        for kind, message in (results[0], results[2]):
            assert kind == "PeerFailed"
            assert "RuntimeError" in message
            assert "the fuse has blown" in message
            assert "test_failures.py" in message
            assert re.search(
                r"in receive from rank 1, the \w+ of microbatch \d for stage \d at \S+\.py:\d+\)$", message
            )
            assert 'in forward: raise RuntimeError("the fuse has blown")' in message
            assert "site-packages" not in message  # lines of torch and of the pipeline lead to no fault of the program
            assert "interpreter.py" not in message


def not_finite(group):
    pipe = Pipeline(make_model(2), group, "1f1b", 3, nn.functional.mse_loss)
    inputs, target = make_batch(6)
    target[4] = float("nan")
    try:
        step(pipe, (inputs, target))
    except echelon.EchelonError as error:
        return type(error).__name__, str(error)
    return "no error", ""


def test_a_loss_that_is_not_finite_names_its_microbatch():
    first, last = simulate(not_finite, 2)
    assert last[0] == "NotFinite"
    assert "the loss of microbatch 2 is nan" in last[1]
    assert first[0] == "PeerFailed"
    assert "NotFinite in 1F2, forward of microbatch 2 in stage 1: the loss of microbatch 2 is nan" in first[1]


def test_losses_on_a_device_are_read_once_a_step_and_the_microbatch_is_named_all_the_same(monkeypatch):
    """Reading each would have the CPU wait for the device in every microbatch. A stand-in: all losses are elsewhere."""
    for module in (interpreter, pipeline):
        monkeypatch.setattr(module, "is_here", lambda _: False)
    reads = []
    check = pipeline.check_finite
    monkeypatch.setattr(
        pipeline, "check_finite", lambda losses, advice: (reads.append(len(losses)), check(losses, advice))
    )
    first, last = simulate(not_finite, 2)
    assert last[0] == "NotFinite"
    assert "the loss of microbatch 2 is nan" in last[1]
    assert "gradients of it were added" in last[1]
    assert first[0] == "PeerFailed"
    assert "NotFinite: the loss of microbatch 2 is nan" in first[1]
    assert reads == [3]


class Detaches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = make_model(1)

    def forward(self, x):
        return self.layer(x.detach())


def lose_gradient(group, frozen):
    stages = [make_model(1).requires_grad_(not frozen), Detaches()]
    pipe = Pipeline(stages, group, "zb-h1", 2, nn.functional.mse_loss)
    try:
        step(pipe, make_batch(4))
    except echelon.EchelonError as error:
        return type(error).__name__, str(error)
    return "no error", ""


def test_a_missing_gradient_is_named():
    first, last = simulate(lose_gradient, 2, False)
    assert first[0] == "ScheduleError"
    assert "no gradient came back for the output of stage 0 for microbatch 0: stage 1 does not use it" in first[1]
    assert last[0] == "PeerFailed"
    assert simulate(lose_gradient, 2, True) == [("no error", "")] * 2


def train_frozen(group):
    pipe = Pipeline(make_model(2).requires_grad_(False), group, "1f1b", 2, nn.functional.mse_loss)
    try:
        step(pipe, make_batch(4))
    except echelon.EchelonError as error:
        return type(error).__name__, str(error)
    return "no error", ""


def test_a_loss_without_a_gradient_is_named():
    first, last = simulate(train_frozen, 2)
    assert last[0] == "UnsupportedOp"
    assert "the loss of microbatch 0 depends on nothing that requires a gradient" in last[1]
    assert first[0] == "PeerFailed"


def one_step_less(group):
    pipe = Pipeline([make_model(1), make_model(1)], group, "1f1b", 4, nn.functional.mse_loss)
    for _ in range(3 - (group.rank == group.world_size - 1)):
        step(pipe, make_batch(4))
    group.barrier()


def test_a_rank_with_a_step_less_that_waits_in_a_collective_is_told(on_backend):
    """On processes both waited for their timeouts."""
    with pytest.raises((echelon.CollectiveMismatch, echelon.DeadlockError)) as caught:
        on_backend(one_step_less, 2)
    told = str(caught.value)
    assert "in receive from rank 1, the gradient of microbatch 0 for stage 0" in told
    assert "barrier" in told
    assert ": make the same calls of Pipeline on every rank, as many steps" in told
