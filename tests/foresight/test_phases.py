"""Phases of operations, and the FLOPs of a model that follow from them."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

import echelon
from echelon.foresight.trace import Kernel
from echelon.pipeline import Pipeline, schedules

SIZE = 64
PRODUCT = 2 * SIZE**3


def products(program, *args):
    """Returns the products of a step by phase, and the FLOPs of its model, in products of square matrices."""
    seen = echelon.foresee(program, 1, args)
    found = Counter()
    for entry in seen.traces[0].entries:
        if isinstance(entry, Kernel) and entry.flops:
            found[entry.phase] += entry.flops / PRODUCT
    return found, seen.played.model_flops / PRODUCT


def layer():
    return nn.Linear(SIZE, SIZE, bias=False).cuda(), torch.ones(SIZE, SIZE, device="cuda")


# Optimizers


def trained(kind, by_closure):
    model, x = layer()
    optimizer = kind(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    for _ in range(2):
        if by_closure:
            optimizer.step(closure=closure)
        else:
            closure()
            optimizer.step()


def test_products_of_an_optimizer_are_not_those_of_the_model():
    """Muon multiplies matrices."""
    found, model = products(trained, torch.optim.Muon, False)
    assert found["optimizer"] > 1
    assert (found["forward"], found["backward"], model) == (1, 1, 2)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS, torch.optim.Muon])
def test_a_closure_of_an_optimizer_is_forward_and_backward(kind):
    found, model = products(trained, kind, True)
    assert found["forward"] == found["backward"] >= 1
    assert model == found["forward"] + found["backward"]


def test_gradients_that_a_closure_makes_have_their_kind():
    seen = echelon.foresee(trained, 1, (torch.optim.LBFGS, True))
    assert seen.memory[0].kinds_at_peak["gradients"] >= 4 * SIZE**2


# Gradients of gradients


def penalty(kind):
    model, x = layer()
    optimizer = torch.optim.SGD(model.parameters())
    x.requires_grad_()

    def run(x):
        if not kind:
            return model(x).tanh()
        return checkpoint(lambda x: model(x).tanh(), x, use_reentrant=False)

    for _ in range(2):
        (gradient,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        gradient.square().mean().backward()
        optimizer.step()


def test_a_backward_that_makes_a_graph_is_no_recomputation():
    # One for the gradient. Both of its factors have gradients, and so have both factors of the forward.
    assert products(penalty, "") == ({"forward": 1, "backward": 5}, 6)


def test_checkpointing_repeats_a_forward_in_a_backward_that_makes_a_graph():
    found, model = products(penalty, "checkpointed")
    assert (found, model) == ({"forward": 1, "recompute": 2, "backward": 5}, 6)


def nested():
    """Penalty on gradients inside of a checkpointed function."""
    model, x = layer()
    optimizer = torch.optim.SGD(model.parameters())
    x.requires_grad_()

    def run(x):
        (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return gradient.square().mean()

    for _ in range(2):
        checkpoint(run, x, use_reentrant=False).backward()
        optimizer.step()


def test_a_backward_inside_of_a_checkpointed_function_is_repeated():
    # The gradient inside needs the forward once more, and the backward needs both.
    assert products(nested) == ({"forward": 1, "recompute": 3, "backward": 5}, 6)


def functional():
    model, x = layer()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        gradient = torch.func.grad(lambda weight: F.linear(x, weight).square().sum())(model.weight.detach())
        model.weight.grad = gradient
        optimizer.step()


def test_a_gradient_of_torch_func_is_no_recomputation():
    assert products(functional) == ({"other": 1, "backward": 1}, 2)


class Squared(torch.autograd.Function):
    """Formula in Python."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ x.T + x.T @ gradient


class Repeated(torch.autograd.Function):
    """Checkpointing as in other libraries."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, gradient)
        return None, x.grad


def formula(makes_graph):
    model, x = layer()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        Squared.apply(model(x)).sum().backward(create_graph=makes_graph)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("makes_graph", [False, True])
def test_a_formula_in_python_is_no_recomputation(makes_graph):
    assert products(formula, makes_graph) == ({"forward": 1, "other": 1, "backward": 3}, 5)


def repeated():
    model, x = layer()
    optimizer = torch.optim.SGD(model.parameters())
    x.requires_grad_()
    for _ in range(2):
        Repeated.apply(model, x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_checkpointing_of_other_libraries_repeats_a_forward():
    assert products(repeated) == ({"forward": 1, "recompute": 1, "backward": 2}, 3)


def pipelined(group):
    stages = [lambda: nn.Linear(SIZE, SIZE, bias=False).cuda()] * 2
    pipe = Pipeline(stages, group, schedules.build("1f1b", 2, 2), loss_fn=lambda out, _: out.sum(), recompute=True)
    optimizer = torch.optim.SGD(pipe.parameters())
    x = torch.ones(2 * SIZE, SIZE, device="cuda")
    for _ in range(2):
        pipe.step(x, target=x)
        optimizer.step()


def test_a_stage_of_a_pipeline_that_recomputes_repeats_its_forward():
    traces = echelon.foresee(pipelined, 2).traces
    found = Counter(entry.phase for entry in traces[0].entries if isinstance(entry, Kernel) and entry.flops)
    assert found == {"forward": 2, "recompute": 2, "backward": 2}
