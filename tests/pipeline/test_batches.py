"""Batches of any kind: what the pipeline makes of them is what one process makes."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline
from echelon.pipeline.run import interpreter, loss
from tests.helpers.one_process import gradients_of, loss_and_gradients, make_batch, make_model, train_alone


class Pair(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor


class Takes(nn.Module):
    """Takes nested inputs of several dtypes, and passes on what it takes."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(5, 6).double(), nn.Linear(6, 6).double()

    def forward(self, pair, keep, name=None, *, scale):
        hidden = self.layer(pair.x) * scale[:, None] + self.embedding(pair.ids)
        return {"hidden": [hidden, None], "keep": keep, "ids": pair.ids, 3: (name, 2.5)}


class Returns(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, value, *, scale):
        assert value[3] == ("text", 2.5)
        hidden = self.layer(value["hidden"][0]) * value["keep"][:, None] + scale[:, None]
        return Pair(hidden, value["ids"])


def loss_of(output, target):
    assert torch.equal(output.ids, target["ids"])
    return nn.functional.mse_loss(output.x, target["y"][0])


def nested_batch(num_samples):
    x, y = make_batch(num_samples)
    ids = torch.arange(num_samples) % 5
    return Pair(x, ids), ids % 2 == 0, torch.linspace(1, 2, num_samples, dtype=torch.float64), {"y": (y,), "ids": ids}


def stages_of():
    torch.manual_seed(0)
    return [Takes(), Returns()]


def nested(group, schedule, sizes):
    pipe = Pipeline(stages_of(), group, schedule, 2, loss_of)
    losses = []
    for num_samples in sizes:
        pair, keep, scale, target = nested_batch(num_samples)
        out = pipe.step(pair, keep, "text", scale=scale, target=target, return_outputs=True)
        losses.append(out.loss)
    return losses, out.outputs, {name: p.grad for name, p in pipe.named_parameters()}, None


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_values_nest_as_they_like_and_sizes_change(run, schedule):
    sizes = [4, 3, 7]
    results = run(nested, 2, schedule, sizes)
    first, second = stages_of()
    losses = []
    for num_samples in sizes:
        pair, keep, scale, target = nested_batch(num_samples)
        total = 0
        halves = zip(*(tensor.tensor_split(2) for tensor in (*pair, keep, scale, target["y"][0])), strict=True)
        for x, ids, kept, scaled, y in halves:
            output = second(first(Pair(x, ids), kept, "text", scale=scaled), scale=scaled)
            loss = loss_of(output, {"ids": ids, "y": (y,)}) * (len(x) / num_samples)
            loss.backward()
            total += loss.detach()
        losses.append(total)
    assert results[0][0] == results[1][0] == losses
    assert results[0][1] is None
    outputs = results[1][1]
    assert isinstance(outputs, Pair)
    assert torch.equal(outputs.ids, nested_batch(7)[0].ids)
    assert not outputs.x.requires_grad
    expected = dict(nn.Sequential(first, second).named_parameters())
    for name, gradient in gradients_of(results).items():
        torch.testing.assert_close(gradient, expected[name].grad, rtol=1e-12, atol=1e-14)


class Conjugated(nn.Module):
    """Makes what torch conjugates only where it is read."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 5, dtype=torch.float64))

    def forward(self, x):
        return torch.complex(x, self.weight * x).conj()


class Imaginary(nn.Module):
    """Takes the imaginary part, whose memory torch negates only where it is read."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 5, dtype=torch.complex128))

    def forward(self, x):
        return (x * self.weight).imag


def conjugated(group):
    pipe = Pipeline([Conjugated(), Imaginary()], group, "1f1b", 2, nn.functional.mse_loss)
    losses = [pipe.step(*conjugated_batch()[:1], target=conjugated_batch()[1]).loss for _ in range(2)]
    return losses, None, {name: p.grad for name, p in pipe.named_parameters()}, None


def conjugated_batch():
    inputs = torch.arange(20, dtype=torch.float64).reshape(4, 5) / 7
    return inputs, inputs.flip(0)


def test_what_torch_conjugates_or_negates_later_passes_as_what_it_stands_for(run):
    results = run(conjugated, 2)
    stages = [Conjugated(), Imaginary()]
    inputs, target = conjugated_batch()
    loss = nn.functional.mse_loss(stages[1](stages[0](inputs)), target)
    (2 * loss).backward()
    assert torch.stack(results[0][0]).tolist() == pytest.approx([loss.item()] * 2)
    expected = dict(nn.Sequential(*stages).named_parameters())
    for name, gradient in gradients_of(results).items():
        torch.testing.assert_close(gradient, expected[name].grad)


class Precise(nn.Module):
    """Leaves autocast, as some normalisations do: in its backward, the product must not be cast either."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6, dtype=dtype) / 3)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return x.to(self.weight.dtype) @ self.weight


def with_precise(dtype):
    return nn.Sequential(*make_model(4, dtype), Precise(dtype))


def in_dtype(group, dtype, autocast, schedule):
    pipe = Pipeline(with_precise(dtype), group, schedule, 2, nn.functional.mse_loss)
    inputs, target = make_batch(5, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = pipe.step(inputs, target=target).loss
    return loss, None, {name: p.grad for name, p in pipe.named_parameters()}, None


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float16, False), (torch.float32, True)],
)
def test_dtypes_and_autocast(dtype, autocast, schedule):
    """The single process does its backward outside of autocast, as torch says; a step does so by itself."""
    results = echelon.simulate(in_dtype, 2, (dtype, autocast, schedule), timeout=20.0, late_sends=True).results
    model = with_precise(dtype)
    total = 0
    for x, y in zip(*(tensor.tensor_split(2) for tensor in make_batch(5, dtype)), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = nn.functional.mse_loss(model(x), y)
        (loss * (len(x) / 5)).backward()
        total += loss.detach() * (len(x) / 5)
    for loss, *_ in results:
        assert loss.dtype == total.dtype
        assert torch.equal(loss, total)
    for name, gradient in gradients_of(results).items():
        assert gradient.dtype == dtype
        assert torch.equal(gradient, model.get_parameter(name).grad), name


def fewer_keyword_samples(group):
    pipe = Pipeline(stages_of(), group, "1f1b", 2, loss_of)
    pair, keep, scale, target = nested_batch(4)
    try:
        pipe.step(pair, keep, "text", scale=scale if group.rank == 0 else scale[:1].expand(2), target=target)
    except echelon.EchelonError as error:
        return str(error)
    return "no error"


def test_keyword_arguments_of_other_lengths_are_refused_on_every_rank():
    """One row for two: it would broadcast silently."""
    for message in echelon.simulate(fewer_keyword_samples, 2, timeout=20.0, late_sends=True).results:
        assert "keyword arguments of step(): expected 4 samples, as the inputs, got 2" in message


def metrics_of(output, target):
    return {"error": (output - target).abs().mean(), "wide": float(output.shape[1])}


def measured(group, replicas, reduction):
    mesh = echelon.Mesh(group, dp=replicas, pp=2)
    pipe = Pipeline(
        make_model(2),
        mesh["pp"],
        "1f1b",
        2,
        nn.functional.mse_loss,
        metrics=metrics_of,
        data_parallel=mesh["dp"] if replicas > 1 else None,
        loss_reduction=reduction,
    )
    inputs, target = (
        tensor.tensor_split([3])[mesh.coordinates["dp"]] if replicas > 1 else tensor for tensor in make_batch(8)
    )
    return pipe.step(inputs, target=target).metrics


@pytest.mark.parametrize(("replicas", "reduction"), [(1, "mean"), (2, "mean"), (1, "sum")])
def test_metrics_are_of_the_whole_batch_and_everywhere(run, replicas, reduction):
    inputs, target = make_batch(8)
    error = (make_model(2)(inputs) - target).abs().mean().item()
    times = 2 if reduction == "sum" else 1  # added up over two equal microbatches
    for found in run(measured, 2 * replicas, replicas, reduction):
        assert found == pytest.approx({"error": error * times, "wide": 6.0 * times}, rel=1e-12)


def test_metrics_on_a_device_are_read_at_the_end_of_the_step(monkeypatch):
    """A stand-in: every tensor is elsewhere."""
    kept, check = [], interpreter.check_metrics
    monkeypatch.setattr(loss, "is_here", lambda _: False)
    monkeypatch.setattr(interpreter, "check_metrics", lambda *given: kept.append(check(*given)) or kept[-1])
    read, then = echelon.simulate(measured, 2, (1, "mean"), timeout=20.0, late_sends=True).results
    assert [type(found["error"]) for found in kept] == [torch.Tensor] * 2
    assert not any(found["error"].requires_grad for found in kept)
    monkeypatch.undo()
    assert read == then == echelon.simulate(measured, 2, (1, "mean"), timeout=20.0, late_sends=True).results[0]


def bad_metrics(group):
    pipe = Pipeline(make_model(2), group, "1f1b", 2, nn.functional.mse_loss, metrics=lambda output, _: output)
    try:
        pipe.step(*make_batch(4)[:1], target=make_batch(4)[1])
    except echelon.EchelonError as error:
        return str(error)
    return "no error"


def test_metrics_that_are_no_numbers_are_refused():
    for message in echelon.simulate(bad_metrics, 2, timeout=20.0, late_sends=True).results:
        assert "metrics(output, target): expected a dict of numbers" in message


def part_frozen(group, frozen):
    model = make_model(4)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    pipe = Pipeline(model, group, "1f1b", 2, nn.functional.mse_loss, at=["2", "4", "6"])
    loss = pipe.step(make_batch(5)[0], target=make_batch(5)[1]).loss
    return loss, None, {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}, None


@pytest.mark.parametrize("frozen", [["0"], ["0", "2"], ["4"], ["6"], ["2", "6"]])
def test_stages_may_be_frozen(frozen):
    results = echelon.simulate(part_frozen, 4, (frozen,), timeout=20.0, late_sends=True).results
    loss, gradients = loss_and_gradients(make_model(4), make_batch(5), 2)
    got = gradients_of(results)
    assert {name.split(".")[0] for name in got} == {"0", "2", "4", "6"} - set(frozen)
    for name, gradient in got.items():
        assert torch.equal(gradient, gradients[name])
    assert all(torch.equal(result[0], loss) for result in results)


def other_number_of_stages(group, saved):
    num_layers = 6
    schedule, chunks = ("zb-v", 2) if group.world_size == 2 else ("1f1b", 1)
    pipe = Pipeline(make_model(num_layers), group, schedule, 4, nn.functional.mse_loss, num_chunks=chunks)
    if saved is not None:
        pipe.load_state_dict(saved)
    pipe.step(*make_batch(8)[:1], target=make_batch(8)[1])
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter -= parameter.grad
    return pipe.state_dict()


def test_state_dicts_fit_any_number_of_stages():
    saved = None
    model = make_model(6)
    for world_size in (3, 2, 1):
        parts = echelon.simulate(other_number_of_stages, world_size, (saved,), timeout=20.0, late_sends=True).results
        saved = {name: value for part in parts for name, value in part.items()}
        model.zero_grad()
        train_alone(model, make_batch(8), 4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= parameter.grad
        assert saved.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(saved[name], value, rtol=1e-12, atol=1e-14)


def misfit(group):
    pipe = Pipeline([make_model(1), make_model(1)], group, "1f1b", 2, nn.functional.mse_loss)
    saved = {name: value.clone() for name, value in pipe.state_dict().items()}
    wrong = {name: value + 1 for name, value in saved.items()} | {f"{group.rank}.0.bias": torch.zeros(3)}
    with pytest.raises(echelon.SizeMismatch, match=rf"shape of {group.rank}\.0\.bias: expected \[6\], got \[3\]"):
        pipe.load_state_dict(wrong)
    with pytest.raises(echelon.InvalidArgument, match=r"state_dict is 3 \(int\): give a dict"):
        pipe.load_state_dict(3)
    return all(torch.equal(value, saved[name]) for name, value in pipe.state_dict().items())


def test_a_state_dict_of_other_shapes_is_refused_by_name_before_anything_is_loaded():
    assert echelon.simulate(misfit, 2, timeout=20.0, late_sends=True).results == [True, True]


def from_meta(group):
    with torch.device("meta"):
        model = make_model_shape()
    pipe = Pipeline(model, group, "1f1b", 2, nn.functional.mse_loss)
    parameters = list(pipe.parameters())
    pipe.load_state_dict(make_model(2).state_dict())
    assert all(mine is now for mine, now in zip(parameters, pipe.parameters(), strict=True))
    loss = pipe.step(*make_batch(4)[:1], target=make_batch(4)[1]).loss
    return loss, None, {name: p.grad for name, p in pipe.named_parameters()}, None


def make_model_shape():
    layers = [layer for _ in range(2) for layer in (nn.Linear(6, 6, dtype=torch.float64), nn.Tanh())]
    return nn.Sequential(*layers)


def test_a_model_on_the_meta_device_is_trained_once_it_is_loaded():
    results = echelon.simulate(from_meta, 2, timeout=20.0, late_sends=True).results
    loss, gradients = loss_and_gradients(make_model(2), make_batch(4), 2)
    assert all(torch.equal(result[0], loss) for result in results)
    for name, gradient in gradients_of(results).items():
        assert torch.equal(gradient, gradients[name])


def other_norm(group):
    pipe = Pipeline(make_model(2), group, "1f1b", 2, nn.functional.mse_loss)
    pipe.step(*make_batch(4)[:1], target=make_batch(4)[1])
    norms = [pipe.clip_grad_norm_(1e9, norm_type) for norm_type in (1.0, 3.5, float("inf"))]
    if group.rank == 1:
        next(pipe.parameters()).grad.fill_(float("nan"))
    before = [p.grad.clone() for p in pipe.parameters()]
    with pytest.raises(echelon.NotFinite, match="the norm of all gradients is nan"):
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert all(
        torch.equal(p.grad.nan_to_num(), was.nan_to_num()) for p, was in zip(pipe.parameters(), before, strict=True)
    )
    with pytest.raises(echelon.UnsupportedOp, match=r"norm_type=0.0: give a number above 0"):
        pipe.clip_grad_norm_(1.0, 0)
    norms += [pipe.clip_grad_norm_(1.0, float("inf")), pipe.clip_grad_norm_(1.0)]
    return norms, [bool(p.grad.isnan().all()) for p in pipe.parameters()]


def test_other_norms_are_those_of_one_process_and_nan_is_not_hidden():
    model = make_model(2)
    train_alone(model, make_batch(4), 2)
    expected = [nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type) for norm_type in (1.0, 3.5, float("inf"))]
    for norms, spoilt in echelon.simulate(other_norm, 2, timeout=20.0, late_sends=True).results:
        torch.testing.assert_close(torch.stack(norms[:3]), torch.stack(expected))
        assert all(norm.isnan() for norm in norms[3:])
        assert all(spoilt)


def step_by_default_on(group, device):
    model, batch = make_model(2), make_batch(4)
    with torch.device(device):
        pipe = Pipeline(model, group, "1f1b", 2, nn.functional.mse_loss, metrics=lambda output, _: {"n": len(output)})
        came = pipe.step(*batch[:1], target=batch[1])
        return came.loss.item(), came.metrics, pipe.clip_grad_norm_(1.0).item()


def test_the_default_device_of_the_caller_does_not_matter():
    here, there = (
        echelon.simulate(step_by_default_on, 2, (device,), timeout=20.0, late_sends=True).results
        for device in ("cpu", "meta")
    )
    assert there == here
