"""Stages that are more than layers: recurrent, with formulas of their own, compiled, and what passes between them."""

import warnings

import pytest
import torch
from torch import nn

from echelon.pipeline import Pipeline

SAMPLES = (8, 6)
"""Of the two steps; 4 microbatches are of other sizes in the second."""


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return Product.apply(x, self.weight)


class Recurrent(nn.Module):
    """Passes on several tensors, some of them in a tuple, and plain data."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x):
        output, (hidden, cell) = self.lstm(x.unsqueeze(1))
        return output.squeeze(1), (hidden.transpose(0, 1), {"cell": cell}), True, 3, None, x > 0


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, state, flag, count, nothing, mask):
        assert flag is True
        assert type(count) is int
        assert nothing is None
        assert mask.dtype == torch.bool
        assert not state[1]["cell"].isnan().any()
        return self.layer(x * mask) * count + state[0][:, 0]


def make_stages(is_compiled):
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), Custom(), Recurrent(), Takes()]
    if is_compiled:
        layers = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6))
        stages[1] = torch.compile(layers, backend="aot_eager", dynamic=False)
    return stages


def batch_of(num_samples):
    inputs = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(num_samples))
    return inputs, inputs.flip(0)


def train(group, schedule, is_compiled):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = Pipeline(make_stages(is_compiled), group, schedule, 4, nn.functional.mse_loss)
        losses = [pipe.step(inputs, target=target).loss for inputs, target in map(batch_of, SAMPLES)]
    said = [str(warning.message) for warning in caught if "as a whole" in str(warning.message)]
    return losses, {name: parameter.grad for name, parameter in pipe.named_parameters()}, said


def train_alone(is_compiled):
    stages = nn.ModuleList(make_stages(is_compiled))
    losses = []
    for inputs, target in map(batch_of, SAMPLES):
        total = 0
        for x, y in zip(inputs.tensor_split(4), target.tensor_split(4), strict=True):
            value = stages[2](stages[1](stages[0](x)))
            loss = nn.functional.mse_loss(stages[3](*value), y) * (len(x) / len(inputs))
            loss.backward()
            total += loss.detach()
        losses.append(total)
    return losses, {name: parameter.grad for name, parameter in stages.named_parameters()}


def assert_as_alone(results, is_compiled, stages_as_a_whole):
    losses, gradients = train_alone(is_compiled)
    got = {name: gradient for _, rank, _ in results for name, gradient in rank.items()}
    assert got.keys() == gradients.keys()
    for name, gradient in gradients.items():
        if is_compiled:  # its code may be another for microbatches of another size
            torch.testing.assert_close(got[name], gradient)
        else:
            assert torch.equal(got[name], gradient), name
    for rank_losses, *_ in results:
        torch.testing.assert_close(rank_losses, losses, rtol=1e-6 if is_compiled else 0, atol=0)
    said = [line for *_, lines in results for line in lines]
    assert [line.partition(" does")[0] for line in said] == [f"stage {stage}" for stage in stages_as_a_whole]
    return said


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v", "dualpipe-v"])
def test_recurrent_layers_formulas_and_plain_data(run, schedule):
    results = run(train, 2, schedule, False)
    said = assert_as_alone(results, False, [1, 2] if schedule != "interleaved-1f1b" else [])
    if said:
        assert "1 (Custom) computes all of its gradients at once (ProductBackward)" in said[0]
        assert "2.lstm (LSTM) computes all of its gradients at once" in said[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks there itself
def test_a_compiled_stage(pool):
    said = assert_as_alone(pool.run(train, 2, "zb-v", True), True, [1, 2])
    assert "_orig_mod.0 (Linear)" in said[0]
