"""Forward, then anything, then backward: as in one process, with any container of outputs."""

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline
from tests.helpers.one_process import make_batch, make_model


def train(group, placement, num_samples):
    schedule = {"loop": "1f1b", "vee": "zb-v"}[placement]
    pipe = Pipeline(make_model(4), group, schedule, 3)
    inputs, target = make_batch(num_samples)
    for _ in range(2):
        output = pipe.forward(inputs, train=True)
        gradient = None
        if output is not None:
            loss = nn.functional.mse_loss(output, target)
            loss.backward()
            gradient = output.grad
        pipe.backward(gradient)
    return output, {name: p.grad for name, p in pipe.named_parameters()}


@pytest.mark.parametrize("placement", ["loop", "vee"])
@pytest.mark.parametrize("num_samples", [3, 7])
def test_gradients_equal_those_of_one_process(run, placement, num_samples):
    results = run(train, 2, placement, num_samples)
    model = make_model(4)
    inputs, target = make_batch(num_samples)
    for _ in range(2):
        nn.functional.mse_loss(model(inputs), target).backward()
    gradients = results[0][1] | results[1][1]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-14)
    outputs = [output for output, _ in results if output is not None]
    assert len(outputs) == 1
    torch.testing.assert_close(outputs[0], model(inputs))


class Several(nn.Module):
    """Returns two tensors that have a gradient, one that has none, and something else."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x):
        y = self.layer(x)
        return {"out": y, "rank": y.argmax(1), "loss": y.square().mean(), "name": "x"}


def several(group, gradients):
    torch.manual_seed(0)
    pipe = Pipeline([make_model(1), Several()], group, "gpipe", 2)
    output = pipe.forward(make_batch(4)[0], train=True)
    if output is None:
        pipe.backward()
        return None
    assert [output[name].requires_grad for name in ("out", "rank", "loss")] == [True, False, True]
    assert output["loss"].shape == (2,)  # one for each microbatch
    (output["out"].sum() + output["loss"].sum()).backward()
    given = {"both": [output["out"].grad, output["loss"].grad], "one": [output["out"].grad, None]}[gradients]
    pipe.backward(given)
    return pipe.stages[0].module.layer.weight.grad


@pytest.mark.parametrize("gradients", ["both", "one"])
def test_gradients_of_nested_outputs_are_matched_by_their_order(gradients):
    _, got = echelon.simulate(several, 2, (gradients,), timeout=20.0, late_sends=True).results
    torch.manual_seed(0)
    first, second = make_model(1), Several()
    for x in make_batch(4)[0].chunk(2):
        output = second(first(x))
        (output["out"].sum() + (output["loss"] if gradients == "both" else 0)).backward()
    torch.testing.assert_close(got, second.layer.weight.grad, rtol=1e-12, atol=1e-14)


def misused(group, case):
    pipe = Pipeline(make_model(2), group, "1f1b", 2, nn.functional.mse_loss)
    inputs, target = make_batch(4)
    try:
        if case == "no forward":
            pipe.backward()
        output = pipe.forward(inputs[:1] if case == "few" else inputs, train=True)
        if case == "twice":
            pipe.backward(None if output is None else [torch.ones_like(output)])
        if case == "forgotten":
            pipe.step(inputs, target=target)
        gradient = {"shape": torch.ones(3, 6).double(), "number": [None, None]}.get(case)
        pipe.backward(gradient)
    except echelon.EchelonError as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("no forward", "ScheduleError", "call forward(..., train=True) first"),
        ("twice", "ScheduleError", "there is nothing to run backward"),
        ("forgotten", "ScheduleError", "there is nothing to run backward"),
        ("few", "SizeMismatch", "expected at least 2 samples, got 1"),
        ("shape", "SizeMismatch", "expected float64[4, 6], got float64[3, 6]"),
        ("number", "SizeMismatch", "expected 1 gradients"),
    ],
)
def test_misuse_is_told_to_all_ranks(case, kind, words):
    results = echelon.simulate(misused, 2, (case,), timeout=20.0, late_sends=True).results
    assert kind in [got for got, _ in results]
    for got, message in results:
        assert got in (kind, "PeerFailed")
        assert words in message


def replicated(group, no_sync):
    mesh = echelon.Mesh(group, dp=2, pp=2)
    pipe = Pipeline(make_model(2), mesh["pp"], "1f1b", 2, data_parallel=mesh["dp"])
    inputs, target = (tensor.chunk(2)[mesh.coordinates["dp"]] for tensor in make_batch(8))
    output = pipe.forward(inputs, train=True)
    gradient = None
    if output is not None:
        nn.functional.mse_loss(output, target).backward()
        gradient = output.grad
    pipe.backward(gradient)
    return {name: p.grad for name, p in pipe.named_parameters()}


def test_replicas_average_their_gradients():
    results = echelon.simulate(replicated, 4, (False,), timeout=20.0, late_sends=True).results
    model = make_model(2)
    nn.functional.mse_loss(model(make_batch(8)[0]), make_batch(8)[1]).backward()
    for gradients in results:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-12, atol=1e-14)


def cast_forward_only(group, recompute):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    pipe = Pipeline(model, group, "1f1b", 2, at=["2"], recompute=recompute)
    inputs, target = make_batch(4, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = pipe.forward(inputs, train=True)
    if output is not None:
        assert output.dtype == torch.bfloat16
        nn.functional.mse_loss(output.float(), target).backward()
    pipe.backward(None if output is None else output.grad)
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


def test_a_forward_is_run_again_under_the_autocast_that_it_had():
    """The backward comes after `with torch.autocast`, as torch says; the forward in it made other dtypes there."""
    plain, again = (
        echelon.simulate(cast_forward_only, 2, (flag,), timeout=20.0, late_sends=True).results for flag in (False, True)
    )
    for one, other in zip(plain, again, strict=True):
        for name, gradient in one.items():
            assert torch.equal(gradient, other[name]), name
