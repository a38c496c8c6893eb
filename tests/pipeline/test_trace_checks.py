"""A trace has the operations of one forward alone: what it would leave out or repeat is refused, or kept."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import echelon
from echelon.pipeline import Pipeline, split

pytestmark = pytest.mark.filterwarnings("ignore:.*assigned during export")


class Model(nn.Module):
    """Three layers; the one in the middle is given."""

    def __init__(self, middle):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 4), middle, nn.Linear(4, 4)
        self.double()

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class Calls(nn.Module):
    """Calls a function of itself and its input."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


class Reversed(torch.autograd.Function):
    """Identity whose gradient is reversed, as for domain adaptation."""

    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        return -gradient


def with_hook(_, x):
    y = 2 * x
    y.register_hook(lambda gradient: 3 * gradient)
    return y


def counting(self, x):
    self.count += 1
    return x * self.count


def replacing(self, x):
    self.scale = self.scale * 0.5
    return x * self.scale


def remembering(self, x):
    self.output = x.detach()  # never read
    self.size = x.shape[0]
    return torch.tanh(x)


def with_buffer(function, value):
    module = Calls(function)
    module.register_buffer("scale", value)
    return module


def hooked(register):
    module = nn.Linear(4, 4)
    register(module)
    return module


@pytest.mark.parametrize(
    ("middle", "words"),
    [
        (Calls(lambda _, x: Reversed.apply(x)), "computes gradients by Reversed, a torch.autograd.Function"),
        (Calls(lambda _, x: checkpoint(torch.tanh, x, use_reentrant=True)), "use use_reentrant=False"),
        (Calls(with_hook), "calls Tensor.register_hook in its forward"),
        (hooked(lambda module: module.register_full_backward_hook(print)), "layer 'middle' has a backward hook"),
        (hooked(lambda module: module.register_full_backward_pre_hook(print)), "layer 'middle' has a backward hook"),
        (Calls(counting, count=0), "changes middle.count in its forward.* keep the number in a buffer"),
        (Calls(replacing, scale=torch.ones(())), "changes middle.scale in its forward.* register it as a buffer"),
        (with_buffer(replacing, torch.ones(())), "changes middle.scale in its forward.* by scale.copy_()"),
        (Calls(lambda _, x: x * random.random()), "draws random numbers by Python's random"),
        (Calls(lambda _, x: x * np.random.random()), "draws random numbers by Python's random or by NumPy"),
    ],
)
def test_what_a_trace_would_leave_out_or_repeat_is_refused(middle, words):
    model = Model(middle)
    with torch.no_grad(), pytest.raises(echelon.PartitionError, match=words) as caught:
        split(model, at=["last"], example=(torch.ones(2, 4, dtype=torch.float64),))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("or pass a list with one module per stage")


@torch.library.custom_op("echelon_tests::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


tripled.register_fake(torch.empty_like)
tripled.register_autograd(lambda _, gradient: -gradient)


@pytest.mark.parametrize(
    "middle",
    [
        Calls(lambda _, x: tripled(x)),
        Calls(lambda _, x: checkpoint(torch.tanh, x, use_reentrant=False)),
        Calls(remembering, output=torch.zeros(()), size=0),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        hooked(lambda module: module.register_forward_hook(lambda _, __, output: 2 * output)),
    ],
)
def test_what_a_trace_keeps_is_trained(middle):
    model, x = Model(middle), torch.ones(3, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    first, last = split(model, at=["last"], example=(x,)).modules
    last(first(x)).square().sum().backward()
    plain(x).square().sum().backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(parameter.grad, expected.grad, rtol=1e-12)


def frozen_norm():
    model = Model(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).double())
    model.middle[0].running_var.fill_(4)
    model.middle.eval()
    return model


@pytest.mark.parametrize("make", [frozen_norm, lambda: frozen_norm().eval()])
def test_layers_keep_the_mode_that_they_had(make):
    """Fine-tuning leaves a BatchNorm in evaluation mode; from_pretrained returns models in it."""
    inputs = torch.arange(24, dtype=torch.float64).reshape(6, 4).sin()

    def train(group):
        model = make()
        model(inputs)  # in training mode a BatchNorm would count
        pipe = Pipeline(model, group, "1f1b", 2, nn.functional.mse_loss, at=["last"], example=(inputs,))
        return (
            pipe.step(inputs, target=inputs).loss,
            pipe.state_dict(),
            [stage.module.training for stage in pipe.stages],
        )

    model = make()
    expected = nn.functional.mse_loss(model(inputs), inputs)
    for loss, state, modes in echelon.simulate(train, 2).results:
        assert torch.allclose(loss, expected, rtol=1e-12)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
        assert modes == [model.training]


def test_train_and_eval_reach_all_layers():
    x = torch.arange(24, dtype=torch.float64).reshape(6, 4).sin()
    model = frozen_norm()
    first, _ = split(model, at=["last"], example=(x,)).modules
    first.train()
    first(x)
    assert model.middle[0].num_batches_tracked == 1
    assert torch.equal(first.eval()(x), model.eval().middle(model.first(x)))


def test_a_mode_of_the_model_alone_is_refused():
    """`model.eval()` does not reach the stages: dropout would go on."""
    x = torch.ones(3, 4, dtype=torch.float64)
    model = Model(nn.Dropout(0.5))
    parts = split(model, at=["last"], example=(x,)).modules
    model.eval()
    for part in parts:
        with pytest.raises(echelon.UnsupportedOp, match=r"put into evaluation mode after it was cut.* call eval\(\)"):
            part(x)
        assert torch.isfinite(part.eval()(x)).all()
    expected = model(x)
    model.train()
    assert torch.equal(parts[1](parts[0](x)), expected)
    torch.manual_seed(0)
    assert parts[0].train()(x).eq(0).any()
